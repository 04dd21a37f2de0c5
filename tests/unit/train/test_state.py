"""Saving as the loop does it: a full disk ends no training. A save that must succeed is tried again and again."""

import errno
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.file_operations import file_operations
from tests.process_limits import ChangeLimits
from tests.unit.checkpoint.ranks import load_alone, tensor_of, weights
from tests.waiting import wait_for
from toolkit.base.errors import CheckpointError, ConfigError
from toolkit.checkpoint.folder import CheckpointFolder, Keep, newest_step
from toolkit.checkpoint.manifest import IN_MEMORY
from toolkit.checkpoint.reader import Loaded
from toolkit.config import CheckpointConfig
from toolkit.files.run_files import AttemptRecord
from toolkit.files.rundir import RunDir
from toolkit.hang import Activity
from toolkit.plugins.memory.checkpoint_mirror import CheckpointMirror
from toolkit.plugins.memory.copies import MemoryCopies
from toolkit.ranks.state import Json
from toolkit.train import run_checkpoints, saver
from toolkit.train.loop import LoopEngine
from toolkit.train.run_checkpoints import Checkpoints, refuse_other_identity
from toolkit.train.saver import PATIENCE_S, SAVE, SaveTimer


class Clock:
    """Stands for ``time``, which passes only in ``sleep``."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.on_sleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < 1000.0 + 10 * PATIENCE_S, "it tries for ever"
        self.on_sleep()


class Votes:
    """Stands for the strategy's sum over the ranks. It adds ``of_others`` to the rank's own vote."""

    def __init__(self) -> None:
        self.of_others = 0.0
        self.asked = 0

    def __call__(self, mine: Mapping[str, float]) -> dict[str, float]:
        self.asked += 1
        return {name: vote + self.of_others for name, vote in mine.items()}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(saver, "time", clock)
    return clock


@pytest.fixture
def votes() -> Votes:
    return Votes()


@pytest.fixture
def activity() -> Activity:
    return Activity()


@pytest.fixture
def checkpoints(tmp_path: Path, activity: Activity, votes: Votes) -> Checkpoints:
    """Return the checkpoints of a run with one rank, whose weights are all 7."""
    place = {"rank": 0, "world_size": 1, "attempt": 1, "store": None, "is_main": True, "device": torch.device("cpu")}
    alone = {"owns_run": lambda: True, "from_main": lambda key, make: make()}
    session: Any = SimpleNamespace(**place, **alone, run_dir=tmp_path, activity=activity)
    strategy: Any = SimpleNamespace(state=lambda: weights(7.0), sum=votes, on_loaded=lambda values: None)
    config = CheckpointConfig(every_steps=10, background=False)
    return Checkpoints(config, session, strategy, {"model.name": "mlp"})


class Disk:
    """A disk that refuses to write while it is full."""

    def __init__(self) -> None:
        self.is_full = True

    def __call__(self, operation: str, path: str) -> None:
        if self.is_full and operation == "open":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


@contextmanager
def full_disk() -> Iterator[Disk]:
    disk = Disk()
    with file_operations(disk):
        yield disk


REACHED = {"samples": 640}


def loader_of(data: str | None) -> Any:
    return SimpleNamespace(fingerprint=lambda: data, state=lambda: None, restore=lambda state: None)


@pytest.mark.parametrize("data", ["110 samples, 0a1b2c3d", "100 samples, 99999999"])
def test_a_run_does_not_go_on_with_other_data(checkpoints: Checkpoints, tmp_path: Path, data: str) -> None:
    """With another number of samples each position is another sample. Some would come twice, some never."""
    checkpoints.include(loader_of("100 samples, 0a1b2c3d"))
    checkpoints.saver.save(10, REACHED)
    checkpoints.include(loader_of(data))
    with pytest.raises(ConfigError) as caught:
        checkpoints.resume()
    assert f"the data set was '100 samples, 0a1b2c3d' and is now '{data}'. Set it back, or start" in str(caught.value)
    assert f"model.init_from={tmp_path}/checkpoints/step-00000010" in str(caught.value)


def lose(run: RunDir, checkpoints: Checkpoints) -> Path:
    """Save step 10 in a first attempt, and take the folder away, of which one damaged checkpoint is left."""
    checkpoints.saver.save(10, REACHED)
    run.add_attempt(AttemptRecord(1, ("node1",), 1.0, 2.0, "crashed", "restart", step_saved=10))
    away = run.checkpoints.rename(run.path / "away")
    (run.checkpoints / "step-00000020.bad-1a2b3c4d").mkdir(parents=True)
    return away


def test_a_run_that_has_lost_its_checkpoints_says_what_is_left(
    checkpoints: Checkpoints, tmp_path: Path, change_limits: ChangeLimits
) -> None:
    lose(RunDir(tmp_path), checkpoints)
    change_limits(late_mount_s=0.0)
    says = r"\(damaged ones were moved aside: step-00000020.bad-1a2b3c4d\), and attempt 1 left one of step 10: mount"
    with pytest.raises(CheckpointError, match=says):
        checkpoints.resume()


@pytest.mark.parametrize("is_linked", [True, False])
def test_checkpoints_on_a_disk_that_is_mounted_late_are_waited_for(
    checkpoints: Checkpoints, tmp_path: Path, is_linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDir(tmp_path)
    away = lose(run, checkpoints)
    if is_linked:
        shutil.rmtree(run.checkpoints)
        run.checkpoints.symlink_to(tmp_path / "disk")

    def mount(seconds: float) -> None:
        away.rename(tmp_path / "disk" if is_linked else shutil.rmtree(run.checkpoints) or run.checkpoints)

    monkeypatch.setattr(run_checkpoints, "time", SimpleNamespace(monotonic=time.monotonic, sleep=mount))
    assert checkpoints.resume().step == 10


def test_a_checkpoint_that_does_not_know_its_data_is_resumed_and_the_next_one_does(checkpoints: Checkpoints) -> None:
    checkpoints.saver.save(10, REACHED)
    checkpoints.include(loader_of("100 samples"))
    checkpoints._state.source.on_loaded = lambda values: None
    loaded = checkpoints.resume()
    assert loaded is not None
    checkpoints.saver.save(20, REACHED)
    checkpoints.include(loader_of("110 samples"))
    with pytest.raises(ConfigError, match="the data set was '100 samples'"):
        checkpoints.resume()


def test_a_save_that_fails_is_logged_and_the_training_goes_on(
    checkpoints: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints.saver.save(10, REACHED)
    with full_disk():
        checkpoints.saver.save(20, REACHED)
    assert checkpoints.saver.newest == newest_step(tmp_path / "checkpoints") == 10
    said = caplog.records[-1]
    assert said.levelname == "ERROR"
    assert "step 20 is not saved; the last checkpoint is kept" in said.getMessage()
    assert "the disk is full" in said.getMessage()


def test_the_next_save_makes_up_for_those_that_failed_and_says_so_once(
    checkpoints: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with full_disk():
        checkpoints.saver.save(10, REACHED)
        checkpoints.saver.save(20, REACHED)
    assert newest_step(tmp_path / "checkpoints") is None
    checkpoints.saver.save(30, REACHED)
    checkpoints.saver.save(40, REACHED)
    assert checkpoints.saver.newest == newest_step(tmp_path / "checkpoints") == 40
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith("saves that had failed before it: 2, the last one: ")
    assert "No space left on device" in warning


def test_what_is_saved_after_a_failure_is_whole(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with full_disk():
        checkpoints.saver.save(10, REACHED)
    checkpoints.saver.save(20, REACHED)
    loaded_state = weights(0.0)
    loaded = load_alone(CheckpointFolder(tmp_path / "checkpoints"), loaded_state)
    assert (loaded.step, loaded.meta["samples"]) == (20, 640)
    assert loaded.meta["identity"] == {"model.name": "mlp"}
    assert torch.equal(tensor_of(loaded_state["model/weight"]), torch.full((3, 4), 7.0))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000020"]


def test_a_failed_save_that_need_not_be_is_not_tried_again_and_asks_no_rank(
    checkpoints: Checkpoints, clock: Clock, votes: Votes
) -> None:
    with full_disk():
        checkpoints.saver.save(10, REACHED)
    assert clock.now == 1000.0
    assert votes.asked == 0


def test_the_last_save_is_made_as_soon_as_there_is_room(
    checkpoints: Checkpoints, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with full_disk() as disk:

        def room_after_a_minute() -> None:
            disk.is_full = clock.now < 1061.0

        clock.on_sleep = room_after_a_minute
        checkpoints.saver.save(25, REACHED, must=True)
    assert newest_step(tmp_path / "checkpoints") == 25
    assert 1061.0 <= clock.now < 1061.0 + 2 * saver.RETRY_EVERY_S
    assert any("saves that had failed before it" in record.getMessage() for record in caplog.records)


def test_a_rank_that_waits_for_room_on_the_disk_shows_that_it_is_not_hung(
    checkpoints: Checkpoints, clock: Clock, activity: Activity
) -> None:
    counts: list[int] = []
    clock.on_sleep = lambda: counts.append(activity.count)
    with full_disk(), pytest.raises(CheckpointError):
        checkpoints.saver.save(25, REACHED, must=True)
    assert len(counts) > PATIENCE_S / 2
    assert len(set(counts)) == len(counts)


def test_the_last_save_is_given_up_when_patience_has_run_out(
    checkpoints: Checkpoints, clock: Clock, tmp_path: Path
) -> None:
    checkpoints.saver.save(10, REACHED)
    with full_disk(), pytest.raises(CheckpointError, match="the disk is full"):
        checkpoints.saver.save(25, REACHED, must=True)
    assert PATIENCE_S <= clock.now - 1000.0 < PATIENCE_S + 2 * saver.RETRY_EVERY_S
    assert newest_step(tmp_path / "checkpoints") == 10


def test_a_rank_whose_clock_is_behind_gives_up_with_the_others(
    checkpoints: Checkpoints, clock: Clock, votes: Votes
) -> None:
    """Alone it would wait in the next save for ranks that have ended."""
    votes.of_others = 1.0
    with full_disk(), pytest.raises(CheckpointError):
        checkpoints.saver.save(25, REACHED, must=True)
    assert clock.now == 1000.0
    assert votes.asked == 1


def test_a_save_that_works_at_once_costs_no_vote(checkpoints: Checkpoints, votes: Votes) -> None:
    checkpoints.saver.save(10, REACHED, must=True)
    assert votes.asked == 0
    assert checkpoints.saver.newest == 10


def test_what_is_no_checkpoint_error_is_nobodys_to_hide(checkpoints: Checkpoints) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    checkpoints._state.source = SimpleNamespace(state=broken)
    with pytest.raises(ZeroDivisionError):
        checkpoints.saver.save(10, REACHED)


class SlowDisk:
    """Holds a background thread's writes until ``go`` is set. The disk may then be full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.is_full = False
        fsync = os.fsync

        def slow(descriptor: int) -> None:
            if threading.current_thread() is not threading.main_thread():
                assert self.go.wait(20)
                if self.is_full:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", slow)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SlowDisk:
    return SlowDisk(monkeypatch)


@pytest.fixture
def live(checkpoints: Checkpoints) -> torch.Tensor:
    """Return the weights of a run that saves in the background and has saved once."""
    tensors = weights(7.0)
    checkpoints._state.source = SimpleNamespace(state=lambda: tensors)
    checkpoints.saver._background = True
    checkpoints.saver.save(10, REACHED)
    value = tensors["model/weight"].value
    assert isinstance(value, torch.Tensor)
    return value


def saved(folder: Path) -> dict[int, float]:
    """Return the value of the weights in each checkpoint, every byte verified."""
    checkpoints, found = CheckpointFolder(folder / "checkpoints"), {}
    for path in checkpoints.list():
        manifest = checkpoints.verify(path)
        (part,) = manifest.tensors["model/weight"].parts
        found[manifest.step] = float(np.frombuffer((path / part.file).read_bytes(), np.float32, 12, part.start)[0])
    return found


def test_the_training_goes_on_and_what_is_written_is_the_step_that_was_saved(
    checkpoints: Checkpoints, live: torch.Tensor, disk: SlowDisk, tmp_path: Path
) -> None:
    checkpoints.saver.save(20, REACHED)
    live.fill_(8.0)
    assert saved(tmp_path) == {10: 7.0}
    disk.go.set()
    checkpoints.saver.await_save()
    assert (checkpoints.saver.newest, saved(tmp_path)) == (20, {10: 7.0, 20: 7.0})


def test_the_next_save_waits_for_the_one_before_it_and_uses_its_buffers_again(
    checkpoints: Checkpoints, live: torch.Tensor, disk: SlowDisk, tmp_path: Path
) -> None:
    checkpoints.saver.save(20, REACHED)
    live.fill_(8.0)
    threading.Timer(0.05, disk.go.set).start()
    checkpoints.saver.save(30, REACHED)
    assert checkpoints.saver.newest == 20
    checkpoints.saver.await_save()
    assert saved(tmp_path) == {20: 7.0, 30: 8.0}
    assert len({id(buffer) for buffer in checkpoints.saver._staging._buffers.values()}) == 1


def test_a_full_disk_behind_the_back_is_told_and_made_up_for(
    checkpoints: Checkpoints, live: torch.Tensor, disk: SlowDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk.is_full = True
    disk.go.set()
    checkpoints.saver.save(20, REACHED)
    # Told at once, not only when the next save is due.
    wait_for(lambda: "step 20 is not saved; the last checkpoint is kept" in caplog.text, 10, "a line in the log")
    assert "the last save failed: " in str(checkpoints.saver.failure)
    assert checkpoints.saver.newest == 10
    disk.is_full = False
    checkpoints.saver.save(30, REACHED)
    checkpoints.saver.await_save()
    assert "saves that had failed before it: 1" in caplog.text
    assert checkpoints.saver.failure is None
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-00000010", "step-00000030"]


def test_a_disk_that_is_away_fails_a_save_and_ends_no_training(
    checkpoints: Checkpoints, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, an error while looking for an earlier save of the step ended the training."""
    disk.go.set()
    stat = Path.stat

    def stale(path: Path, **how: Any) -> os.stat_result:
        if path.parent.name == "step-00000020":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", stale)
    checkpoints.saver.save(20, REACHED)
    checkpoints.saver.await_save()
    assert "step 20 is not saved; the last checkpoint is kept" in caplog.text
    checkpoints.saver.save(30, REACHED)
    checkpoints.saver.await_save()
    assert checkpoints.saver.newest == 30


def test_a_save_by_time_at_a_step_that_is_saved_starts_the_clock_anew() -> None:
    """Before, a request agreed on before the first step ended all saves by time."""
    asked, started = [SAVE], list[str]()
    loop: Any = LoopEngine.__new__(LoopEngine)
    loop.step = loop._saved = 40
    loop._activity = SimpleNamespace(phase=0)
    loop._on_request = SimpleNamespace(is_recording=False)
    gate = SimpleNamespace(boundary=lambda step: asked.pop() if asked else None)
    loop._session = SimpleNamespace(gate=gate)
    loop._saver = SimpleNamespace(set_timer=lambda: started.append("timer"))
    loop._boundary()
    assert started == ["timer"]


def test_a_stop_gives_up_the_save_of_an_earlier_step_and_leaves_nothing_of_it(
    checkpoints: Checkpoints, live: torch.Tensor, disk: SlowDisk, tmp_path: Path
) -> None:
    checkpoints.saver.save(20, REACHED)
    threading.Timer(0.05, disk.go.set).start()
    checkpoints.saver.await_save(25)
    assert checkpoints.saver.newest == 10
    checkpoints.saver.save(25, REACHED, must=True)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == ["step-00000010", "step-00000025"]


def test_a_stop_waits_for_the_save_of_the_step_it_stops_at(
    checkpoints: Checkpoints, live: torch.Tensor, disk: SlowDisk
) -> None:
    checkpoints.saver.save(20, REACHED)
    threading.Timer(0.05, disk.go.set).start()
    checkpoints.saver.await_save(20)
    assert checkpoints.saver.newest == 20


def test_a_save_behind_the_back_is_no_sign_of_life_until_it_is_waited_for(
    checkpoints: Checkpoints, live: torch.Tensor, disk: SlowDisk, activity: Activity
) -> None:
    before = activity.count
    disk.go.set()
    checkpoints.saver.save(20, REACHED)
    checkpoints.saver._writing.wait()
    assert activity.count == before
    disk.go.clear()
    checkpoints.saver.save(30, REACHED)
    threading.Timer(0.05, disk.go.set).start()
    checkpoints.saver.await_save()
    assert activity.count > before


@pytest.mark.parametrize(("every_steps", "every_min"), [("auto", None), (10, 0.0002), (None, 0.0002)])
def test_a_save_by_time_is_asked_for_again_after_each_save(
    checkpoints: Checkpoints, every_steps: Any, every_min: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(saver, "interval_s", lambda *_: 0.01)
    checkpoints._session.gate = SimpleNamespace(request=asked.put)  # type: ignore[misc, assignment]
    checkpoints.saver._config = checkpoints.saver.timer._config = CheckpointConfig(
        every_steps=every_steps, every_min=every_min
    )
    assert checkpoints.saver.is_due(10) == (every_steps == 10)
    checkpoints.resume()
    for step in (15, 25):
        assert asked.get(timeout=20) == SAVE
        checkpoints.saver.save(step, REACHED)
    assert asked.get(timeout=20) == SAVE
    checkpoints.saver.save(35, REACHED, must=True)
    assert asked.empty()


@pytest.mark.parametrize("how", ["ends", "fails"])
def test_a_save_by_time_that_falls_due_in_an_evaluation_is_asked_for_after_it(
    checkpoints: Checkpoints, how: str
) -> None:
    """The gate passes on one request at a time. A stop would wait for this save, and so for the evaluation."""
    asked: queue.Queue[str] = queue.Queue()
    checkpoints._session.gate = SimpleNamespace(request=asked.put)  # type: ignore[misc, assignment]
    checkpoints.saver._config = checkpoints.saver.timer._config = CheckpointConfig(every_min=0.1 / 60, background=False)
    checkpoints.saver.set_timer()
    timer = checkpoints.saver.timer._timer
    assert timer is not None
    with suppress(ZeroDivisionError), checkpoints.saver.timer.deferred():
        timer.join(20)
        assert checkpoints.saver.timer._due_s
        wait_for(lambda: time.monotonic() > checkpoints.saver.timer._due_s + 0.1, 20, "the save to be due")
        assert asked.empty()
        assert how == "ends" or 1 / 0
    assert asked.get(timeout=20) == SAVE
    with checkpoints.saver.timer.deferred():
        pass
    assert asked.empty()


def test_a_save_is_due_after_the_best_evaluation_so_far_and_a_resumed_run_knows_it(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints.saver.on_disk.keep = Keep(best="-eval/loss")
    found = [checkpoints.saver.is_best({"eval/loss": loss}) for loss in (0.9, 0.5, 0.7, 0.5, float("nan"))]
    assert found == [True, True, False, False, False]
    checkpoints.saver.save(10, REACHED)
    checkpoints._state.best = None
    checkpoints._state.source.on_loaded = lambda values: None
    checkpoints.resume()
    assert [checkpoints.saver.is_best({"eval/loss": loss}) for loss in (0.6, 0.4)] == [False, True]
    assert not checkpoints.saver.is_best({"eval/accuracy": 1.0})
    assert "there is no number -eval/loss, only eval/accuracy" in caplog.text


def test_a_best_figure_counts_only_for_its_own_metric(checkpoints: Checkpoints) -> None:
    checkpoints._state.source.on_loaded = lambda values: None
    for saved_by, best_by, restored in (
        ("eval/loss", "eval/loss", 3.0),
        ("eval/loss", "eval/accuracy", None),
        (None, "eval/loss", None),
    ):
        checkpoints._state._best_by, checkpoints._state.best = saved_by, 3.0
        checkpoints.saver.save((checkpoints.saver.newest or 0) + 10, REACHED)
        checkpoints._state._best_by = best_by
        checkpoints.resume()
        assert checkpoints._state.best == restored


def test_after_a_restart_from_memory_a_best_state_counts_only_if_it_is_on_disk(checkpoints: Checkpoints) -> None:
    state, saver = checkpoints._state, checkpoints.saver
    state.source.on_loaded = lambda values: None
    saver.on_disk.keep = Keep(best="eval/accuracy")
    assert saver.is_best({"eval/accuracy": 0.5})
    saver.save(10, REACHED)
    # The save of a better one is cut off, and the copy in memory is newer.
    kept = Loaded(25, {**state.meta, "best": 0.9}, {}, IN_MEMORY)
    checkpoints.copies = cast(MemoryCopies, SimpleNamespace(load=lambda newest_on_disk: kept))
    assert checkpoints.resume() == kept
    assert saver.is_best({"eval/accuracy": 0.8})


def test_a_damaged_checkpoint_does_not_keep_a_copy_in_memory_from_being_used(
    checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """Nor does it pass for the save of its step, once the run reaches that step again."""
    checkpoints._state.source.on_loaded = lambda values: None
    for step in (10, 30):
        checkpoints.saver.save(step, REACHED)
    damaged = tmp_path / "checkpoints" / "step-00000030" / "rank-00000.safetensors"
    os.truncate(damaged, damaged.stat().st_size - 1)
    on_disk: list[int | None] = []

    def load(newest_on_disk: Callable[[], int | None]) -> Loaded:
        on_disk.append(newest_on_disk())
        return Loaded(25, checkpoints._state.meta, {}, IN_MEMORY)

    checkpoints.copies = cast(MemoryCopies, SimpleNamespace(load=load))
    checkpoints.resume()
    assert on_disk == [10]
    assert checkpoints.saver.newest == 10
    checkpoints.saver.save(30, REACHED)
    assert checkpoints.saver.on_disk.valid_manifest(damaged.parent) is not None


def test_a_best_state_whose_save_failed_does_not_count_as_kept(checkpoints: Checkpoints, tmp_path: Path) -> None:
    keep = checkpoints.saver.on_disk.keep = Keep(newest=2, best="-eval/loss")

    def evaluate_and_save(step: int, loss: float) -> None:
        if checkpoints.saver.is_best({"eval/loss": loss}):
            checkpoints.saver.save(step, {"metrics": {"eval/loss": loss}})

    evaluate_and_save(10, 0.9)
    with full_disk():
        evaluate_and_save(20, 0.3)
    evaluate_and_save(30, 0.5)  # worse than the one that is lost, better than the one that is kept
    evaluate_and_save(40, 0.7)
    assert keep.score({"eval/loss": 0.5}) == checkpoints._state.best
    assert saved(tmp_path).keys() == {10, 30}


@pytest.mark.parametrize("fails_on", ["rank 0", "none"])
def test_a_best_state_that_could_not_be_described_does_not_count_as_kept(
    checkpoints: Checkpoints, votes: Votes, fails_on: str
) -> None:
    saver = checkpoints.saver
    saver.on_disk.keep = Keep(2, best="eval/accuracy")
    saver.save(10, REACHED)
    assert saver.is_best({"eval/accuracy": 0.9})
    with full_disk() as disk:
        disk.is_full = fails_on == "rank 0"
        saver.note_evaluation(10, {"metrics": {"eval/accuracy": 0.9}})
    assert votes.asked == 1  # the other ranks learn of it
    assert saver.is_best({"eval/accuracy": 0.8}) == (fails_on == "rank 0")


def test_a_best_state_that_may_not_be_saved_does_not_count_as_kept(checkpoints: Checkpoints) -> None:
    saver = checkpoints.saver
    saver.on_disk.keep = Keep(2, best="eval/accuracy")
    assert saver.is_best({"eval/accuracy": 0.9})
    saver.leave_out()
    assert saver.is_best({"eval/accuracy": 0.8})
    saver.close()


def test_a_run_goes_on_with_another_strategy_of_the_same_state_and_with_no_other() -> None:
    for strategy in ("fsdp", "zero", "dp"):
        saved: dict[str, Json] = {"strategy.name": "ddp", "strategy.mesh": {}}
        refuse_other_identity(saved, {"strategy.name": strategy, "strategy.mesh": {"replicas": 2}}, Path("here"))
    refuse_other_identity({"strategy.compression": "bf16"}, {"strategy.compression": "none"}, Path("here"))
    others = (
        ("strategy.name", "ddp", "custom"),
        ("optim.name", "ddp", "fsdp"),
        ("strategy.compression", "topk", "none"),
    )
    for key, then, now in others:
        with pytest.raises(ConfigError, match=f"{key} was '{then}' and is now '{now}'"):
            refuse_other_identity({key: then}, {key: now}, Path("here"))


def test_a_step_that_is_to_be_kept_is_saved(checkpoints: Checkpoints) -> None:
    checkpoints.saver.on_disk.keep = Keep(every=15)
    assert [step for step in range(1, 31) if checkpoints.saver.is_due(step)] == [10, 15, 20, 30]


@pytest.mark.parametrize(("minutes", "wait_s"), [(0.5, 10.0), (0.1, 6.0)])
def test_of_two_waits_the_shorter_counts(tmp_path: Path, minutes: float, wait_s: float) -> None:
    session: Any = SimpleNamespace(is_main=True, run_dir=tmp_path, gate=SimpleNamespace(request=lambda kind: None))
    timer = SaveTimer(CheckpointConfig(every_steps="auto", every_min=minutes), session)
    timer.set(0.0, 0.0)
    timer.cancel()
    assert timer._due_s == pytest.approx(time.monotonic() + wait_s, abs=1.0)


def test_the_newest_checkpoint_is_copied_after_a_resume(checkpoints: Checkpoints) -> None:
    checkpoints.saver.save(10, REACHED)
    checkpoints._state.source.on_loaded = lambda values: None
    copied: list[str] = []
    copies = SimpleNamespace(copy=lambda path: copied.append(path.name), fetch=lambda home, damaged: None)
    checkpoints.saver.second = cast(CheckpointMirror, copies)
    checkpoints.resume()
    assert copied == ["step-00000010"]
