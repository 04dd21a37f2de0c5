"""Runs points of a sweep again, and ends a sweep."""

from __future__ import annotations

import time
from collections.abc import Sequence

from toolkit.errors import RequestError
from toolkit.launch.record import ownership, stop_request
from toolkit.launch.record.journal import write_ended
from toolkit.launch.record.stop_request import Intent
from toolkit.launch.submission.handle import attach
from toolkit.run_files import RunState
from toolkit.slurm.commands import Slurm, SlurmCommands
from toolkit.slurm.jobs import base_id
from toolkit.sweep import local, submission
from toolkit.sweep.folder import SweepDir
from toolkit.sweep.states import PointStanding


def retry(sweep: SweepDir, again: Sequence[PointStanding], slurm: SlurmCommands | None = None) -> list[str]:
    """Submit these points again, each to go on from its run's last checkpoint; return the ids of the arrays."""
    record = sweep.record()
    if record is None:
        raise RequestError(f"sweep {sweep.name}: {sweep.path / 'sweep.json'} is missing; submit the sweep again")
    points = [each.point for each in again]
    newest = [each for array in reversed(sweep.arrays()) if (each := array.record()) is not None]
    if newest and newest[0].executor == "local":
        with sweep.locked():
            if points:
                submission.add_list(sweep, record, points, "local", is_array=False)
        local.start(sweep)
        return []
    slurm = slurm or Slurm()
    size = slurm.settings().max_array_size
    jobs = []
    with sweep.locked():
        jobs += [submission.submit_array(array, record, slurm) for array in submission.unsent(sweep)]
        for batch in submission.batches(points, size):
            array = submission.add_list(sweep, record, batch, "slurm", is_array=size > 1)
            jobs.append(submission.submit_array(array, record, slurm))
    return jobs


def stop(sweep: SweepDir, standings: Sequence[PointStanding], slurm: SlurmCommands | None = None) -> tuple[int, int]:
    """Cancel the points that wait, and have the others commit a checkpoint and end; return how many of each.

    Slurm is called at most twice, for all of them.
    """
    waiting = [each for each in standings if each.state.split()[0] in (RunState.QUEUED, RunState.REQUEUED)]
    working = [each for each in standings if each.row and each.state.split()[0] in _AT_WORK]
    # The requests come first: a job that starts at this moment finds its own.
    for each in (*waiting, *working):
        if each.row:
            stop_request.ask(each.run, Intent.STOP)
    signalled = [each for each in working if each.row["executor"] == "slurm"]
    for each in working:
        if each not in signalled:
            attach(each.run).stop()
    cancelled = {base_id(job) for each in waiting for job in [each.job_id, *ownership.jobs_of(each.run)] if job}
    if cancelled or signalled:
        slurm = slurm or Slurm()
        if cancelled:
            slurm.cancel_waiting(sorted(cancelled))
        if signalled:
            slurm.signal_batch([ownership.jobs_of(each.run)[0] for each in signalled], "USR1")
    # Nothing else would write these results. A point of this machine needs one to be left alone.
    for each in waiting:
        run = each.run if each.job_id else sweep.make_run(each.point, time.time())
        if run.config.exists() and run.result() is None:
            write_ended(run, RunState.STOPPED, "stopped while it waited in the queue")
    return len(waiting), len(working)


_AT_WORK = (RunState.STARTING, RunState.RUNNING, RunState.RESTARTING, RunState.STOPPING)
