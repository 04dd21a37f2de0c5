"""Saving as the loop does it: a full disk ends no training, and the save that must be is fought for."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.checkpoint.ranks import file_operations, load_alone, weights
from toolkit.activity import Activity
from toolkit.checkpoint.store import CheckpointStore, newest_step
from toolkit.config import CheckpointConfig
from toolkit.errors import CheckpointError
from toolkit.train import state
from toolkit.train.state import PATIENCE_S, Checkpoints


class Clock:
    """Stands for ``time``: only sleeping lets it pass."""

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
    """Stands for the sum across ranks: our own vote and those of the others."""

    def __init__(self) -> None:
        self.of_others = 0.0
        self.asked = 0

    def __call__(self, mine: torch.Tensor) -> torch.Tensor:
        self.asked += 1
        return mine + self.of_others


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(state, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def votes(monkeypatch: pytest.MonkeyPatch) -> Votes:
    votes = Votes()
    monkeypatch.setattr(state, "sum_across_ranks", votes)
    return votes


@pytest.fixture
def activity() -> Activity:
    return Activity()


@pytest.fixture
def checkpoints(tmp_path: Path, activity: Activity) -> Checkpoints:
    """Of a run with one rank, whose weights are all 7."""
    place = {"rank": 0, "world_size": 1, "attempt": 1, "store": None, "is_main": True, "device": torch.device("cpu")}
    session: Any = SimpleNamespace(**place, run_dir=tmp_path, activity=activity, owns_run=lambda: True)
    strategy: Any = SimpleNamespace(state=lambda: weights(7.0))
    return Checkpoints(CheckpointConfig(every_steps=10), session, strategy, {"model.name": "mlp"})


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


def test_a_save_that_fails_is_logged_and_the_training_goes_on(
    checkpoints: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints.save(10, REACHED)
    with full_disk():
        checkpoints.save(20, REACHED)
    assert checkpoints.newest == newest_step(tmp_path / "checkpoints") == 10
    said = caplog.records[-1]
    assert said.levelname == "ERROR"
    assert "step 20 is not saved, the last checkpoint stays" in said.getMessage()
    assert "the disk is full" in said.getMessage()


def test_the_next_save_makes_up_for_those_that_failed_and_says_so_once(
    checkpoints: Checkpoints, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with full_disk():
        checkpoints.save(10, REACHED)
        checkpoints.save(20, REACHED)
    assert newest_step(tmp_path / "checkpoints") is None
    checkpoints.save(30, REACHED)
    checkpoints.save(40, REACHED)
    assert checkpoints.newest == newest_step(tmp_path / "checkpoints") == 40
    (warning,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert warning.startswith("2 saves had failed before it, the last one: ")
    assert "No space left on device" in warning


def test_what_is_saved_after_a_failure_is_whole(checkpoints: Checkpoints, tmp_path: Path) -> None:
    with full_disk():
        checkpoints.save(10, REACHED)
    checkpoints.save(20, REACHED)
    loaded_state = weights(0.0)
    loaded = load_alone(CheckpointStore(tmp_path / "checkpoints"), loaded_state)
    assert loaded is not None
    assert (loaded.step, loaded.meta["samples"]) == (20, 640)
    assert loaded.meta["identity"] == {"model.name": "mlp"}
    assert torch.equal(loaded_state["model/weight"].value, torch.full((3, 4), 7.0))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000020"]


def test_a_failed_save_that_need_not_be_is_not_tried_again_and_asks_no_rank(
    checkpoints: Checkpoints, clock: Clock, votes: Votes
) -> None:
    with full_disk():
        checkpoints.save(10, REACHED)
    assert clock.now == 1000.0
    assert votes.asked == 0


def test_the_last_save_is_made_as_soon_as_there_is_room(
    checkpoints: Checkpoints, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with full_disk() as disk:

        def room_after_a_minute() -> None:
            disk.is_full = clock.now < 1061.0

        clock.on_sleep = room_after_a_minute
        checkpoints.save(25, REACHED, must=True)
    assert newest_step(tmp_path / "checkpoints") == 25
    assert 1061.0 <= clock.now < 1061.0 + 2 * state.RETRY_EVERY_S
    assert any("saves had failed before it" in record.getMessage() for record in caplog.records)


def test_a_rank_that_waits_for_room_on_the_disk_shows_that_it_is_not_hung(
    checkpoints: Checkpoints, clock: Clock, activity: Activity
) -> None:
    counts: list[int] = []
    clock.on_sleep = lambda: counts.append(activity.count)
    with full_disk(), pytest.raises(CheckpointError):
        checkpoints.save(25, REACHED, must=True)
    assert len(counts) > PATIENCE_S / 2
    assert len(set(counts)) == len(counts)


def test_the_last_save_is_given_up_when_patience_has_run_out(
    checkpoints: Checkpoints, clock: Clock, tmp_path: Path
) -> None:
    checkpoints.save(10, REACHED)
    with full_disk(), pytest.raises(CheckpointError, match="the disk is full"):
        checkpoints.save(25, REACHED, must=True)
    assert PATIENCE_S <= clock.now - 1000.0 < PATIENCE_S + 2 * state.RETRY_EVERY_S
    assert newest_step(tmp_path / "checkpoints") == 10


def test_a_rank_whose_clock_is_behind_gives_up_with_the_others(
    checkpoints: Checkpoints, clock: Clock, votes: Votes
) -> None:
    """Alone it would wait in the next save for ranks that have ended."""
    votes.of_others = 1.0
    with full_disk(), pytest.raises(CheckpointError):
        checkpoints.save(25, REACHED, must=True)
    assert clock.now == 1000.0
    assert votes.asked == 1


def test_a_save_that_works_at_once_costs_no_vote(checkpoints: Checkpoints, votes: Votes) -> None:
    checkpoints.save(10, REACHED, must=True)
    assert votes.asked == 0
    assert checkpoints.newest == 10


def test_what_is_no_checkpoint_error_is_nobodys_to_hide(checkpoints: Checkpoints) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    checkpoints._strategy = SimpleNamespace(state=broken)  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        checkpoints.save(10, REACHED)
