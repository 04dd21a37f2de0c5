"""Runs points of a sweep on this machine, some at a time. A process of its own, which outlives the terminal.

Its points are those of an array's record (`toolkit.plugins.sweep.sweep_folder`). It counts as their process until they
have one of their own: if it is killed, they are lost, and `toolkit sweep retry` starts another.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from toolkit import config as configs
from toolkit.base import fsio, logs, outages
from toolkit.base.errors import DamagedFileError, ToolkitError
from toolkit.base.process_limits import limits
from toolkit.files.run_files import RunState
from toolkit.files.rundir import RunDir
from toolkit.plugins.sweep.sweep_folder import ArrayRecord, SweepDir
from toolkit.run.attempt.journal import write_ended
from toolkit.run.prepare import snapshot
from toolkit.run.records import user_requests
from toolkit.run.submission import executors
from toolkit.run.submission.handle import Run

#: Runs that wait for their turn are looked at this often, and their status is written: after 30 s they would be silent.
NOTE_EVERY_S = 5.0
#: The submitter records this process within this time, or has been killed.
RECORDED_WITHIN_S = 60.0

log = logs.get(__name__)


def start(array: Path) -> str:
    """Start the process that runs the points of an array; return its id."""
    sweep = array.parent.parent
    log_path = sweep / "logs" / "local.log"
    with os.fdopen(fsio.open_private(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "toolkit.plugins.sweep.local", str(array)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=snapshot.submit_folder(sweep),
        )
    return str(process.pid)


def run_array(path: Path) -> None:
    """Run all points of the array of this record, after those of earlier arrays.

    A full disk, or a file server that is away, passes. A point with a file that cannot be read is left out.
    """
    deadline = time.monotonic() + RECORDED_WITHIN_S
    while (
        array := outages.retry_write(lambda: ArrayRecord.read(path), path, "read")
    ) is not None and array.job_id is None:
        if time.monotonic() > deadline:
            break
        time.sleep(limits().look_at_points_every_s)
    if array is None or array.job_id is None:
        log.error("%s: its submission was interrupted; `toolkit sweep retry` starts its points", path)
        return
    sweep = SweepDir(path.parent.parent)
    waiting, active = [sweep.run_of(point) for point in array.points], list[Run]()
    lock: int | None = None
    noted = time.monotonic()
    while waiting or active:
        # The process of an earlier array has the lock until its points have ended.
        if lock is None:
            with suppress(OSError):
                lock = fsio.try_lock(sweep.path / "local.lock")
        active = [run for run in active if _is_at_work(run)]
        if is_to_note := time.monotonic() - noted > NOTE_EVERY_S:
            noted = time.monotonic()
        for run in [*waiting]:
            try:
                has_turn = lock is not None and len(active) < _most_at_a_time(sweep, run)
                if not (has_turn or is_to_note):
                    break
                if _has_ended(run, array.token):
                    waiting.remove(run)
                elif has_turn:
                    started = _start(run)
                    waiting.remove(run)
                    active += [] if started is None else [started]
                else:
                    run.write_status(run.status().replace(updated=time.time()))
            except ToolkitError as error:
                log.error("run %s is left out: %s", run.id, error)
                waiting.remove(run)
            except OSError as error:
                log.warning("run %s: retrying: %s", run.id, error)
        time.sleep(limits().look_at_points_every_s)
    if lock is not None:
        os.close(lock)


def _is_at_work(run: Run) -> bool:
    """True until a started run has ended, or has a file that cannot be read."""
    try:
        return run.dir.result() is None and not run.is_over()
    except OSError as error:
        log.warning("run %s: %s", run.id, error)
        return True
    except ToolkitError as error:
        log.error("run %s: %s", run.id, error)
        return False


def _has_ended(run: RunDir, token: str) -> bool:
    """True for a run that no longer waits here: it was removed, or resumed by its user. End one that is to stop."""
    owner = run.owner()
    if owner is None or owner.token != token or run.result() is not None:
        return True
    asked = user_requests.read_intent(run)
    if asked is not None:
        write_ended(run, user_requests.end_state(asked), "stopped while it waited for its turn")
    return asked is not None


def _most_at_a_time(sweep: SweepDir, run: RunDir) -> int:
    with suppress(DamagedFileError):  # listings name the file
        record = sweep.record()
        if record is not None and record.max_running is not None:
            return record.max_running
    cluster = configs.load_config(run.config, site=False).cluster
    return max(1, len(os.sched_getaffinity(0)) // (cluster.tasks_per_node * cluster.cpus_per_task))


def _start(run: RunDir) -> Run | None:
    """Start a point's run. None if it cannot be started: its result then says why."""

    def send() -> Run:
        owner = run.owner()
        assert owner is not None
        return executors.send(run, configs.load_config(run.config, site=False), "local", owner)

    try:
        return outages.retry_write(send, run.path, "started")
    except (ToolkitError, OSError) as error:
        log.error("run %s cannot be started: %s", run.id, error)
        write_ended(run, RunState.FAILED, f"it could not be started: {error}")
        return None


if __name__ == "__main__":
    fsio.set_private_umask()
    logs.setup("sweep")
    run_array(Path(sys.argv[1]))
