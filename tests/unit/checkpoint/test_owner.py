"""A resume takes nothing from a place where others may write. Reading beside a run does."""

import json
import os
from pathlib import Path

import pytest
from torch.distributed import HashStore

from tests.unit.checkpoint.ranks import alone, load_alone, load_on, weights
from tests.unit.owners import STRANGER, give
from toolkit.base import trust
from toolkit.base.errors import CheckpointError
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.reader import load

PLACES = [".", "step-00000200", "step-00000200/manifest.json", "step-00000200/rank-00000.safetensors"]


@pytest.fixture
def checkpoints(tmp_path: Path) -> CheckpointFolder:
    checkpoints = CheckpointFolder(tmp_path / "checkpoints")
    for step in (100, 200):
        alone(checkpoints, step, weights(float(step)))
    return checkpoints


@pytest.fixture(autouse=True)
def lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every group have other members, also the group of this process."""
    monkeypatch.setattr(trust, "_is_own_group", lambda gid: False)


@pytest.mark.parametrize("mode", [0o770, 0o702])
@pytest.mark.parametrize("place", PLACES)
def test_what_others_may_write_is_not_resumed_from(checkpoints: CheckpointFolder, place: str, mode: int) -> None:
    path = checkpoints.folder / place
    path.chmod(mode)
    with pytest.raises(CheckpointError, match=f"has mode {mode:04o}") as caught:
        load_alone(checkpoints, weights(0.0))
    assert str(path) in str(caught.value)
    assert f"chmod -R go-w {path}" in str(caught.value)
    assert len(checkpoints.list()) == 2  # nothing was moved aside
    path.chmod(mode & ~0o022)
    assert load_alone(checkpoints, weights(0.0))


@pytest.mark.parametrize("place", PLACES)
def test_what_somebody_else_owns_is_not_resumed_from(
    checkpoints: CheckpointFolder, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.folder / place
    give(STRANGER, [path], monkeypatch)
    with pytest.raises(CheckpointError, match=f"{path} belongs to {STRANGER} and has mode 0[67]00"):
        load_alone(checkpoints, weights(0.0))


def test_what_root_owns_is_resumed_from(checkpoints: CheckpointFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    give(0, [checkpoints.folder / place for place in PLACES], monkeypatch)
    loaded = load_alone(checkpoints, weights(0.0))
    assert loaded
    assert loaded.step == 200


def test_reading_beside_a_run_minds_neither_owner_nor_mode(
    checkpoints: CheckpointFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.path(200).chmod(0o777)
    give(STRANGER, [checkpoints.folder], monkeypatch)
    loaded = load_alone(checkpoints, weights(0.0), read_only=True)
    assert loaded
    assert loaded.step == 200


def test_an_empty_folder_of_others_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(CheckpointError, match="has mode 0777"):
        load_alone(CheckpointFolder(tmp_path), weights(0.0))


def test_all_ranks_hear_of_it(checkpoints: CheckpointFolder) -> None:
    checkpoints.folder.chmod(0o770)

    outcomes = load_on(checkpoints.folder, [weights(0.0)] * 3)
    assert all(isinstance(outcome, CheckpointError) and "has mode 0770" in str(outcome) for outcome in outcomes)


@pytest.mark.parametrize("word", [b"not JSON", b"[7]", json.dumps({"try": "../../strangers/step-00000900"}).encode()])
def test_no_rank_reads_what_is_no_checkpoint_of_the_run_whoever_says_so(
    checkpoints: CheckpointFolder, word: bytes
) -> None:
    kv = HashStore()
    kv.set("checkpoint/checkpoints/1/1/told/0", word.decode())
    kv.set("checkpoint/checkpoints/1/1/told/1", json.dumps({"error": "the end"}))
    with pytest.raises(CheckpointError):
        load(CheckpointFolder(checkpoints.folder), weights(0.0), kv=kv, rank=1, world_size=2, attempt=1, timeout_s=1.0)
    if b"try" in word:
        assert kv.check(["checkpoint/checkpoints/1/1/reports/0/1"])
        assert b"not a checkpoint's name" in kv.get("checkpoint/checkpoints/1/1/reports/0/1")
