"""Each rank's file is one that the package safetensors can read.

Its header is under a digest, as all other bytes are.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from tests.unit.checkpoint.ranks import alone, load_on, save_on, tensor_of, weights
from tests.unit.checkpoint.test_damage import flip
from tests.unit.checkpoint.test_roundtrip import dense_dtypes, random_bits, same_bits
from toolkit.checkpoint import manifest as manifests
from toolkit.checkpoint import tensors
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.manifest import CorruptCheckpointError, TensorPart
from toolkit.ranks.state import PerRank, Replicated, Sharded, State, pieces_of

WEIGHT, MOMENT = torch.randn(6, 4), torch.randn(6, 4, dtype=torch.float64)
#: Returns the state of a rank, by the rank and the number of ranks.
States = Callable[[int, int], State]
ROWS = {1: [(0, 6)], 2: [(0, 4), (4, 6)], 3: [(0, 1), (1, 3), (3, 6)]}


def replicated(rank: int, ranks: int) -> State:
    """Return what ddp saves on a rank."""
    return {
        "model/fc.weight": Replicated(WEIGHT.clone()),
        "model/fc.bias": Replicated(torch.empty(0)),
        "optim/fc.weight/exp_avg": Replicated(MOMENT.clone()),
        "optim/fc.weight/step": Replicated(torch.tensor(3.0)),
        f"residual/rank{rank}": PerRank(torch.arange(3) + rank),
    }


def sharded(rank: int, ranks: int) -> State:
    """Return what fsdp saves on a rank."""
    start, stop = ROWS[ranks][rank]
    return {
        "model/fc.weight": Sharded(WEIGHT[start:stop].clone(), (6, 4), (start, 0)),
        "optim/fc.weight/exp_avg": Sharded(MOMENT[start:stop].clone(), (6, 4), (start, 0)),
        "optim/fc.weight/step": Replicated(torch.tensor(3.0)),
    }


def put(folder: Path, step: int, state: States, ranks: int) -> Path:
    (path,) = set(save_on(folder, [state(rank, ranks) for rank in range(ranks)], step))
    return path


def read(path: Path) -> dict[str, Tensor]:
    """Read a file with the package safetensors, in both of its ways."""
    at_once = safetensors.torch.load_file(path)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {*file.keys()} == at_once.keys()
        for name, value in at_once.items():
            assert same_bits(file.get_tensor(name), value)
    return at_once


@pytest.mark.parametrize("state", [replicated, sharded])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_safetensors_reads_what_each_rank_has_written(tmp_path: Path, state: States, ranks: int) -> None:
    path = put(tmp_path, 3, state, ranks)
    for rank in range(ranks):
        found = read(path / manifests.file_name(rank))
        expected = {name: tensor_of(entry) for name, entry in state(rank, ranks).items()}
        written = [name for name in expected if rank == 0 or not isinstance(state(rank, ranks)[name], Replicated)]
        assert sorted(found) == sorted(written)
        assert [name for name in written if not same_bits(found[name], expected[name])] == []


def test_the_manifest_and_the_header_give_one_place_for_each_tensor(tmp_path: Path) -> None:
    path = put(tmp_path, 3, sharded, 3)
    manifest = CheckpointFolder(tmp_path).verify(path)
    assert [*manifest.tensors] == [*sharded(0, 3)]  # in the order of the state, whatever that in the file is
    for name, record in manifest.tensors.items():
        for part in record.parts:
            stored = safetensors.numpy.load_file(path / part.file)[name]
            raw = (path / part.file).read_bytes()[part.start : part.start + part.size_bytes]
            assert (stored.shape, stored.tobytes()) == (part.shape, raw)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls some of its types experimental
def test_types_that_safetensors_lacks_are_stored_as_bytes_and_all_are_aligned(tmp_path: Path) -> None:
    shapes = [(), (0,), (3, 0, 2), (5,), (2, 3)]
    state = {f"{dtype}/{shape}": random_bits(dtype, shape) for dtype in dense_dtypes() for shape in shapes}
    path = alone(CheckpointFolder(tmp_path), 1, {name: Replicated(value) for name, value in state.items()})
    found = read(path / manifests.file_name(0))
    assert found.keys() == state.keys()
    foreign = {value.dtype for value in state.values()} - tensors.TYPES.keys()
    assert torch.complex128 in foreign
    for name, value in state.items():
        stored = found[name]
        if value.dtype in foreign:
            assert (stored.dtype, stored.shape) == (torch.uint8, (*value.shape, value.element_size()))
            stored = stored.view(value.dtype).reshape(value.shape)
        assert same_bits(stored, value), name
    starts = CheckpointFolder(tmp_path).verify(path).tensors.items()
    assert [name for name, record in starts if record.parts[0].start % min(8, state[name].element_size())] == []


def test_pieces_of_one_tensor_are_told_apart_by_their_places(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(12, 2)

    def fused(rank: int, ranks: int) -> State:
        rows = [torch.cat([whole[first + 2 * each :][:2] for first in (0, 4, 8)]) for each in range(2)][rank]
        return {"model/qkv": Sharded(rows, (12, 2), (6 * rank, 0), fused=(3, 2))}

    path = put(tmp_path, 3, fused, 2)
    found = read(path / manifests.file_name(1))
    assert sorted(found) == ["model/qkv[10:12, 0:2]", "model/qkv[2:4, 0:2]", "model/qkv[6:8, 0:2]"]
    assert torch.equal(found["model/qkv[6:8, 0:2]"], whole[6:8])
    assert len(pieces_of(fused(1, 2)["model/qkv"])) == 3


def test_each_flipped_bit_of_a_header_is_refused_by_the_files_name(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    file = alone(checkpoints, 1, weights(1.0)) / manifests.file_name(0)
    (part,) = checkpoints.manifest(file.parent).headers
    assert file.read_bytes()[part.size_bytes :] == np.ones(12, np.float32).tobytes()
    for bit in range(8 * part.size_bytes):
        flip(file, bit)
        with pytest.raises(CorruptCheckpointError, match=r"rank-00000\.safetensors is damaged: its header"):
            checkpoints.verify(file.parent)
        flip(file, bit)
    assert checkpoints.verify(file.parent).step == 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_at_a_resume_each_header_is_read_by_one_rank_and_damage_counts_for_all(
    tmp_path: Path, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, 1, sharded, 3)
    flip(put(tmp_path, 2, sharded, 3) / manifests.file_name(1), 77)
    opened, plain = list[str](), manifests.open_part

    def noted(folder: Path, part: TensorPart) -> AbstractContextManager[FileIO]:
        # the part at offset 0 is the file's header
        if folder.name == "step-00000001" and part.start == 0:
            opened.append(part.file)
        return plain(folder, part)

    monkeypatch.setattr(manifests, "open_part", noted)

    for loaded in load_on(tmp_path, [sharded(rank, ranks) for rank in range(ranks)], read_only=True):
        assert loaded.step == 1
        assert "rank-00001.safetensors is damaged: its header" in loaded.skipped["step-00000002"]
    assert sorted(opened) == [manifests.file_name(rank) for rank in range(3)]


def test_a_file_of_another_program_is_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    """The tensors are equal, under another header. The bytes must be those that were committed."""
    checkpoints = CheckpointFolder(tmp_path)
    state = weights(2.0)
    file = alone(checkpoints, 1, state) / manifests.file_name(0)
    safetensors.numpy.save_file({"model/weight": tensor_of(state["model/weight"]).numpy()}, file)
    with pytest.raises(CorruptCheckpointError):
        checkpoints.verify(file.parent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.bool], ids=str)
def test_a_header_says_what_the_packages_own_does(dtype: torch.dtype) -> None:
    shape = (3, 2)
    stored = torch.zeros(*shape, dtype=dtype) if dtype in tensors.TYPES else torch.zeros(*shape, dtype.itemsize).byte()
    head = tensors.encode_header({"é": (dtype, shape)}, {"run": "this one"})
    raw = head + bytes(math.prod(shape) * dtype.itemsize)
    assert len(head) % 8 == 0
    assert same_bits(safetensors.torch.load(raw)["é"], stored)
