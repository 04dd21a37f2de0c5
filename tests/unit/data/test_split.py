"""Parts that never change. Each share reads each sample of its own part once in a pass."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.samples import Noisy, Numbers
from toolkit.base.errors import ConfigError
from toolkit.config import DataConfig
from toolkit.data.loader import Loader, build_loader
from toolkit.data.permutation import hash64, mix
from toolkit.data.sampler import TrainSampler, part_of, samples_of
from toolkit.ranks.batch import Share

SPLITS = ["blocks", "hash"]
WORLDS = st.integers(1, 6)


def sampler(size: int, batch: int, index: int, count: int, split: str, seed: int = 5) -> TrainSampler:
    return TrainSampler(size, global_batch_size=batch, seed=seed, share=Share(index, count), split=split)


def parts(size: int, count: int, split: str) -> list[list[int]]:
    """Return the samples of each share.

    The oracle for blocks is numpy's linspace, and for hash the assignment of each index.
    """
    if split == "blocks":
        edges = np.floor(np.linspace(0, size, count + 1) + 1e-9).astype(int)
        return [list(range(a, b)) for a, b in pairwise(edges)]
    owners = part_of(np.arange(size), count)
    return [np.flatnonzero(owners == index).tolist() for index in range(count)]


@pytest.mark.parametrize("split", SPLITS)
@settings(max_examples=40, deadline=None)
@given(st.integers(40, 90), st.integers(6, 30), WORLDS, st.integers(1, 3))
def test_each_sample_of_a_part_comes_once_per_pass_and_none_of_another(
    split: str, n: int, b: int, w: int, passes: int
) -> None:
    for index, part in enumerate(parts(n, w, split)):
        own = sampler(n, b, index, w, split)
        steps = -(-len(part) * passes // len(own.at(0).indices))
        seen = [sample for step in range(steps) for sample in own.at(step).indices.tolist()]
        for number in range(passes):
            assert sorted(seen[number * len(part) : (number + 1) * len(part)]) == part


@pytest.mark.parametrize("split", SPLITS)
def test_passes_are_shuffled_anew_and_by_the_seed(split: str) -> None:
    def first(seed: int, number: int) -> list[int]:
        own = sampler(64, 32, 0, 2, split, seed)
        count = len(parts(64, 2, split)[0])
        seen = [sample for step in range(8) for sample in own.at(step).indices.tolist()]
        return seen[number * count : (number + 1) * count]

    orders = [tuple(first(seed, number)) for seed in (1, 2) for number in (0, 1)]
    assert len(set(orders)) == 4
    assert orders[0] != tuple(sorted(orders[0]))


@pytest.mark.parametrize("split", SPLITS)
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 200))
def test_the_step_says_where_a_share_stands(split: str, step: int) -> None:
    going, jumping = sampler(70, 9, 1, 3, split), sampler(70, 9, 1, 3, split)
    expected = [going.at(n).indices.tolist() for n in range(step + 1)][-1]
    assert jumping.at(step).indices.tolist() == expected
    assert jumping.at(step).start == step * 9 + 3


@pytest.mark.parametrize("split", SPLITS)
def test_positions_are_those_of_the_run_so_that_no_two_samples_are_augmented_alike(split: str) -> None:
    loaders = [
        Loader(Noisy(50), global_batch_size=11, seed=3, share=Share(index, 3), split=split) for index in range(3)
    ]
    batches = [loader.at(4) for loader in loaders]
    positions = torch.cat([batch.positions for batch in batches if batch is not None])
    inputs = torch.cat([batch.inputs for batch in batches if batch is not None])
    assert positions.tolist() == list(range(44, 55))
    assert len({tuple(row[1:].tolist()) for row in inputs}) == 11


def test_a_samples_part_does_not_change_when_the_data_set_grows() -> None:
    small, large = (parts(size, 4, "hash") for size in (1000, 3000))
    assert [part[: len(few)] for few, part in zip(small, large, strict=True)] == small
    assert max(map(len, large)) - min(map(len, large)) < 6 * (3000 / 4) ** 0.5


def test_a_samples_part_is_its_keyed_splitmix_hash() -> None:
    """The oracle uses Python's own integers. The next version must find data where this one has put them."""
    key = hash64(0x50415254)
    assert part_of(np.arange(50), 7).tolist() == [mix((index + key) % 2**64) % 7 for index in range(50)]


def test_a_data_set_of_several_chunks_is_cut_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = samples_of(5000, Share(2, 3), "hash")
    monkeypatch.setattr("toolkit.data.sampler._CHUNK", 700)
    assert np.array_equal(samples_of(5000, Share(2, 3), "hash"), whole)


@pytest.mark.parametrize(("split", "size"), [("blocks", 3), ("hash", 2)])
def test_a_share_without_a_sample_is_refused(split: str, size: int) -> None:
    with pytest.raises(ConfigError, match=r"data.split: .* leaves share \d of 4 none of"):
        _ = [samples_of(size, Share(index, 4), split) for index in range(4)]


def test_the_config_builds_it_and_a_checkpoint_knows_the_share() -> None:
    config = DataConfig(global_batch_size=8, split="blocks")
    loader = build_loader(Numbers(20), config, Share(1, 2), seed=3)
    assert {sample for step in range(10) for sample in loader.samples(step)} == set(range(10, 20))
    loader.restore(loader.state())
    with pytest.raises(ConfigError, match=r"this rank read share 1 of 2 .* and has share 1 of 4 now"):
        build_loader(Numbers(20), config, Share(1, 4), seed=3).restore(loader.state())
    assert build_loader(Numbers(20), DataConfig(), Share(1, 2), seed=3).state() is None
    assert build_loader(Numbers(20), config, Share(0, 0), seed=3).at(0) is None


def test_the_parts_are_found_once_for_the_samples_of_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = [Loader(Numbers(40), global_batch_size=8, seed=3, share=Share(i, 2), split="hash") for i in range(2)]
    expected = [[sample for loader in loaders for sample in loader.samples(step)] for step in range(3)]
    asked: list[Share] = []

    def counted(size: int, share: Share, split: str) -> Any:
        asked.append(share)
        return samples_of(size, share, split)

    monkeypatch.setattr("toolkit.data.sampler.samples_of", counted)
    assert [loaders[0].global_samples(step) for step in range(3)] == expected
    assert asked == [Share(0, 2), Share(1, 2)]
