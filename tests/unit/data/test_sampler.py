from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.data.permutation import BLOCK, ShuffledOrder, order
from toolkit.data.sampler import EvalSampler, TrainSampler, eval_calls
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
@given(SIZES, BATCHES, st.integers(1, 4))
def test_each_sample_comes_once_per_epoch_though_batches_straddle_epochs(n: int, b: int, epochs: int) -> None:
    steps = -(-n * epochs // b)
    samples = [sample for step in range(steps) for _, sample in global_batch(n, b, 1, step)]
    for epoch in range(epochs):
        assert sorted(samples[epoch * n : (epoch + 1) * n]) == list(range(n))


@settings(max_examples=60, deadline=None)
@given(SIZES, BATCHES, st.lists(WORLDS, min_size=2, max_size=5))
def test_defect_a_sample_seen_twice_across_world_sizes(n: int, b: int, worlds: list[int]) -> None:
    """A run resumed in mid-epoch goes on where it was, on other numbers of ranks."""
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


def test_imagenets_validation_set_comes_out_exact_on_64_shares() -> None:
    shares = [EvalSampler(50_000, batch_size=128, share=Share(index, 64)) for index in range(64)]
    assert sum(share.stop - share.start for share in shares) == 50_000
    assert {share.calls for share in shares} == {7}


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
