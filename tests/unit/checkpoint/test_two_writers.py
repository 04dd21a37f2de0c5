"""Two jobs that write one folder tear no checkpoint. The run's claim prevents that, unless a node is cut off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.file_operations import file_operations
from tests.unit.checkpoint.ranks import alone, load_alone, weights
from toolkit.base import fsio
from toolkit.base.errors import CheckpointError
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.policy import Keep

pytestmark = pytest.mark.chaos


def interrupted(checkpoints: CheckpointFolder, at: int, other: Callable[[], object]) -> int:
    """Save step 300, and call ``other`` before file operation ``at``. Returns the number of operations of the save."""
    count = 0

    def seen(operation: str, path: str) -> None:
        nonlocal count
        count += 1
        if count == at:
            other()

    with file_operations(seen):
        try:
            alone(checkpoints, 300, weights(300.0))
        except CheckpointError:  # the other one was first, or took its files away
            return count
    return count


@pytest.mark.parametrize("step", [300, 400], ids=["the same step", "another step"])
def test_two_writers_leave_whole_checkpoints_only_whoever_comes_when(tmp_path: Path, step: int) -> None:
    whole = CheckpointFolder(tmp_path / "whole")
    alone(whole, 100, weights(100.0))
    total = interrupted(whole, 0, lambda: None)
    assert total > 10
    for at in range(1, total + 1):
        mine, theirs = (CheckpointFolder(tmp_path / str(at)) for _ in range(2))
        alone(mine, 100, weights(100.0))
        interrupted(mine, at, lambda theirs=theirs: alone(theirs, step, weights(float(step))))  # type: ignore[misc]
        checkpoints, state = CheckpointFolder(tmp_path / str(at)), weights(0.0)
        assert all(checkpoints.verify(path) for path in checkpoints.list())
        loaded = load_alone(checkpoints, state)
        assert loaded is not None
        assert loaded.step == step, "the other one returned, so its step is committed"
        assert float(state["model/weight"].value.unique().item()) == loaded.step  # type: ignore[union-attr]


def test_a_late_rank_does_not_make_a_folder_anew_that_was_removed(tmp_path: Path) -> None:
    old, new = (CheckpointFolder(tmp_path) for _ in range(2))
    folder = old.begin(300)
    assert new.remove_leftovers() == [folder]
    with pytest.raises(CheckpointError, match="has vanished"):
        old.write(folder / "rank-00001.safetensors", [])
    assert not folder.exists()


@pytest.mark.parametrize("at", range(1, 30))
def test_an_attempt_that_starts_while_an_earlier_one_still_writes_is_not_disturbed(tmp_path: Path, at: int) -> None:
    """The new attempt removes the old one's files as left over. The old save then fails and commits nothing."""
    old, new = (CheckpointFolder(tmp_path) for _ in range(2))
    alone(old, 100, weights(100.0))
    interrupted(old, at, lambda: load_alone(new, weights(0.0)))
    assert all(new.verify(path) for path in new.list())
    alone(new, 300, weights(300.0))
    assert new.verify(new.list()[0]).step == 300


@pytest.mark.parametrize("asked", [1, 2])
def test_an_attempt_that_was_overtaken_commits_nothing(tmp_path: Path, asked: int) -> None:
    """Asked at the begin of a save, and once more just before the rename."""
    left = iter([True] * (asked - 1))
    checkpoints = CheckpointFolder(tmp_path / "checkpoints", is_ours=lambda: next(left, False))
    fsio.make_dir(checkpoints.folder)
    with pytest.raises(CheckpointError, match="belongs to a later attempt of the run"):
        alone(checkpoints, 300, weights(300.0))
    assert list(checkpoints.folder.iterdir()) == []


def test_an_attempt_that_was_overtaken_describes_nothing(tmp_path: Path) -> None:
    alone(CheckpointFolder(tmp_path), 100, weights(100.0), metrics={})
    late = CheckpointFolder(tmp_path, is_ours=lambda: False)
    with pytest.raises(CheckpointError, match="belongs to a later attempt of the run"):
        late.describe(100, {"metrics": {"eval/accuracy": 1.0}})
    assert late.manifest(late.path(100)).meta == {"metrics": {}}


def test_an_attempt_that_was_overtaken_removes_nothing(tmp_path: Path) -> None:
    for step in (100, 150, 200):
        alone(CheckpointFolder(tmp_path, Keep(3)), step, weights(step), metrics={})
    begun = CheckpointFolder(tmp_path).begin(300)
    late = CheckpointFolder(tmp_path, Keep(2), is_ours=lambda: False)
    for remove in (late.remove_leftovers, late.prune, lambda: late.reject(late.path(100), "its bytes are wrong")):
        with pytest.raises(CheckpointError, match="belongs to a later attempt of the run"):
            remove()
    assert {*tmp_path.iterdir()} == {*map(late.path, (100, 150, 200)), begun}
