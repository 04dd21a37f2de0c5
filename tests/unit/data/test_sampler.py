import itertools
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.process_limits import ChangeLimits
from tests.unit.data.samples import Noisy, Numbers
from toolkit.base.errors import ConfigError
from toolkit.config import DataConfig
from toolkit.data.loader import Loader, build_loader
from toolkit.data.permutation import BLOCK, SORTED_MAX, ShuffledOrder, hash64, mix, mix_array, order
from toolkit.data.sampler import EvalSampler, TrainSampler, eval_calls, samples_of, share_of
from toolkit.ranks.batch import Share

SIZES = st.integers(1, 50)
BATCHES = st.integers(1, 70)
WORLDS = st.integers(1, 9)


def samplers(size: int, batch: int, world: int) -> list[TrainSampler]:
    return [TrainSampler(size, global_batch_size=batch, seed=5, share=Share(index, world)) for index in range(world)]


def global_batch(size: int, batch: int, world: int, step: int) -> list[tuple[int, int]]:
    """Return (position, sample) of one step, share after share."""
    parts = [sampler.at(step) for sampler in samplers(size, batch, world)]
    return [pair for part in parts for pair in zip(part.positions().tolist(), part.indices.tolist(), strict=True)]


@settings(max_examples=60, deadline=None)
@given(SIZES, BATCHES, WORLDS, st.integers(1, 6))
def test_shares_of_all_steps_are_the_positions_of_the_run_exactly_once(n: int, b: int, w: int, steps: int) -> None:
    seen = [position for step in range(steps) for position, _ in global_batch(n, b, w, step)]
    assert seen == list(range(steps * b))


@settings(max_examples=60, deadline=None)
@given(SIZES, BATCHES, WORLDS, st.integers(0, 1000))
def test_global_batch_is_the_same_for_every_world_size(n: int, b: int, w: int, step: int) -> None:
    assert global_batch(n, b, w, step) == global_batch(n, b, 1, step)


@settings(max_examples=60, deadline=None)
@given(SIZES, BATCHES, WORLDS, st.lists(st.integers(0, 40), min_size=1, max_size=8))
def test_random_access_equals_sequential_access(n: int, b: int, w: int, asked: list[int]) -> None:
    sequential, jumping = samplers(n, b, w)[0], samplers(n, b, w)[0]
    parts = [sequential.at(step) for step in range(41)]
    for step in asked:
        part = jumping.at(step)
        assert (part.start, part.indices.tolist()) == (parts[step].start, parts[step].indices.tolist())


def test_blocks_generated_ahead_give_the_order_across_blocks_and_the_epochs_end() -> None:
    n, b = 10**9, 4096
    sampler = samplers(n, b, 3)[1]
    steps = [*range(25), n // b - 1, n // b, n // b + 1, 3]
    for step in steps:
        part = sampler.at(step)
        positions = part.positions().tolist()
        assert (positions[0], len(positions)) == (step * b + 1365, 1365)
        for place in (0, 700, 1364):
            p = positions[place]
            assert part.indices[place] == order(n, 5, p // n, p % n, p % n + 1)[0]


def test_a_share_generates_no_other_shares_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 1,024 shares all but a thousandth of the work would be useless."""
    generated = []
    monkeypatch.setattr(ShuffledOrder, "at", lambda self, positions: generated.append(positions.size) or positions)
    sampler = samplers(10**9, 64 * 1024, 1024)[5]
    for step in range(1000):
        sampler.at(step)
    assert sum(generated) <= 64 * 1000 + BLOCK
    assert len(generated) == 4


@settings(max_examples=60, deadline=None)
@given(SIZES, BATCHES, st.lists(WORLDS, min_size=2, max_size=5))
def test_defect_a_sample_seen_twice_across_world_sizes(n: int, b: int, worlds: list[int]) -> None:
    """A run resumed in mid-epoch continues where it was, on other numbers of ranks."""
    samples = [sample for step, world in enumerate(worlds) for _, sample in global_batch(n, b, world, step)]
    undisturbed = itertools.chain.from_iterable(order(n, 5, epoch, 0, n).tolist() for epoch in itertools.count())
    assert samples == list(itertools.islice(undisturbed, len(worlds) * b))


@given(BATCHES, WORLDS)
def test_shares_differ_by_at_most_one_sample(b: int, w: int) -> None:
    lengths = [stop - start for start, stop in (Share(index, w).bounds(b) for index in range(w))]
    assert sum(lengths) == b
    assert max(lengths) - min(lengths) <= 1


def test_a_step_before_the_beginning_is_refused() -> None:
    with pytest.raises(IndexError, match="before the beginning"):
        samplers(10, 4, 1)[0].at(-1)


def test_a_global_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        samplers(10, 0, 1)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 200), st.integers(1, 40), st.integers(1, 80))
def test_evaluation_sees_each_sample_once_and_every_share_calls_equally_often(n: int, b: int, w: int) -> None:
    shares = [EvalSampler(n, batch_size=b, share=Share(index, w)) for index in range(w)]
    seen = [index for share in shares for call in range(share.calls) for index in share.at(call).indices.tolist()]
    assert seen == list(range(n))
    assert {share.calls for share in shares} == {eval_calls(n, w, b)}
    for call in range(shares[0].calls):
        parts = [share.at(call) for share in shares]
        assert {part.global_count for part in parts} == {sum(part.indices.size for part in parts)}
        assert max(part.indices.size for part in parts) > 0


def test_an_evaluation_batch_behind_the_last_is_refused() -> None:
    with pytest.raises(IndexError, match="evaluation batch 3 of 3"):
        EvalSampler(10, batch_size=4, share=Share(0, 1)).at(3)


def test_repeats_are_those_of_torchvisions_sampler_with_copies_on_other_ranks() -> None:
    """In references/classification/sampler.py each sample comes ``repeats`` times in a row.

    The copies are dealt out to the ranks in turn.
    """
    size, batch, repeats, ranks = 30, 12, 3, 3
    once = TrainSampler(size, global_batch_size=1, seed=5, share=Share(0, 1))
    order = [int(once.at(step).indices[0]) for step in range(2 * size)]
    copies = [sample for epoch in (0, size) for sample in np.repeat(order[epoch : epoch + size], repeats)[:size]]
    samplers = [
        TrainSampler(size, global_batch_size=batch, seed=5, share=Share(rank, ranks), repeats=repeats)
        for rank in range(ranks)
    ]
    for step in range(5):
        parts = [sampler.at(step).indices.tolist() for sampler in samplers]
        expected = copies[step * batch : (step + 1) * batch]
        if step * batch // size == (step * batch + batch - 1) // size and step * batch % size % repeats == 0:
            # within an epoch: rank r gets copy r of each sample
            assert parts == [expected[rank::repeats] for rank in range(ranks)]
        assert sorted(sample for part in parts for sample in part) == sorted(expected)


def test_repeats_give_the_same_batches_on_any_number_of_ranks() -> None:
    alone, *samplers = (
        TrainSampler(70_001, global_batch_size=10, seed=1, share=share, repeats=4)
        for share in (Share(0, 1), *(Share(rank, 3) for rank in range(3)))
    )
    for step in (0, 3, 6_999, 7_000, 20_000):
        together = [index for sampler in samplers for index in sampler.at(step).indices.tolist()]
        assert together == alone.at(step).indices.tolist()


def test_hash_is_partitionedmix64_as_published() -> None:
    # first outputs for seed 1234567, from Vigna's splitmix64.c: state += golden ratio, then the finaliser
    golden = 0x9E3779B97F4A7C15
    states = [(1234567 + step * golden) % 2**64 for step in (1, 2, 3)]
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [mix(state) for state in states] == published
    assert mix_array(np.array(states, dtype=np.uint64)).tolist() == published


@pytest.mark.parametrize("n", [1, 2, 3, 10, 1797, SORTED_MAX, SORTED_MAX + 1, 2**17, 100_003])
def test_every_epoch_is_a_permutation(n: int) -> None:
    for epoch in (0, 5):
        assert np.array_equal(np.sort(order(n, 7, epoch, 0, n)), np.arange(n))


def test_order_is_the_same_in_every_version() -> None:
    # a run resumed with a newer toolkit must continue in the order that it began in
    assert order(10, 0, 0, 0, 10).tolist() == [0, 7, 8, 2, 5, 9, 4, 6, 3, 1]
    assert order(1437, 3, 2, 700, 705).tolist() == [627, 1048, 632, 317, 1422]
    assert order(1_281_167, 0, 0, 0, 5).tolist() == [1148581, 83359, 218988, 1211718, 88798]
    assert order(10**12, 1, 9, 10**11, 10**11 + 4).tolist() == [534650051946, 477648482398, 565416665310, 483711916037]
    assert hash64(1, -2, 3) == 13199215901169147697


@pytest.mark.parametrize("n", [1000, 100_003, 10**12])
def test_order_does_not_depend_on_the_block_asked_for(n: int) -> None:
    whole = order(n, 1, 4, 100, 400)
    assert order(n, 1, 4, 150, 151)[0] == whole[50]
    assert np.array_equal(np.concatenate([order(n, 1, 4, 100, 163), order(n, 1, 4, 163, 400)]), whole)


@pytest.mark.parametrize("n", [50_000, 1_000_003])
def test_epochs_and_seeds_give_unrelated_orders(n: int) -> None:
    base = order(n, 0, 0, 0, 5000).astype(float)
    for seed, epoch in ((0, 1), (1, 0), (1, 1)):
        other = order(n, seed, epoch, 0, 5000).astype(float)
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.06  # 4 standard deviations of an honest shuffle
        assert (base == other).sum() < 10


@pytest.mark.parametrize("n", [40_000, 200_000, 3_000_000])
def test_order_looks_random(n: int) -> None:
    values = order(n, 11, 3, 0, 20_000)
    counts = np.histogram(values, bins=20, range=(0, n))[0]
    # chi-square with 19 degrees of freedom: above 50 once in 7,000 honest shuffles
    assert ((counts - 1000) ** 2 / 1000).sum() < 50
    steps = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(steps) < 0.03
    assert abs(np.corrcoef(np.arange(20_000), values)[0, 1]) < 0.03


def test_positions_outside_an_epoch_are_refused() -> None:
    with pytest.raises(ValueError, match="within an epoch of 10 samples"):
        order(10, 0, 0, 5, 11)


def test_order_across_epochs_is_the_epochs_one_after_the_other() -> None:
    n = SORTED_MAX + 10
    endless = ShuffledOrder(n, 3)
    straddling = endless.at(np.arange(n - 4, n + 6))
    assert np.array_equal(straddling[:4], order(n, 3, 0, n - 4, n))
    assert np.array_equal(straddling[4:], order(n, 3, 1, 0, 6))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.lists(st.integers(0, 300), max_size=90),
)
def test_order_gives_any_positions_in_whatever_sequence_they_are_asked(n: int, asked: list[int]) -> None:
    alone = [order(n, 1, p // n, p % n, p % n + 1)[0] for p in asked]
    assert ShuffledOrder(n, 1).at(np.array(asked, dtype=np.int64)).tolist() == alone


def test_large_orders_give_any_positions() -> None:
    n = 10**9
    asked = np.array([[0, 64, 5], [2 * n + 7, n - 3, n]])
    expected = [[order(n, 1, p // n, p % n, p % n + 1)[0] for p in row] for row in asked.tolist()]
    assert ShuffledOrder(n, 1).at(asked).tolist() == expected


def test_an_empty_training_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="the training set is empty"):
        ShuffledOrder(0, 1)


SPLITS = ["blocks", "hash"]
FEW_WORLDS = st.integers(1, 6)


def sampler(size: int, batch: int, index: int, count: int, split: str, seed: int = 5) -> TrainSampler:
    return TrainSampler(size, global_batch_size=batch, seed=seed, share=Share(index, count), partition=split)


def parts(size: int, count: int, split: str) -> list[list[int]]:
    """Return the samples of each share.

    The oracle for blocks is numpy's linspace, and for hash the assignment of each index.
    """
    if split == "blocks":
        edges = np.floor(np.linspace(0, size, count + 1) + 1e-9).astype(int)
        return [list(range(a, b)) for a, b in pairwise(edges)]
    owners = share_of(np.arange(size), count)
    return [np.flatnonzero(owners == index).tolist() for index in range(count)]


@pytest.mark.parametrize("split", SPLITS)
@settings(max_examples=40, deadline=None)
@given(st.integers(40, 90), st.integers(6, 30), FEW_WORLDS, st.integers(1, 3))
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
        Loader(Noisy(50), global_batch_size=11, seed=3, share=Share(index, 3), partition=split) for index in range(3)
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
    assert share_of(np.arange(50), 7).tolist() == [mix((index + key) % 2**64) % 7 for index in range(50)]


def test_a_data_set_of_several_chunks_is_cut_as_one(change_limits: ChangeLimits) -> None:
    whole = samples_of(5000, Share(2, 3), "hash")
    change_limits(permuted_at_once=700)
    assert np.array_equal(samples_of(5000, Share(2, 3), "hash"), whole)


@pytest.mark.parametrize(("split", "size"), [("blocks", 3), ("hash", 2)])
def test_a_share_without_a_sample_is_refused(split: str, size: int) -> None:
    with pytest.raises(ConfigError, match=r"data.partition: .* leaves share \d of 4 none of"):
        _ = [samples_of(size, Share(index, 4), split) for index in range(4)]


def test_the_config_builds_it_and_a_checkpoint_knows_the_share() -> None:
    config = DataConfig(global_batch_size=8, partition="blocks")
    loader = build_loader(Numbers(20), config, Share(1, 2), seed=3)
    assert {sample for step in range(10) for sample in loader.sample_indices(step)} == set(range(10, 20))
    loader.restore(loader.state())
    with pytest.raises(ConfigError, match=r"this rank read share 1 of 2 .* and has share 1 of 4 now"):
        build_loader(Numbers(20), config, Share(1, 4), seed=3).restore(loader.state())
    assert build_loader(Numbers(20), DataConfig(), Share(1, 2), seed=3).state() is None
    assert build_loader(Numbers(20), config, Share(0, 0), seed=3).at(0) is None


def test_the_parts_are_found_once_for_the_samples_of_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    loaders = [Loader(Numbers(40), global_batch_size=8, seed=3, share=Share(i, 2), partition="hash") for i in range(2)]
    expected = [[sample for loader in loaders for sample in loader.sample_indices(step)] for step in range(3)]
    asked: list[Share] = []

    def counted(size: int, share: Share, split: str) -> Any:
        asked.append(share)
        return samples_of(size, share, split)

    monkeypatch.setattr("toolkit.data.sampler.samples_of", counted)
    assert [loaders[0].global_indices(step) for step in range(3)] == expected
    assert asked == [Share(0, 2), Share(1, 2)]
