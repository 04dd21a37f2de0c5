"""The order of data in blocks. Every sample once an epoch, few blocks at a time, and a function of the position."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.base.errors import ConfigError
from toolkit.data.datasets import InMemory
from toolkit.data.loader import Loader
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


SIZE, BATCH = 10, 4
SET = InMemory(torch.arange(SIZE).float().view(SIZE, 1, 1, 1), torch.arange(SIZE))


def by_weight(epoch: int) -> Sequence[int]:
    draw = np.random.default_rng([7, epoch])
    return draw.choice(SIZE, 6, p=np.arange(SIZE) / np.arange(SIZE).sum()).tolist()


def test_steps_go_through_the_given_epochs_whatever_the_number_of_ranks() -> None:
    expected = [sample for epoch in range(4) for sample in by_weight(epoch)]
    for ranks in (1, 3):
        loaders = [
            Loader(SET, global_batch_size=BATCH, seed=0, share=Share(rank, ranks), order=by_weight)
            for rank in range(ranks)
        ]
        assert loaders[0].dataset_size == 6
        steps = [[b for loader in loaders if (b := loader.at(step)) is not None] for step in (0, 1, 2, 3, 4, 5)]
        assert [int(target) for step in steps for batch in step for target in batch.targets] == expected


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (lambda epoch: [0, 10], r"order\(0\) of the job goes from 0 to 10, and the data set has 10 samples"),
        (lambda epoch: [0.5], r"order\(0\) of the job is not a list of indices"),
        (lambda epoch: [], r"order\(0\) of the job is not a list of indices"),
        (lambda epoch: [0] * (4 + epoch), r"order\(1\) of the job has 5 samples, and order\(0\) 4"),
    ],
)
def test_what_is_no_order_is_refused(order: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Loader(SET, global_batch_size=BATCH, seed=0, share=Share(0, 1), order=order).at(1)  # type: ignore[arg-type]


def test_the_order_belongs_to_what_a_resume_must_find_again() -> None:
    told = [
        Loader(SET, global_batch_size=BATCH, seed=0, share=Share(rank, 2), order=order).fingerprint()
        for rank, order in [(0, by_weight), (1, by_weight), (0, lambda epoch: by_weight(epoch)[::-1]), (0, None)]
    ]
    assert told[0] == told[1]
    assert len(set(told)) == 3
