"""A checkpoint in any format is read bit for bit. `format-1` and `format-2` each hold the bytes of one checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import HashStore

from tests.unit.checkpoint.ranks import on_ranks, tensor_of
from toolkit.checkpoint import manifest as manifests
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.policy import Keep
from toolkit.checkpoint.reader import Loaded, load
from toolkit.checkpoint.whole import export
from toolkit.checkpoint.writer import save
from toolkit.ranks.state import PerRank, Replicated, Sharded, State

GOLDEN = [Path(__file__).parent / f"format-{number}" for number in (1, 2)]
#: What rank 0 and rank 1 saved in step 42, written down without torch: bits where numpy has no such type.
WEIGHT = np.array([[1.5, -0.0, 3e-45], [np.inf, 1 / 3, -7.25]], np.float32)
BFLOAT16_BITS = np.array([0x3F80, 0xC2F7, 0x7FC1, 0x0001], np.uint16)  # 1.0, -123.5, a NaN with a payload, the least
FLOAT8_BITS = np.array([0x38, 0xFF, 0x01], np.uint8)
SHARDED = np.arange(15, dtype=np.float64).reshape(5, 3) / 7
ROWS = (slice(0, 2), slice(2, 5))


def state(rank: int) -> State:
    """Return what the golden checkpoints were saved from."""
    return {
        "model/weight": Replicated(torch.from_numpy(WEIGHT.copy())),
        "model/half": Replicated(torch.from_numpy(BFLOAT16_BITS.copy()).view(torch.bfloat16)),
        "model/eighth": Replicated(torch.from_numpy(FLOAT8_BITS.copy()).view(torch.float8_e4m3fn)),
        "model/mask": Replicated(torch.tensor([True, False, True])),
        "model/seen": Replicated(torch.tensor(1 << 40)),
        "model/empty": Replicated(torch.empty(0, 4, dtype=torch.int16)),
        "optim/weight/betas": Replicated([0.9, 0.95]),
        "model/shards": Sharded(torch.from_numpy(SHARDED[ROWS[rank]].copy()), (5, 3), (ROWS[rank].start, 0)),
        f"residual/rank{rank}": PerRank(torch.tensor([rank + 1j, -2j])),
        f"stream/rank{rank}": PerRank({"position": 7 + rank, "name": "é", "rest": None}),
    }


def zeroed(rank: int) -> State:
    found = state(rank)
    for entry in found.values():
        if isinstance(entry.value, torch.Tensor):
            entry.value.zero_()
    return found


def bits(value: torch.Tensor) -> bytes:
    return value.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda folder: folder.name)
def test_a_checkpoint_of_each_format_is_read_bit_for_bit(golden: Path) -> None:
    def read(rank: int, kv: HashStore) -> tuple[Loaded, State]:
        live = zeroed(rank)
        found = load(CheckpointFolder(golden), live, rank=rank, world_size=2, kv=kv, read_only=True)
        assert found
        return found, live

    for rank, (loaded, live) in enumerate(on_ranks(2, read)):
        for name, entry in state(rank).items():
            if isinstance(entry.value, torch.Tensor):
                assert bits(tensor_of(live[name])) == bits(entry.value), name
        assert (loaded.step, loaded.skipped) == (42, {})
        assert loaded.meta == {
            "identity": {"model.name": "mlp"},
            "samples": 2688,
            "metrics": {"eval/accuracy": 0.5},
            "evaluated": None,
        }
        assert loaded.values == {
            "optim/weight/betas": [0.9, 0.95],
            f"stream/rank{rank}": {"position": 7 + rank, "name": "é", "rest": None},
        }


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda folder: folder.name)
def test_a_checkpoint_of_each_format_is_verified_and_exported(golden: Path, tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(golden)
    (path,) = checkpoints.list()
    target = tmp_path / "all.safetensors"
    export(path, checkpoints.verify(path), target, "safetensors", run="this one", everything=True)
    exported = load_file(target)
    expected = {**state(0), **state(1), "model/shards": Replicated(torch.from_numpy(SHARDED.copy()))}
    values = {name: entry.value for name, entry in expected.items() if isinstance(entry.value, torch.Tensor)}
    assert exported.keys() == values.keys()
    assert [name for name, value in values.items() if bits(value) != bits(exported[name])] == []


def test_a_run_goes_on_from_a_checkpoint_of_format_1_in_the_newest_format(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN[0], tmp_path / "run")

    def resume(rank: int, kv: HashStore) -> Path:
        checkpoints, live = CheckpointFolder(tmp_path / "run", Keep(2)), zeroed(rank)
        assert load(checkpoints, live, rank=rank, world_size=2, kv=kv, read_only=True)
        return save(checkpoints, 43, live, {}, rank=rank, world_size=2, kv=kv)

    assert on_ranks(2, resume) == [tmp_path / "run/step-00000043"] * 2
    newest, oldest = map(manifests.read, CheckpointFolder(tmp_path / "run").list())
    assert [*newest.files] == ["rank-00000.safetensors", "rank-00001.safetensors"]
    assert [*oldest.files] == ["rank-00000.bin", "rank-00001.bin"]
    for name, record in oldest.tensors.items():
        assert [part.crc32 for part in newest.tensors[name].parts] == [part.crc32 for part in record.parts], name
