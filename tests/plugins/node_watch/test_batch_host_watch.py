"""When the batch host counts as dead for another node, and when not."""

import errno
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.waiting import PATIENCE
from toolkit.base import fsio
from toolkit.files import rundir
from toolkit.files.run_files import RunStatus
from toolkit.files.rundir import RunDir
from toolkit.plugins.node_watch import batch_host_watch
from toolkit.plugins.node_watch.batch_host_watch import (
    ASK_SLURM_EVERY_S,
    LOOK_EVERY_S,
    SILENT_S,
    BatchHostWatch,
    WatchedJob,
    WatchEndedError,
)
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.job import nodes
from toolkit.run.job.slurm_job import outcome_of_row
from toolkit.run.records import user_requests
from toolkit.run.records.user_requests import Intent
from toolkit.run.requeue import follow_up


class World:
    """A job on node1 (the batch host) and node2, seen from node2 every ``LOOK_EVERY_S``."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.now = 0.0
        self.answers = True
        self.slurm = FakeSlurm()
        self.job = self.slurm.sbatch(["job.sh"])
        self.slurm.start(self.job, "node[1-2]")
        self.updated = 0.0
        self.speak()
        watched = WatchedJob(run, self.job, 0, "node1", "10.0.0.1", 6818, supervisor=77, nodes=2)
        self.watched = watched
        self.watch = BatchHostWatch(watched, self.slurm, lambda: self.now, lambda host, port: self.answers)

    def speak(self, state: str = "running") -> None:
        self.updated += 0.5
        self.run.write_status(RunStatus.from_json({"state": state, "updated": self.updated}))

    def looks(self, seconds: float, *, speaking: bool) -> str | None:
        """Return what the watch says within ``seconds``; None if it finds nothing."""
        end = self.now + seconds
        while self.now < end:
            self.now += LOOK_EVERY_S
            if speaking:
                self.speak()
            if why := self.watch.look():
                return why
        return None


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(rundir.create("test", tmp_path))


@pytest.mark.parametrize(
    ("answers", "is_up", "speaks"),
    [(False, True, True), (True, True, False), (True, False, True)],
    ids=["whose supervisor speaks", "whose file server is slow", "whose controller does not answer"],
)
def test_a_batch_host_is_left_alone(world: World, answers: bool, is_up: bool, speaks: bool) -> None:
    world.answers, world.slurm.is_up = answers, is_up
    assert world.looks(600, speaking=speaks) is None


def test_a_silent_batch_host_that_does_not_answer_is_dead(world: World) -> None:
    world.answers = False
    why = world.looks(SILENT_S + 3 * LOOK_EVERY_S, speaking=False)
    assert why is not None
    assert "node1" in why


def test_one_lost_connection_is_not_enough(world: World) -> None:
    assert world.looks(SILENT_S, speaking=False) is None
    world.answers = False
    assert world.looks(LOOK_EVERY_S, speaking=False) is None
    world.answers = True
    assert world.looks(LOOK_EVERY_S, speaking=False) is None
    world.answers = False
    assert world.looks(LOOK_EVERY_S, speaking=False) is None


def test_a_batch_host_that_left_the_nodes_of_the_job_is_dead(world: World) -> None:
    world.slurm._set(world.slurm._one(world.job), node_list="node2")
    why = world.looks(ASK_SLURM_EVERY_S + LOOK_EVERY_S, speaking=True)
    assert why is not None
    assert "node list" in why


def test_a_job_that_slurm_ends_because_its_batch_host_came_back_is_brought_back(world: World) -> None:
    job = world.slurm._one(world.job)
    world.slurm._set(job, node_list="node2", state="COMPLETING", reason="JobLaunchFailure")
    world.watch.hurry()
    assert "node list" in (world.watch.look() or "")
    batch_host_watch.requeue(world.watched, world.slurm)
    assert world.slurm.show_job(world.job).restarts == 1


@pytest.mark.parametrize("state", ["completed", "stopped", "failed", "cancelled"])
def test_the_watch_ends_with_the_run(world: World, state: str) -> None:
    world.speak(state)
    with pytest.raises(WatchEndedError):
        world.watch.look()


def test_the_watch_ends_when_slurm_has_restarted_the_job(world: World) -> None:
    world.slurm.requeue(world.job)
    with pytest.raises(WatchEndedError):
        world.looks(ASK_SLURM_EVERY_S + LOOK_EVERY_S, speaking=True)


def test_the_watch_ends_when_another_supervisor_has_taken_over(world: World) -> None:
    world.run.write_status(RunStatus.from_json({"state": "running", "updated": 9.0, "pid": 77}))
    assert world.watch.look() is None
    world.run.write_status(RunStatus.from_json({"state": "running", "updated": 9.5, "pid": 78}))
    with pytest.raises(WatchEndedError, match="another supervisor"):
        world.watch.look()


def test_told_to_end_it_asks_slurm_at_once_whether_the_batch_host_has_left(world: World) -> None:
    world.slurm._set(world.slurm._one(world.job), node_list="node2")
    assert world.watch.look() is None
    world.watch.hurry()
    why = world.watch.look()
    assert why is not None
    assert "node list" in why


def test_told_to_end_it_stays_with_a_job_that_runs_and_leaves_one_that_ends(world: World) -> None:
    world.watch.hurry()
    assert world.looks(60, speaking=True) is None
    world.slurm.cancel(world.job)
    with pytest.raises(WatchEndedError):
        world.watch.look()


def test_a_signal_to_end_is_heard_while_it_waits(world: World) -> None:
    """The watch runs in a process of its own, as on a node."""
    world.slurm._set(world.slurm._one(world.job), node_list="node2")
    code = f"""
import os, signal, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.plugins.node_watch import batch_host_watch
from toolkit.files.rundir import RunDir
from toolkit.files.run_files import RunStatus

slurm = FakeSlurm()
job = slurm.sbatch(["job.sh"])
slurm.start(job, "node2")
batch_host_watch.LOOK_EVERY_S = 3600.0
threading.Timer(0.2, os.kill, [os.getpid(), signal.SIGTERM]).start()
run = RunDir(Path({str(world.run.path)!r}))
watched = batch_host_watch.WatchedJob(run, job, 0, "node1", "127.0.0.1", 1, supervisor=77, nodes=2)
batch_host_watch.watch_batch_host(watched, slurm)
print(slurm.show_job(job).restarts)
"""
    # the pause of an hour is longer than the limit here: only the signal can end it
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE * 30)
    assert done.stdout.strip() == "1", done.stderr


def test_the_job_goes_on_without_its_batch_host_and_what_the_user_excluded(world: World) -> None:
    world.slurm._set(world.slurm._one(world.job), excluded="node7")
    nodes.remember(world.run, "node1", "is gone")
    batch_host_watch.requeue(world.watched, world.slurm)
    assert (world.slurm.show_job(world.job).restarts, world.slurm.excluded) == (1, {world.job: "node[1,7]"})


def test_a_job_that_is_ending_is_requeued_before_anything_else_is_asked(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, Slurm's SIGKILL could come while sbatch was asked which nodes may be excluded."""
    monkeypatch.setattr(world.slurm, "could_run", lambda _: pytest.fail("asked before the requeue"))
    batch_host_watch.requeue(world.watched, world.slurm, is_ending=True)
    assert world.slurm.show_job(world.job).restarts == 1


def test_a_disk_that_is_full_does_not_keep_the_job_from_its_requeue(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the watch failed at every start, and the job ran on without a supervisor."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fsio, "write_atomic", full)
    monkeypatch.setattr(BatchHostWatch, "look", lambda _: "node1 is gone")
    with ThreadPoolExecutor(1) as pool:  # it blocks SIGTERM, of its thread
        pool.submit(batch_host_watch.watch_batch_host, world.watched, world.slurm).result()
    assert (world.slurm.show_job(world.job).restarts, world.slurm.excluded) == (1, {world.job: "node1"})


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_a_job_that_slurm_will_not_requeue_is_left_to_its_follow_up_job(world: World, is_cancelled: bool) -> None:
    """Before, it ran on for ever without ranks. The requeue is refused, and the follow-up job waits for its end."""
    world.slurm._set(world.slurm._one(world.job), can_requeue=False)
    if is_cancelled:
        world.slurm.cancel(world.job)
    batch_host_watch.requeue(world.watched, world.slurm)
    row = world.slurm.show_job(world.job)
    assert row.state == "COMPLETING"
    assert follow_up.takes_over(world.run, [outcome_of_row(row, 0)]) is not is_cancelled


@pytest.mark.parametrize("when", ["meanwhile", "just before the requeue"])
def test_a_job_that_is_cancelled_stays_so(world: World, when: str) -> None:
    requeue = world.slurm.requeue

    def cancelled_first(job_id: str, *, if_running: bool = False) -> None:
        world.slurm.cancel(job_id)
        requeue(job_id, if_running=if_running)

    if when == "meanwhile":
        world.slurm.cancel(world.job)
    else:
        world.slurm.requeue = cancelled_first
    batch_host_watch.requeue(world.watched, world.slurm)
    row = world.slurm.show_job(world.job)
    assert (row.state, row.restarts) == ("COMPLETING", 0)


def test_a_cancelled_run_is_not_brought_back_from_a_dead_batch_host(world: World) -> None:
    user_requests.record_intent(world.run, Intent.CANCEL)
    batch_host_watch.requeue(world.watched, world.slurm)
    assert world.slurm.show_job(world.job).restarts == 0
