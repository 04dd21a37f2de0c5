"""Checkpoints written by a library in place of the toolkit.

One is whole when all ranks have written. It is read where every byte is right.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.unit.checkpoint.ranks import load_alone, on_ranks
from tests.unit.checkpoint.test_damage import flip
from toolkit.base import fsio
from toolkit.base.errors import CheckpointError
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.manifest import CorruptCheckpointError, read
from toolkit.checkpoint.writer import save


def write(rank: int) -> Callable[[Path], None]:
    """Return a function that writes as a library does on ``rank``.

    Each rank writes a file of its own, and rank 0 a larger one in a folder below.
    """

    def write_files(folder: Path) -> None:
        fsio.make_dir(folder / "lib/deep")
        (folder / f"lib/rank{rank}").write_text(f"rank {rank}")
        if not rank:
            (folder / "lib/deep/weights").write_bytes(b"w" * 1000)
            (folder / "lib/empty").touch()

    return write_files


def save_by(
    checkpoints: CheckpointFolder, step: int, write_of: Callable[[int], Callable[[Path], None]] = write
) -> list[Any]:
    def body(rank: int, kv: HashStore) -> Path:
        own = CheckpointFolder(checkpoints.folder)
        write_files = write_of(rank)
        return save(
            own, step, {}, {}, rank=rank, world_size=2, kv=kv, attempt=step, timeout_s=20, write_files=write_files
        )

    return on_ranks(2, body)


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(tmp_path / "checkpoints")


def test_the_files_of_all_ranks_are_committed_with_their_sizes_and_digests(checkpoints: CheckpointFolder) -> None:
    assert save_by(checkpoints, 7) == [checkpoints.path(7)] * 2
    manifest = checkpoints.verify(checkpoints.path(7))
    assert manifest.files == {"lib/deep/weights": 1000, "lib/empty": 0, "lib/rank0": 6, "lib/rank1": 6}
    assert load_alone(checkpoints, {}).path == checkpoints.path(7)
    assert (checkpoints.path(7) / "lib/rank1").stat().st_mode & 0o777 == fsio.FILE_MODE


@pytest.mark.parametrize("name", ["lib/rank0", "lib/deep/weights"])
def test_a_flipped_bit_in_a_librarys_file_makes_a_resume_take_the_checkpoint_before(
    checkpoints: CheckpointFolder, name: str
) -> None:
    save_by(checkpoints, 7)
    save_by(checkpoints, 8)
    flip(checkpoints.path(8) / name, 3)
    loaded = load_alone(checkpoints, {})
    assert (loaded.step, list(loaded.skipped)) == (7, ["step-00000008"])


@pytest.mark.parametrize("bad", [0, 1])
def test_a_save_in_which_one_ranks_library_fails_commits_nothing(checkpoints: CheckpointFolder, bad: int) -> None:
    def write_of(rank: int) -> Callable[[Path], None]:
        def fail(folder: Path) -> None:
            write(rank)(folder)
            raise OSError("no space")

        return fail if rank == bad else write(rank)

    ended = save_by(checkpoints, 7, write_of)
    assert isinstance(ended[bad], Exception)
    assert "no space" in str(ended[0])
    assert checkpoints.list() == []


def test_a_link_in_what_a_library_has_written_is_refused(checkpoints: CheckpointFolder, tmp_path: Path) -> None:
    def write_of(rank: int) -> Callable[[Path], None]:
        def link(folder: Path) -> None:
            write(rank)(folder)
            if not rank:
                (folder / "lib/link").symlink_to(tmp_path)

        return link

    (said, _) = save_by(checkpoints, 7, write_of)
    assert isinstance(said, CheckpointError)
    assert "lib/link is a link" in str(said)
    assert checkpoints.list() == []


def test_a_manifest_whose_library_file_leads_elsewhere_is_damage(checkpoints: CheckpointFolder) -> None:
    save_by(checkpoints, 7)
    path = checkpoints.path(7) / "manifest.json"
    manifest = read(checkpoints.path(7))
    assert "lib/rank0" in json.dumps(manifest.encode().decode())
    path.write_bytes(manifest.encode().replace(b"lib/rank0", b"../rank0x"))
    with pytest.raises(CorruptCheckpointError):
        checkpoints.verify(checkpoints.path(7))
