"""The order of data in blocks. Every sample once an epoch, few blocks at a time, and a function of the position."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.data.sampler import TrainSampler
from toolkit.plugins.formats.shards.blocks import BlockOrder
from toolkit.ranks.batch import Share

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def order_of(sizes: list[int], batch_size: int = 8, lanes: int = 4, seed: int = 0) -> BlockOrder:
    return BlockOrder(np.cumsum([0, *sizes]), seed, batch_size=batch_size, lanes=lanes)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, batch_size=st.integers(1, 50), lanes=st.integers(1, 9), seed=st.integers(0, 9))
def test_each_epoch_has_every_sample_once(sizes: list[int], batch_size: int, lanes: int, seed: int) -> None:
    order, n = order_of(sizes, batch_size, lanes, seed), sum(sizes)
    both = order.at(np.arange(2 * n))
    assert sorted(both[:n].tolist()) == sorted(both[n:].tolist()) == list(range(n))


@settings(max_examples=40, deadline=None)
@given(
    sizes=SIZES,
    batch_size=st.integers(3, 50),
    worlds=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    steps=st.integers(1, 4),
)
def test_any_world_sizes_and_resumes_give_one_order(
    sizes: list[int], batch_size: int, worlds: list[int], steps: int
) -> None:
    seen: list[int] = []
    for number, world in enumerate(worlds):  # each attempt is of other objects, as in other processes
        order = order_of(sizes, batch_size)
        for step in range(number * steps, (number + 1) * steps):
            for rank in range(world):
                size = sum(sizes)
                sampler = TrainSampler(
                    size, global_batch_size=batch_size, seed=0, share=Share(rank, world), order=order
                )
                seen += sampler.at(step).indices.tolist()
    expected = order_of(sizes, batch_size).at(np.arange(len(worlds) * steps * batch_size))
    assert seen == expected.tolist()


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    sizes = [100] * 10
    one = order_of(sizes).at(np.arange(2000))
    assert (one[:1000] != one[1000:]).sum() > 900
    assert (one[:1000] != order_of(sizes, seed=1).at(np.arange(1000))).sum() > 900


def test_a_large_block_is_permuted_too() -> None:
    order = order_of([100_000, 50, 70_000], batch_size=64, lanes=2)
    found = order.at(np.arange(170_050))
    assert np.array_equal(np.sort(found), np.arange(170_050))
    assert (np.diff(found) == 1).sum() < 100


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_a_rank_reads_only_its_part_of_the_blocks(ranks: int) -> None:
    """One rank opens each block once, except for blocks at the edges of lanes. There are 8 lanes and 100 blocks."""
    order = order_of([64] * 100, batch_size=32, lanes=8)
    opened = 0
    for rank in range(ranks):
        sampler = TrainSampler(6400, global_batch_size=32, seed=0, share=Share(rank, ranks), order=order)
        blocks: set[int] = set()
        for step in range(200):
            now = set((sampler.at(step).indices // 64).tolist())
            assert len(now) <= 8 // ranks + 2
            opened += len(now - blocks)
            blocks = now
    assert opened <= 100 + 8 + ranks


def test_a_batch_mixes_as_many_blocks_as_there_are_lanes() -> None:
    order = order_of([64] * 100, batch_size=32, lanes=8)
    assert len(set((order.at(np.arange(32)) // 64).tolist())) == 8


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=12, max_size=30), step=st.integers(0, 9), world=st.integers(1, 3))
def test_what_follows_is_the_next_block_of_each_place_in_a_batch(sizes: list[int], step: int, world: int) -> None:
    """Each of the 6 places is a lane. The oracle walks through the following batches."""
    order, rows = order_of(sizes, batch_size=6, lanes=6), sum(sizes) // 6
    step %= rows
    start, stop = Share(world - 1, world).bounds(6)
    followed = order.following(step * 6 + start, stop - start)
    block = np.repeat(np.arange(len(sizes)), sizes)
    batches = block[order.at(np.arange(rows * 6))].reshape(rows, 6)[step:, start:stop]
    rows_left = {}
    for place in batches.T:
        if (changed := np.flatnonzero(place != place[0])).size:
            rows_left[int(place[changed[0]])] = int(changed[0])
    assert set(followed) == set(rows_left)
    assert [rows_left[number] for number in followed] == sorted(rows_left.values())
