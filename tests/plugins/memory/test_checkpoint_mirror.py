"""Copies of checkpoints on another disk, for when the first disk has lost them."""

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.process_limits import ChangeLimits
from tests.unit.checkpoint.ranks import alone, load_alone, tensor_of, weights
from tests.unit.checkpoint.test_damage import flip
from tests.unit.checkpoint.test_library_files import save_by
from tests.unit.owners import STRANGER, give
from tests.waiting import wait_for
from toolkit.base import fsio
from toolkit.base.errors import CheckpointError
from toolkit.checkpoint import manifest as manifests
from toolkit.checkpoint.folder import CheckpointFolder, Keep, step_of
from toolkit.checkpoint.manifest import TensorPart
from toolkit.config import load_config, validate
from toolkit.plugins.memory.checkpoint_mirror import CheckpointMirror


@pytest.fixture
def home(tmp_path: Path) -> CheckpointFolder:
    checkpoints = CheckpointFolder(tmp_path / "home", Keep(3))
    for step in (50, 100, 200):
        alone(checkpoints, step, weights(float(step)))
    return checkpoints


@pytest.fixture
def second(tmp_path: Path) -> CheckpointMirror:
    return CheckpointMirror(tmp_path / "second", Keep(2))


def steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in ``folder``, every byte verified."""
    checkpoints = CheckpointFolder(folder)
    return [checkpoints.verify(path).step for path in checkpoints.list()]


def copied(second: CheckpointMirror, home: CheckpointFolder, *wanted: int) -> None:
    for step in wanted:
        second.copy(home.path(step))
        second.wait()


def test_a_copy_is_the_same_in_every_byte_and_as_private(
    home: CheckpointFolder, second: CheckpointMirror, tmp_path: Path
) -> None:
    copied(second, home, 200)
    there = tmp_path / "second" / home.path(200).name
    assert {p.name: p.read_bytes() for p in there.iterdir()} == {
        p.name: p.read_bytes() for p in home.path(200).iterdir()
    }
    assert [oct(p.stat().st_mode & 0o777) for p in (there, *there.iterdir())] == ["0o700", "0o600", "0o600"]


def test_so_many_copies_stay_as_at_home(home: CheckpointFolder, second: CheckpointMirror, tmp_path: Path) -> None:
    copied(second, home, 50, 100, 200)
    assert steps(tmp_path / "second") == [200, 100]


def test_a_damaged_checkpoint_is_not_copied(
    home: CheckpointFolder, second: CheckpointMirror, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flip(home.path(200) / "rank-00000.safetensors", 77)
    copied(second, home, 200)
    assert list((tmp_path / "second").iterdir()) == []
    assert "has no copy in" in caplog.text
    assert "is damaged" in caplog.text


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Yield an event; every write of a file waits until it is set."""
    go, write = threading.Event(), fsio.write_stream

    def held_back(*args: object) -> None:
        assert go.wait(20)
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(fsio, "write_stream", held_back)
    yield go
    go.set()


@pytest.fixture
def impatient(change_limits: ChangeLimits) -> None:
    change_limits(mirror_s=0.5)


def test_of_those_that_wait_for_a_slow_disk_only_the_newest_is_copied(
    home: CheckpointFolder, second: CheckpointMirror, tmp_path: Path, slow: threading.Event
) -> None:
    second.copy(home.path(50))
    wait_for(lambda: [*(tmp_path / "second").glob("step-00000050.tmp-*")], 20, "the first one to be begun")
    second.copy(home.path(100))
    second.copy(home.path(200))
    slow.set()
    second.wait()
    assert steps(tmp_path / "second") == [200, 50]


def test_a_full_disk_there_is_told_and_nobody_waits(
    home: CheckpointFolder,
    second: CheckpointMirror,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(fsio, "write_stream", full)
        copied(second, home, 100)
    assert "the disk is full" in caplog.text
    assert list((tmp_path / "second").iterdir()) == []
    copied(second, home, 200)
    assert steps(tmp_path / "second") == [200]


def test_what_home_has_lost_comes_back(home: CheckpointFolder, second: CheckpointMirror) -> None:
    copied(second, home, 200)
    for path in home.list():
        shutil.rmtree(path)
    second.fetch(home)
    state = weights(0.0)
    assert load_alone(home, state).step == 200
    assert float(tensor_of(state["model/weight"]).unique().item()) == 200.0


def test_what_home_has_itself_is_not_fetched(home: CheckpointFolder, second: CheckpointMirror) -> None:
    copied(second, home, 100, 200)
    inode = home.path(200).stat().st_ino
    second.fetch(home)
    assert home.path(200).stat().st_ino == inode
    assert [step_of(path) for path in home.list()] == [200, 100, 50]


def test_a_damaged_one_of_which_half_a_file_is_missing_is_replaced(
    home: CheckpointFolder, second: CheckpointMirror
) -> None:
    copied(second, home, 200)
    os.truncate(home.path(200) / "rank-00000.safetensors", 7)
    second.fetch(home)
    assert steps(home.folder) == [200, 100, 50]


def test_a_damaged_copy_does_not_come_home(
    home: CheckpointFolder, second: CheckpointMirror, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copied(second, home, 200)
    flip(tmp_path / "second" / home.path(200).name / "rank-00000.safetensors", 77)
    shutil.rmtree(home.path(200))
    second.fetch(home)
    assert steps(home.folder) == [100, 50]
    assert "cannot be used" in caplog.text


def test_where_all_bytes_at_home_are_wrong_the_copy_is_loaded(home: CheckpointFolder, second: CheckpointMirror) -> None:
    copied(second, home, 100, 200)
    for path in home.list():
        flip(path / "rank-00000.safetensors", 77)
    loaded = load_alone(home, weights(0.0), fetch=lambda damaged: second.fetch(home, damaged))
    assert (loaded.step, list(loaded.skipped)) == (200, [])
    assert home.verify(home.path(200)).step == 200


def test_an_older_copy_is_loaded_where_the_newer_one_is_damaged_in_both_places(
    home: CheckpointFolder, second: CheckpointMirror, tmp_path: Path
) -> None:
    copied(second, home, 100, 200)
    for path in (*home.list(), tmp_path / "second/step-00000200"):
        flip(path / "rank-00000.safetensors", 77)
    loaded = load_alone(home, weights(0.0), fetch=lambda damaged: second.fetch(home, damaged))
    assert (loaded.step, list(loaded.skipped)) == (100, ["step-00000200"])


def test_where_no_copy_is_good_either_all_stay_and_nothing_begins_anew(
    home: CheckpointFolder, second: CheckpointMirror, tmp_path: Path
) -> None:
    copied(second, home, 200)
    for path in home.list()[1:]:
        shutil.rmtree(path)
    os.truncate(home.path(200) / "rank-00000.safetensors", 7)
    flip(tmp_path / "second/step-00000200/rank-00000.safetensors", 77)
    for _attempt in range(2):
        place = CheckpointMirror(tmp_path / "second", Keep(2))
        place.fetch(home)
        with pytest.raises(CheckpointError, match="none of the 1 checkpoints is usable"):
            load_alone(home, weights(0.0), fetch=lambda damaged: place.fetch(home, damaged))  # noqa: B023  # called here


@pytest.mark.usefixtures("impatient")
def test_a_place_that_gives_no_answer_is_not_waited_for_for_ever(
    home: CheckpointFolder,
    tmp_path: Path,
    slow: threading.Event,
    caplog: pytest.LogCaptureFixture,
) -> None:
    waited = list[float]()
    second = CheckpointMirror(tmp_path / "second", Keep(2), lambda: waited.append(time.monotonic()))
    second.copy(home.path(200))
    second.wait()
    assert waited
    assert "has not answered" in caplog.text
    # Once it answers again the copy is completed.
    slow.set()
    wait_for(lambda: steps(tmp_path / "second") == [200], 20, "the copy")


def finish(go: threading.Event) -> None:
    """Let the threads that are still copying finish."""
    threads = [thread for thread in threading.enumerate() if thread.name == "second-place"]
    go.set()
    for thread in threads:
        thread.join(20)


@pytest.mark.usefixtures("impatient")
def test_what_arrives_after_the_training_has_begun_does_not_come_home(
    home: CheckpointFolder, second: CheckpointMirror, slow: threading.Event
) -> None:
    slow.set()
    copied(second, home, 200)
    shutil.rmtree(home.path(200))
    slow.clear()
    assert second.fetch(home) is None
    finish(slow)
    assert steps(home.folder) == [100, 50]
    assert home.remove_leftovers() == []


@pytest.mark.usefixtures("impatient")
def test_what_is_checked_after_the_training_has_begun_does_not_come_home(
    home: CheckpointFolder, second: CheckpointMirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied(second, home, 200)
    shutil.rmtree(home.path(200))
    go, check = threading.Event(), manifests.check_parts

    def slow_at_the_end(folder: Path, parts: Iterable[tuple[str, TensorPart]]) -> None:
        check(folder, parts)
        assert go.wait(20)

    monkeypatch.setattr(manifests, "check_parts", slow_at_the_end)
    assert second.fetch(home) is None
    finish(go)
    assert steps(home.folder) == [100, 50]


def test_what_a_killed_writer_left_there_is_swept(
    home: CheckpointFolder, second: CheckpointMirror, tmp_path: Path
) -> None:
    (tmp_path / "second" / "step-00000100.tmp-0badcafe").mkdir(parents=True)
    second.fetch(home)
    assert list((tmp_path / "second").iterdir()) == []


def test_a_checkpoint_that_somebody_else_has_put_there_is_not_copied_back(
    home: CheckpointFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its digests are right. Other users who may write there could choose the weights of a resumed run."""
    alone(CheckpointFolder(tmp_path / "second"), 900, weights(900.0))
    for strange in (tmp_path / "second", tmp_path / "second/step-00000900"):
        with monkeypatch.context() as patch:
            give(STRANGER, [strange], patch)
            CheckpointMirror(tmp_path / "second", Keep(2)).fetch(home)
        assert steps(home.folder) == [200, 100, 50]
        assert f"{strange} belongs to {STRANGER}" in caplog.text
    CheckpointMirror(tmp_path / "second", Keep(2)).fetch(home)
    assert steps(home.folder) == [900, 200, 100, 50]


def test_nothing_is_copied_to_where_others_may_write(
    home: CheckpointFolder, second: CheckpointMirror, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "second").mkdir()
    (tmp_path / "second").chmod(0o777)
    copied(second, home, 200)
    assert "has no copy in" in caplog.text
    assert "mode 0777" in caplog.text
    assert list((tmp_path / "second").iterdir()) == []


def test_a_second_place_has_the_files_of_a_library_too(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    save_by(checkpoints, 7)
    second = CheckpointMirror(tmp_path / "second", checkpoints.keep)
    second.copy(checkpoints.path(7))
    second.wait()
    copies = CheckpointFolder(tmp_path / "second")
    assert copies.verify(copies.path(7)) == checkpoints.verify(checkpoints.path(7))


def test_a_place_that_is_not_there_yet_may_be_named() -> None:
    validate(load_config(None, ["checkpoint.copy_to=/tmp/not/there/yet"]))
    assert not Path("/tmp/not").exists()
