"""Nested data: mapped, stacked and cut as torch's own functions do where these can."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import default_collate

from toolkit.base.errors import JobFailedError
from toolkit.data.workers import stacked
from toolkit.ranks import nested
from toolkit.ranks.batch import Batch


@dataclass(frozen=True)
class Pair:
    ids: Any
    name: str


class Named(NamedTuple):
    left: Any
    right: Any


TREES = st.recursive(
    st.integers(),
    lambda inner: (
        st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Named, inner, inner)
    ),
)


@given(TREES)
def test_what_pytree_knows_is_mapped_as_it_does(tree: Any) -> None:
    assert nested.map_leaves(lambda leaf: leaf + 1, tree) == tree_map(lambda leaf: leaf + 1, tree)
    assert sorted(nested.leaves(tree)) == sorted(tree_leaves(tree))


def test_dataclasses_and_mappings_of_their_own_type_keep_it() -> None:
    made = nested.map_leaves(str, Pair([1, 2], UserDict(a=3)))  # type: ignore[arg-type]
    assert made == Pair(["1", "2"], UserDict(a="3"))  # type: ignore[arg-type]
    assert type(made.name) is UserDict


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 9)), min_size=1, max_size=4))
def test_samples_that_torch_can_stack_are_stacked_alike(values: list[tuple[float, int]]) -> None:
    samples = [{"x": torch.tensor([f, f]), "y": (n, np.float32(f)), "z": {"name": str(n)}} for f, n in values]
    ours, theirs = stacked(samples), default_collate(samples)
    assert ours["z"]["name"] == theirs["z"]["name"]
    assert torch.equal(ours["x"], theirs["x"])
    assert all(torch.equal(one, other) for one, other in zip(ours["y"], theirs["y"], strict=True))


def batch_of(count: int, data: Any = None, **more: Any) -> Batch:
    rows = torch.arange(2.0 * count).view(count, 2)
    data = data or {"text": Pair(rows, [f"s{n}" for n in range(count)]), "more": (np.arange(count), [rows + 1])}  # type: ignore[arg-type]
    return Batch(data, torch.arange(count), 64, **more)


PACKED = pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)


def test_a_packed_sequence_is_moved_but_for_its_sizes() -> None:
    moved = batch_of(2, {"words": PACKED}).to("meta")["words"]
    assert type(moved) is PackedSequence
    assert [each.device.type for each in moved] == ["meta", "cpu", "meta", "meta"]
    assert list(nested.leaves([PACKED, 1])) == [*PACKED, 1]


def test_a_batch_is_cut_at_every_depth_and_its_texts_with_it() -> None:
    first, second = batch_of(3).split(2)
    assert first["text"].name == ["s0"]
    assert second["text"].name == ["s1", "s2"]
    assert torch.equal(torch.cat([first["more"][1][0], second["more"][1][0]]), batch_of(3)["more"][1][0])
    assert [*second["more"][0]] == [1, 2]
    twice = nested.repeat_samples(second.data)
    assert twice["text"].name == ["s1", "s2", "s1", "s2"]
    assert torch.equal(twice["text"].ids, second["text"].ids.repeat(2, 1))


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (batch_of(3, {"packed": torch.zeros(7)}), r"batch\['packed'\] has the shape \(7,\), and the batch has 3"),
        (batch_of(2, {"scale": torch.tensor(1.0)}), r"batch\['scale'\] has the shape \(\), and"),
        (batch_of(2, {"words": PACKED}), r"batch\['words'\] is a PackedSequence, which has no rows"),
        (batch_of(2, {"size": 4}), r"batch\['size'\] is a int, which has no rows"),
        (batch_of(2, [torch.zeros(2), torch.zeros(2)], is_stacked=False), "batch is a list of 2, as many as there are"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_its_place(batch: Batch, words: str) -> None:
    with pytest.raises(JobFailedError, match=words):
        batch.split(2)


def test_a_batch_goes_to_its_data_and_counts_its_samples() -> None:
    inputs, targets = Batch((torch.zeros(3, 2), torch.ones(3)), torch.arange(3), 3)
    assert (tuple(inputs.shape), targets.tolist(), len(batch_of(3))) == ((3, 2), [1, 1, 1], 3)
    with pytest.raises(JobFailedError, match=r"here it is a dict: use batch\.data, or batch\[\.\.\.\]"):
        _ = batch_of(3).inputs
    moved = batch_of(3).to("meta")
    assert moved["text"].ids.is_meta
    assert not moved.positions.is_meta
    assert isinstance(moved["more"][1][0], Tensor)
