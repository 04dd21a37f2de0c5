"""Runs points of a sweep again, and ends a sweep."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from toolkit.errors import RequestError
from toolkit.launch.record import ownership, stop_request
from toolkit.launch.record.journal import write_ended
from toolkit.launch.record.stop_request import Intent
from toolkit.launch.record.sweep_folder import SweepDir
from toolkit.launch.submission.handle import attach
from toolkit.run_files import RunState
from toolkit.rundir import RunDir
from toolkit.slurm.commands import Slurm, SlurmCommands
from toolkit.slurm.jobs import JobStatus, base_id
from toolkit.slurm.states import Phase, phase
from toolkit.sweep import local, submission
from toolkit.sweep.states import PointStanding


def retry(sweep: SweepDir, again: Sequence[PointStanding], slurm: SlurmCommands | None = None) -> list[str]:
    """Submit these points again and return the ids of the arrays.

    Each goes on from its run's last checkpoint. Raises RequestError for a sweep without its record.
    """
    record = sweep.record()
    if record is None:
        raise RequestError(f"sweep {sweep.name}: {sweep.path / 'sweep.json'} is missing; submit the sweep again")
    points = [each.point for each in again]
    # The points run where the newest list of the sweep ran.
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
        # Complete an interrupted submission first.
        jobs += [submission.submit_array(array, record, slurm) for array in submission.unsent(sweep)]
        for group in submission.alike(points):
            for batch in submission.batches(group, size):
                array = submission.add_list(sweep, record, batch, "slurm", is_array=size > 1)
                jobs.append(submission.submit_array(array, record, slurm))
    return jobs


def stop(sweep: SweepDir, standings: Sequence[PointStanding], slurm: SlurmCommands | None = None) -> tuple[int, int]:
    """Cancel the points that wait, and stop those at work; return how many of each.

    A point at work commits a checkpoint and ends. Slurm is called at most three times, for all of them.
    """
    waiting = [each for each in standings if each.state.split()[0] in (RunState.QUEUED, RunState.REQUEUED)]
    working = [each for each in standings if each.state.split()[0] in _AT_WORK]
    # The requests come first: a job that starts at this moment finds its own.
    for each in (*waiting, *working):
        if each.row:
            stop_request.ask(each.run, Intent.STOP)
    for each in working:
        if each.executor != "slurm":
            attach(each.run).stop()
    jobs = {each.point.id: _jobs_of(each) for each in waiting if each.executor == "slurm"}
    all_jobs = sorted({job for of_point in jobs.values() for job in of_point})
    signalled = [of_point[0] for each in working if each.executor == "slurm" and (of_point := _jobs_of(each))]
    answers: Mapping[str, JobStatus | None] = {}
    if all_jobs or signalled:
        slurm = slurm or Slurm()
        if all_jobs:
            slurm.cancel_waiting(sorted({base_id(job) for job in all_jobs}))
            # The standings are some seconds old: a job may have started before it could be cancelled.
            answers = slurm.show_jobs(all_jobs)
        for each in waiting:
            running = [job for job in jobs.get(each.point.id, []) if _is_running(answers[job])]
            if running:  # perhaps so recently that it has not made its run yet
                stop_request.ask(sweep.make_run(each.point, time.time()), Intent.STOP)
            signalled += running
        if signalled:
            slurm.signal_batch(signalled, "USR1")
    for each in waiting:
        of_point = jobs.get(each.point.id, [])
        if all((status := answers[job]) is None or status.is_over for job in of_point):
            _end_without_job(each.run if of_point else sweep.make_run(each.point, time.time()), each.executor)
    return len(waiting), len(working)


def _end_without_job(run: RunDir, executor: str) -> None:
    """Write the result of a run that no job will write.

    A point of this machine needs one, or it would be started. A process that is being started is stopped.
    """
    is_here = executor != "slurm"
    if run.result() is None:
        if not (is_here and ownership.read(run) is not None) and run.config.exists():
            write_ended(run, RunState.STOPPED, "stopped while it waited in the queue")
    elif is_here:  # the result is of before its retry, and the process here starts what has an older one
        (run.path / "result.json").touch()
    if is_here and ownership.read(run) is not None:  # its process is being started, perhaps since this moment
        stop_request.ask(run, Intent.STOP)
        with contextlib.suppress(RequestError):  # it finds the request
            attach(run).stop()


_AT_WORK = (RunState.STARTING, RunState.RUNNING, RunState.RESTARTING, RunState.STOPPING)


def _jobs_of(each: PointStanding) -> list[str]:
    """Return the job that the point has, then the others that its run's files name."""
    return list(dict.fromkeys(job for job in (each.job_id, *ownership.jobs_of(each.run)) if job is not None))


def _is_running(status: JobStatus | None) -> bool:
    return status is not None and phase(status.state) is Phase.RUNNING and status.state != "COMPLETING"
