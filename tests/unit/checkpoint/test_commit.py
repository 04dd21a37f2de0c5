"""The newest committed checkpoint stays loadable, whatever dies or fails during a save."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.file_operations import file_operations, killed_at
from tests.unit.checkpoint.ranks import alone, load_alone, tensor_of, weights
from toolkit.base import fsio
from toolkit.base.errors import CheckpointError, ConfigError
from toolkit.checkpoint import manifest as manifests
from toolkit.checkpoint.folder import CheckpointFolder, Keep, newest_step

pytestmark = pytest.mark.chaos


def filled(folder: Path, *steps: int) -> CheckpointFolder:
    folder.mkdir(exist_ok=True)
    checkpoints = CheckpointFolder(folder / "checkpoints", Keep(2))
    for step in steps:
        alone(checkpoints, step, weights(float(step)))
    return checkpoints


def operations_of_a_save(folder: Path) -> list[tuple[str, str]]:
    """Return the file operations of the third save, which removes the first checkpoint."""
    checkpoints, seen = filled(folder, 100, 200), list[tuple[str, str]]()
    with file_operations(lambda name, path: seen.append((name, Path(path).name))):
        alone(checkpoints, 300, weights(300.0))
    return seen


def test_killed_between_any_two_file_operations_the_newest_committed_one_loads(tmp_path: Path) -> None:
    total = len(operations_of_a_save(tmp_path / "whole"))
    assert total > 10
    steps = []
    for k in range(total):
        checkpoints = filled(tmp_path / str(k), 100, 200)
        with killed_at(k):
            alone(checkpoints, 300, weights(300.0))
        checkpoints, state = CheckpointFolder(tmp_path / str(k) / "checkpoints"), weights(0.0)
        loaded = load_alone(checkpoints, state)
        assert loaded
        assert float(tensor_of(state["model/weight"]).unique().item()) == loaded.step
        assert loaded.skipped == {}
        assert not list(checkpoints.folder.glob("*.tmp-*"))  # swept
        assert all(checkpoints.verify(path) for path in checkpoints.list())  # none is half removed
        assert len(checkpoints.list()) >= 2
        alone(checkpoints, 300, weights(300.0))
        assert newest_step(checkpoints.folder) == 300
        steps.append(loaded.step)
    assert steps == sorted(steps)  # once committed it stays so
    assert {200, 300} == set(steps)


def test_an_old_checkpoint_is_not_deleted_before_the_new_one_is_durable(tmp_path: Path) -> None:
    seen = operations_of_a_save(tmp_path)
    committed = next(
        i for i, (name, path) in enumerate(seen) if name == "rename" and path.startswith("step-00000300.tmp")
    )
    durable = seen.index(("fsync", "checkpoints"), committed)
    flushed = [path for name, path in seen[:committed] if name == "fsync"]
    assert flushed[0] == "rank-00000.safetensors"
    assert flushed[1].startswith(".manifest.json.tmp")  # the manifest last
    assert flushed[-1].startswith("step-00000300.tmp")  # then the folder, all before the rename
    touched = [i for i, (name, path) in enumerate(seen) if "step-00000100" in path or name in ("unlink", "rmdir")]
    assert touched
    assert min(touched) > durable
    removing = [seen[i] for i in touched if seen[i][0] != "fsync"]
    assert removing[0] == ("rename", "step-00000100")  # half removed it must not look committed


def test_a_left_over_temporary_folder_does_not_block_later_saves(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path, 100)
    left = checkpoints.folder / "step-00000200.tmp-0badcafe"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    alone(checkpoints, 200, weights(200.0))
    assert newest_step(checkpoints.folder) == 200
    assert left.exists()  # only the start of an attempt may conclude that its writer is dead
    assert checkpoints.remove_leftovers() == [left]
    assert not left.exists()


def test_the_sweep_leaves_what_this_store_is_writing(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path, 100)
    writing = checkpoints.begin(200)
    assert checkpoints.remove_leftovers() == []
    assert writing.is_dir()


def test_saving_a_committed_step_again_changes_nothing(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path, 100)
    seen: list[str] = []
    with file_operations(lambda name, path: seen.append(name)):
        assert alone(checkpoints, 100, weights(999.0)) == checkpoints.path(100)
    assert seen == []


def test_keep_counts_valid_checkpoints_only(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path, 100, 200)
    os.truncate(checkpoints.path(200) / "rank-00000.safetensors", 3)
    alone(checkpoints, 300, weights(300.0))
    assert [path.name for path in checkpoints.list()] == ["step-00000300", "step-00000200", "step-00000100"]
    alone(checkpoints, 400, weights(400.0))
    assert [path.name for path in checkpoints.list()] == ["step-00000400", "step-00000300", "step-00000200"]


def test_keeping_one_checkpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.keep: 1 is too few"):
        Keep(1)


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "the disk is full: free space"), (errno.EROFS, "is read-only"), (errno.ENOENT, "has vanished")],
)
@pytest.mark.parametrize("operation", ["mkdir", "open", "fsync", "replace", "rename"])
def test_a_file_error_names_the_path_and_what_to_do(tmp_path: Path, number: int, advice: str, operation: str) -> None:
    checkpoints = filled(tmp_path, 100)

    def fail(name: str, path: str) -> None:
        if name == operation:
            raise OSError(number, os.strerror(number), path)

    with file_operations(fail), pytest.raises(CheckpointError, match=advice) as caught:
        alone(checkpoints, 200, weights(200.0))
    assert str(checkpoints.folder) in str(caught.value)
    assert os.strerror(number) in str(caught.value)
    assert newest_step(checkpoints.folder) == 100
    assert not list(checkpoints.folder.glob("*.tmp-*"))


def test_a_save_beside_many_kept_checkpoints_reads_the_newest_manifests_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a thousand kept checkpoints, reading all their manifests took 5.4 s of every save."""
    checkpoints = CheckpointFolder(tmp_path / "checkpoints", Keep(2, every=1))
    read = list[Path]()
    plain = manifests.read
    monkeypatch.setattr(manifests, "read", lambda path: read.append(path) or plain(path))
    for step in range(1, 21):
        read.clear()
        alone(checkpoints, step, weights(float(step)))
        checkpoints.prune()
    assert sorted({path.name for path in read}) == ["step-00000019", "step-00000020"]
    assert len(checkpoints.list()) == 20


def test_of_the_newest_checkpoints_one_that_was_damaged_since_does_not_count(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "checkpoints", Keep(2))
    for step in (1, 2):
        alone(checkpoints, step, weights(float(step)))
        checkpoints.prune()
    (checkpoints.path(2) / "rank-00000.safetensors").write_bytes(b"")
    alone(checkpoints, 3, weights(3.0))
    checkpoints.prune()
    assert [path.name for path in checkpoints.list()] == ["step-00000003", "step-00000002", "step-00000001"]


def test_a_checkpoint_that_cannot_be_pruned_does_not_fail_the_save(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path, 100, 200)

    def fail(name: str, path: str) -> None:
        if name == "unlink":
            raise OSError(errno.EACCES, "Permission denied", path)

    with file_operations(fail):
        alone(checkpoints, 300, weights(300.0))
    assert newest_step(checkpoints.folder) == 300


def test_the_newest_step_is_found_without_torch(tmp_path: Path) -> None:
    checkpoints = filled(tmp_path, 100, 200)
    code = (
        "import sys, pathlib; from toolkit.checkpoint.folder import CheckpointFolder, newest_step;"
        f"path = pathlib.Path({str(checkpoints.folder)!r}); saved = CheckpointFolder(path);"
        "saved.verify(saved.list()[0]);"
        "print(newest_step(path), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["200", "False"]


def test_a_folder_that_is_not_there_has_no_newest_step(tmp_path: Path) -> None:
    assert newest_step(tmp_path / "nowhere") is None


def test_a_file_that_lost_bytes_before_the_commit_is_not_vouched_for(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    manifest = checkpoints.manifest(alone(checkpoints, 100, weights(1.0)))
    temporary = checkpoints.begin(200)
    (name,) = manifest.files
    content = (checkpoints.path(100) / name).read_bytes()
    (temporary / name).write_bytes(content[:-1])
    with pytest.raises(CheckpointError):
        checkpoints.commit(temporary, replace(manifest, step=200))
    assert [path.name for path in checkpoints.list()] == ["step-00000100"]


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
        late.replace_meta(100, {"metrics": {"eval/accuracy": 1.0}})
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
