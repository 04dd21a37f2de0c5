"""Runs points of a sweep again, and ends a sweep."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence

from toolkit.base.errors import RequestError
from toolkit.files.run_files import RunState, state_word
from toolkit.files.rundir import RunDir
from toolkit.plugins.sweep import local, submission, sweep_folder
from toolkit.plugins.sweep.states import PointStanding
from toolkit.plugins.sweep.sweep_folder import SweepDir
from toolkit.run.attempt.journal import write_ended
from toolkit.run.records import stop_request, submitted_run
from toolkit.run.records.stop_request import Intent
from toolkit.run.records.submitted_run import RunJobs
from toolkit.run.submission.handle import attach
from toolkit.slurm import cluster_name
from toolkit.slurm.commands import Slurm, SlurmCommands
from toolkit.slurm.jobs import JobStatus, base_id
from toolkit.slurm.states import Phase, phase


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
        jobs += [job for array in submission.unsent(sweep) for job in submission.submit_array(array, record, slurm)]
        for group in submission.alike(points):
            for batch in submission.batches(group, size):
                array = submission.add_list(sweep, record, batch, "slurm", is_array=size > 1)
                jobs += submission.submit_array(array, record, slurm)
    return jobs


def stop(sweep: SweepDir, standings: Sequence[PointStanding], slurm: SlurmCommands | None = None) -> tuple[int, int]:
    """Cancel the points that wait, and stop those at work; return how many of each.

    A point at work commits a checkpoint and ends. Slurm is called at most four times, for all of them. Raises
    RequestError where their jobs are on another cluster.
    """
    waiting = [each for each in standings if state_word(each.state) in (RunState.QUEUED, RunState.REQUEUED)]
    working = [each for each in standings if state_word(each.state) in _AT_WORK]
    jobs = {each.point.id: _jobs_of(each) for each in (*waiting, *working) if each.executor == "slurm"}
    _refuse_elsewhere(sweep, [job for of_point in jobs.values() for job in of_point])
    # The requests come first: a job that starts at this moment finds its own.
    for each in (*waiting, *working):
        if each.row:
            stop_request.ask(each.run, Intent.STOP)
    for each in working:
        if each.executor != "slurm":
            attach(each.run).stop()
    answers: dict[str, dict[str, JobStatus]] = {}
    if any(jobs.values()):
        slurm = slurm or Slurm()
        answers = _ask(jobs, slurm)
        if waiting_jobs := [job for each in waiting for job in answers.get(each.point.id, ())]:
            slurm.cancel_waiting(sorted({*map(base_id, waiting_jobs)}))
            # A job may have started before it could be cancelled.
            answers |= _ask({each.point.id: jobs.get(each.point.id, []) for each in waiting}, slurm)
        for each in (*working, *waiting):
            if any(map(_is_running, answers.get(each.point.id, {}).values())):
                # Perhaps so recently that it has not made its run yet.
                stop_request.ask(sweep.make_run(each.point, time.time()), Intent.STOP)
    for each in waiting:
        if all(status.is_over for status in answers.get(each.point.id, {}).values()):
            has_job = bool(jobs.get(each.point.id))
            _end_without_job(each.run if has_job else sweep.make_run(each.point, time.time()), each.executor)
    return len(waiting), len(working)


def withdraw_retry(run: RunDir) -> bool:
    """Withdraw the submission by which the sweep is to start an ended run again. False if there is none that waits."""
    retried = sweep_folder.retry_of(run)
    if retried is None:
        return False
    array, job = retried
    if job is None:  # without Slurm, or not sent yet
        if not sweep_folder.is_again(run, array, array.record()):
            return False
        (run.path / "result.json").touch()  # the process that starts the points goes by its time
        return True
    slurm = Slurm()
    waiting = [id_ for id_, status in job.ask(slurm.show_jobs).items() if status is not None and not status.is_over]
    for id_ in waiting:
        slurm.cancel(id_)
    return bool(waiting)


def _refuse_elsewhere(sweep: SweepDir, jobs: Sequence[RunJobs]) -> None:
    """Raise RequestError if one of the jobs is on another cluster."""
    here = cluster_name.name_here() if any(job.cluster for job in jobs) else ""
    there = next((job.cluster for job in jobs if job.is_elsewhere(here)), None)
    if there is not None:
        raise RequestError(
            f"sweep {sweep.name} has jobs on the cluster {there}, and this is {here}: "
            f"`toolkit sweep stop {sweep.name}` there stops it"
        )


def _ask(jobs: Mapping[str, Sequence[RunJobs]], slurm: SlurmCommands) -> dict[str, dict[str, JobStatus]]:
    """Return the jobs of each point that Slurm has, with their status. Asks once."""
    wanted = {id_ for of_point in jobs.values() for job in of_point for id_ in job.ids}
    found = slurm.show_jobs(sorted(wanted)) if wanted else {}
    answers: dict[str, dict[str, JobStatus]] = {}
    for point, of_point in jobs.items():
        known = {id_: status for job in of_point for id_, status in job.among(found).items()}
        answers[point] = {id_: status for id_, status in known.items() if status is not None}
    return answers


def _end_without_job(run: RunDir, executor: str) -> None:
    """Write the result of a run that no job will write.

    A point of this machine needs one, or it would be started. A process that is being started is stopped.
    """
    is_here = executor != "slurm"
    if run.result() is None:
        if not (is_here and run.owner() is not None) and run.config.exists():
            write_ended(run, RunState.STOPPED, "stopped while it waited in the queue")
    elif is_here:  # the result is of before its retry, and the process here starts what has an older one
        (run.path / "result.json").touch()
    if is_here and run.owner() is not None:  # its process is being started, perhaps since this moment
        stop_request.ask(run, Intent.STOP)
        with contextlib.suppress(RequestError):  # it finds the request
            attach(run).stop()


_AT_WORK = (RunState.STARTING, RunState.RUNNING, RunState.RESTARTING, RunState.STOPPING)


def _jobs_of(each: PointStanding) -> list[RunJobs]:
    """Return the jobs that the files of the point's run name, and that of its list."""
    return [job for job in (submitted_run.of(each.run), each.job) if job is not None and job.ids]


def _is_running(status: JobStatus) -> bool:
    return phase(status.state) is Phase.RUNNING and status.state != "COMPLETING"
