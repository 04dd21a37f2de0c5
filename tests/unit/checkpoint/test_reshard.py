"""Shards that N ranks saved are loaded by M ranks with other cuts. The oracle is numpy's slicing."""

import tempfile
from contextlib import AbstractContextManager
from io import FileIO
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.checkpoint.ranks import alone, load_alone, load_on, save_on
from toolkit.checkpoint import tensors
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.manifest import TensorPart, open_part
from toolkit.ranks.state import Sharded, State

#: One rank's rectangle: a slice for each dimension.
Cut = tuple[slice, ...]
GRIDS = {1: [(1, 1)], 2: [(2, 1), (1, 2)], 3: [(3, 1), (1, 3)], 4: [(4, 1), (2, 2), (1, 4)]}


def shard(whole: npt.NDArray[Any], cut: Cut) -> Sharded:
    return Sharded(torch.from_numpy(np.array(whole[cut])), whole.shape, tuple(along.start for along in cut))


def rows(*edges: int) -> list[Cut]:
    return [(slice(a, b), slice(0, 2)) for a, b in pairwise(edges)]


def put(folder: Path, step: int, whole: npt.NDArray[Any], cuts: list[Cut]) -> None:
    paths = save_on(folder, [{"w": shard(whole, cut)} for cut in cuts], step)
    assert set(paths) == {CheckpointFolder(folder).path(step)}


def got(folder: Path, like: npt.NDArray[Any], cuts: list[Cut]) -> list[tuple[int, npt.NDArray[Any]]]:
    """Return the step and the shard that each rank has loaded."""
    lives = [shard(np.zeros_like(like), cut) for cut in cuts]
    loaded = load_on(folder, [{"w": live} for live in lives])
    return [(found.step, live.value.numpy()) for found, live in zip(loaded, lives, strict=True)]


@st.composite
def cuttings(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Cut]:
    """Draw 1 to 4 rectangles that make up `shape`.

    They are an uneven grid along two of its dimensions; some may be empty.
    """
    grid = draw(st.sampled_from(GRIDS[draw(st.integers(1, 4))]))
    along = draw(st.permutations(range(len(shape))))[:2]
    spans = [[slice(0, size)] for size in shape]
    for dimension, pieces in zip(along, grid if len(along) == 2 else (grid[0] * grid[1],), strict=True):
        inner = sorted(draw(st.integers(0, shape[dimension])) for _ in range(pieces - 1))
        spans[dimension] = [slice(a, b) for a, b in pairwise([0, *inner, shape[dimension]])]
    return list(product(*spans))


@st.composite
def moves(draw: st.DrawFn) -> tuple[npt.NDArray[Any], list[Cut], list[Cut]]:
    shape = draw(st.lists(st.integers(0, 7), min_size=1, max_size=3).map(tuple))
    dtype = draw(st.sampled_from([np.float32, np.float64, np.int8, np.complex64, np.float16]))
    whole = np.arange(1, 1 + np.prod(shape)).reshape(shape).astype(dtype)
    return whole, draw(cuttings(shape)), draw(cuttings(shape))


@settings(max_examples=30, deadline=None)
@given(moves())
def test_any_number_of_ranks_gets_what_any_other_has_saved(move: tuple[npt.NDArray[Any], list[Cut], list[Cut]]) -> None:
    whole, before, after = move
    with tempfile.TemporaryDirectory() as name:
        put(Path(name), 3, whole, before)
        for (step, value), cut in zip(got(Path(name), whole, after), after, strict=True):
            assert step == 3
            assert np.array_equal(value, whole[cut])


@pytest.mark.parametrize("count", [1, 3])
def test_a_scalar_that_one_rank_saved_is_loaded_by_all(tmp_path: Path, count: int) -> None:
    put(tmp_path, 3, np.array(7.5), [()])
    assert got(tmp_path, np.array(0.0), [()] * count) == [(3, np.array(7.5))] * count


INT1: torch.dtype = vars(torch)["int1"]  # torch does not say that it is there


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch calls some of its types experimental
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.float8_e4m3fn, INT1], ids=str)
def test_types_that_numpy_does_not_have_are_cut_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    whole = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 1, 0]], dtype=torch.uint8).repeat(1, dtype.itemsize)
    cut = whole.view(dtype)
    states = [{"w": Sharded(cut[start : start + 2], (4, 3), (start, 0))} for start in (0, 2)]
    assert save_on(tmp_path, states) == [tmp_path / "step-00000003"] * 2
    live = torch.zeros(3, 2 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    load_alone(CheckpointFolder(tmp_path), {"w": Sharded(live, (4, 3), (1, 1))})
    assert torch.equal(live.view(torch.uint8), whole[1:, dtype.itemsize :])


def test_a_shard_that_is_no_block_of_memory_is_filled(tmp_path: Path) -> None:
    whole = np.arange(12.0).reshape(6, 2)
    put(tmp_path, 3, whole, rows(0, 1, 6))
    live = torch.zeros(2, 3).double().t()
    load_alone(CheckpointFolder(tmp_path), {"w": Sharded(live, (6, 2), (0, 0))})
    assert np.array_equal(live.numpy(), whole[:3])


@pytest.fixture
def parts_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the files of all parts that are read from now on."""
    found = list[str]()

    def noted(folder: Path, part: TensorPart) -> AbstractContextManager[FileIO]:
        found.append(part.file)
        return open_part(folder, part)

    monkeypatch.setattr(tensors, "open_part", noted)
    return found


@pytest.mark.parametrize(
    ("start", "stop", "files"), [(0, 6, [0, 1, 2]), (1, 4, [0, 1]), (2, 4, [1]), (3, 3, []), (4, 5, [2])]
)
def test_each_part_that_is_needed_is_read_once_and_no_other(
    tmp_path: Path, start: int, stop: int, files: list[int], parts_read: list[str]
) -> None:
    whole = np.arange(12.0).reshape(6, 2)
    put(tmp_path, 3, whole, rows(0, 2, 4, 6))
    (cut,) = rows(start, stop)
    ((_, value),) = got(tmp_path, whole, [cut])
    assert np.array_equal(value, whole[cut])
    assert parts_read == [f"rank-{rank:05d}.safetensors" for rank in files]


def test_damage_in_a_part_that_one_rank_needs_makes_all_ranks_fall_back(tmp_path: Path) -> None:
    whole = np.arange(12.0).reshape(6, 2)
    for step in (1, 2):
        put(tmp_path, step, whole + 100 * step, rows(0, 2, 4, 6))
    file = tmp_path / "step-00000002" / "rank-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    cuts = rows(0, 3, 4, 6)
    for (step, value), cut in zip(got(tmp_path, whole, cuts), cuts, strict=True):
        assert step == 1
        assert np.array_equal(value, whole[cut] + 100)


def test_a_shard_of_another_tensor_is_refused(tmp_path: Path) -> None:
    state: State = {"w": Sharded(torch.zeros(2, 2), (2, 2), (0, 0))}
    alone(CheckpointFolder(tmp_path), 1, state)
    other: State = {"w": Sharded(torch.zeros(2, 2), (3, 2), (1, 0))}
    with pytest.raises(Exception, match=r"w is float32 \(2, 2\) in the checkpoint and float32 \(3, 2\) here"):
        load_alone(CheckpointFolder(tmp_path), other)
