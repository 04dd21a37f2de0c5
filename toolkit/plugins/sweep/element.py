"""One element of a sweep's job array: what the batch script starts. It makes its run's folder, and supervises the run.

An element that Slurm starts again finds its run by its place in the list. So does one of an array that runs failed
points again: it takes the run over as `toolkit resume` does.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from toolkit.base import fsio, logs
from toolkit.base.errors import DamagedFileError
from toolkit.files.run_files import RunResult, RunState
from toolkit.files.rundir import RunDir
from toolkit.plugins.sweep.sweep_folder import Array, SweepDir
from toolkit.run.job import nodes
from toolkit.run.records import ownership, stop_request
from toolkit.run.submission.handle import attach

#: A stopped run's job may take this long to end after its result is written; it is asked for this often.
ENDING_S, ASK_EVERY_S = 30.0, 5.0

log = logs.get(__name__)


def main(points_path: str, index: int, token: str | None) -> None:
    """Supervise the run of the point at ``index`` of this list to its end.

    A run that belongs to another job is left alone.
    """
    from toolkit.run.supervise.entry import supervise

    fsio.keep_private()
    logs.setup("sweep")
    path = Path(points_path)
    run = claim(Array(SweepDir(path.parent.parent), int(path.stem)), index, token)
    if run is not None:
        supervise(str(run.path), "slurm")


def claim(array: Array, index: int, token: str | None) -> RunDir | None:
    """Return the run of a point, made if it is new. None if this job is not to run it."""
    record = array.record()
    if record is not None and record.token != token:
        log.warning(
            "the points of %s were submitted again, by another job: nothing is left to do here", array.points_path
        )
        return None
    point = array.by_index().get(index)
    if point is None:
        raise DamagedFileError(f"{array.points_path}, line {index + 1}: the point is missing")
    if array.sweep.was_removed(point):
        log.warning("run %s was removed after it had begun: it is not run again", point.run)
        return None
    run = array.sweep.make_run(point, time.time())
    owner = run.owner()
    # `toolkit sweep stop` writes a result, and its request, also for a run that no job has had.
    if owner.token == token if owner is not None else run.result() is None:
        return run
    submitted = None if record is None else record.submitted
    return run if token is not None and _take_over(run, token, submitted) else None


def _take_over(run: RunDir, token: str, submitted: float | None) -> bool:
    """Take over a run that has ended, for this job's submission. False if it is to be left alone."""
    before, result = ownership.number_of(run), run.result()
    if result is not None and result.state is RunState.COMPLETED:
        log.info("run %s is completed: nothing is left to do here", run.id)
        return False
    if not _has_ended(run, result):
        log.info("run %s belongs to another job, which has not ended: nothing is left to do here", run.id)
        return False
    ownership.submit_as(run, "slurm", ownership.take(run, before), token)
    # `toolkit sweep stop` may have come while this job waited, or started.
    stop_request.clear(run, submitted)
    nodes.forget(run)
    run.clear_result()
    return True


def _has_ended(run: RunDir, result: RunResult | None) -> bool:
    """True if no job of the run is left. One that has just written its result is given some time to end."""
    # `toolkit sweep stop` may have written the result for a job that was starting.
    is_certain = result is not None and (result.state is not RunState.STOPPED or not ownership.jobs_of(run))
    if is_certain:
        return True
    handle, deadline = attach(run), time.monotonic() + (0.0 if result is None else ENDING_S)
    while not (is_over := handle.is_over()) and time.monotonic() < deadline:
        time.sleep(ASK_EVERY_S)
    return is_over


if __name__ == "__main__":
    main(sys.argv[1], int(os.environ.get("SLURM_ARRAY_TASK_ID") or 0), os.environ.get(ownership.TOKEN_VARIABLE))
