"""Runs the points of a sweep on this machine, some at a time. A process of its own, which outlives the terminal.

It keeps nothing in memory that the files do not say: killed, and started again, it goes on.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

from toolkit import config as configs
from toolkit.base import fsio, logs, outages
from toolkit.base.errors import TakenError, ToolkitError
from toolkit.files.run_files import RunState
from toolkit.plugins.sweep import sweep_folder
from toolkit.plugins.sweep.sweep_folder import Point, SweepDir
from toolkit.run.attempt.journal import write_ended
from toolkit.run.prepare import snapshot
from toolkit.run.records import ownership
from toolkit.run.submission import executors
from toolkit.run.submission.handle import Run, attach
from toolkit.run.submission.resume import resume

LOOK_EVERY_S = 0.5
#: Errors of a full disk, and of a file server that is away for a moment: they pass.
PASSING = (*outages.FULL, errno.EIO, errno.ESTALE)

log = logs.get(__name__)


def start(sweep: SweepDir) -> None:
    """Start the process that runs the sweep's points here. A second one ends at once."""
    path = sweep.path / "logs" / "local.log"
    with os.fdopen(fsio.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as output:
        subprocess.Popen(
            [sys.executable, "-m", "toolkit.plugins.sweep.local", str(sweep.path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=snapshot.home_of(sweep.path),
        )


def work(sweep: SweepDir) -> None:
    """Run all points of the sweep that are for this machine, until all have ended."""
    while True:
        try:
            if not _waiting(sweep) or (fd := sweep.local_lock()) is None:
                return
            try:
                _run_all(sweep)
            finally:
                os.close(fd)
            # Look again: a submitter that has added points found the lock taken, and some could not be started.
            time.sleep(LOOK_EVERY_S)
        except OSError as error:
            if error.errno not in PASSING:
                raise
            log.error("%s: tried again: %s", sweep.path, error)
            time.sleep(outages.RETRY_EVERY_S)


def _run_all(sweep: SweepDir) -> None:
    active: list[Run] = []
    while True:
        active = [run for run in active if run.dir.result() is None and not run.is_over()]
        for point in _waiting(sweep):
            run = sweep.run_of(point)
            if any(each.dir == run for each in active):
                continue
            # At most as many at a time as were asked for, or else as this machine has CPUs for.
            record = sweep.record()
            if record is not None and record.max_running is not None:
                limit = record.max_running
            else:
                cluster = configs.load_config(sweep.base, site=False).cluster
                limit = max(1, len(os.sched_getaffinity(0)) // (cluster.tasks_per_node * cluster.cpus_per_task))
            if len(active) >= limit:
                break
            if (started := _start(sweep, point)) is not None:
                active.append(started)
        if not active:
            return
        time.sleep(LOOK_EVERY_S)


def _waiting(sweep: SweepDir) -> list[Point]:
    """Return the points that have not ended since they were submitted last."""
    points = []
    for point, array, _ in sweep_folder.newest(sweep.arrays()).values():
        record = array.record()
        if record is None or record.executor != "local":
            continue
        if sweep.was_removed(point):
            continue
        run = sweep.run_of(point)
        if not (run.path / "result.json").exists() or sweep_folder.is_again(run, array, record):
            points.append(point)
    return points


def _start(sweep: SweepDir, point: Point) -> Run | None:
    """Start a point's run, or return it if it is at work. None if it cannot be started: its result then says why.

    None without a result means that it cannot be started at this moment. Raises OSError for a full disk, and for other
    errors that pass.
    """
    run = sweep.make_run(point, time.time())
    try:
        owner = run.owner()
        is_begun = ownership.is_being_submitted(run, owner)
        if is_begun and owner is not None and owner.pid != os.getpid():  # its user resumes it
            return None
        if owner is None or is_begun:  # by this process, before the disk was full
            config = configs.load_config(run.config, site=False)
            number = ownership.take(run, ownership.number_of(run))
            return executors.send(run, config, "local", ownership.submit_as(run, "local", number))
        handle = attach(run)
        return handle if run.result() is None and not handle.is_over() else resume(run, executor="local")
    except TakenError:  # by its user at this moment
        return None
    except (ToolkitError, OSError) as error:
        if isinstance(error, OSError) and error.errno in PASSING:
            raise
        log.error("run %s cannot be started: %s", run.id, error)
        write_ended(run, RunState.FAILED, f"it could not be started: {error}")
        return None


if __name__ == "__main__":
    fsio.keep_private()
    logs.setup("sweep")
    work(SweepDir(Path(sys.argv[1])))
