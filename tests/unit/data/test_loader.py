import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import default_collate

from tests.unit.data.samples import Damaged, Noisy, Numbers
from toolkit.base.errors import JobFailedError
from toolkit.config import DataConfig
from toolkit.data.datasets import InMemory
from toolkit.data.loader import Loader, build_loader, eval_batches
from toolkit.data.permutation import order
from toolkit.data.sampler import eval_calls
from toolkit.ranks.batch import Batch, Share


def loader(dataset: Any, *, batch: int = 8, index: int = 0, count: int = 1, **more: Any) -> Loader:
    return Loader(dataset, global_batch_size=batch, seed=3, share=Share(index, count), **more)


def batch_at(source: Loader, step: int) -> Batch:
    batch = source.at(step)
    assert batch is not None
    return batch


class FakeClock:
    """A clock whose time passes only while samples are read."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Slow(Noisy):
    def __init__(self, size: int, clock: FakeClock) -> None:
        super().__init__(size)
        self.clock = clock

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.clock.now_s += 0.5
        return super().__getitem__(index)


class SlowNumbers(Numbers):
    def __init__(self, size: int, clock: FakeClock) -> None:
        super().__init__(size)
        self.clock = clock

    def batch(self, indices: Any) -> tuple[Tensor, Tensor]:
        self.clock.now_s += 2.0
        return super().batch(indices)


@pytest.mark.parametrize("kind", [Slow, SlowNumbers])
def test_defect_data_time_measured_after_the_fetch(kind: Any) -> None:
    clock = FakeClock()
    slow = loader(kind(20, clock), batch=4, clock=clock)
    slow.at(0)
    assert slow.data_wait_s == 2.0


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 30), st.integers(1, 20), st.integers(1, 5), st.integers(0, 30))
def test_batches_hold_the_samples_of_their_positions(n: int, b: int, w: int, step: int) -> None:
    expected = [order(n, 3, p // n, p % n, p % n + 1)[0] for p in range(step * b, (step + 1) * b)]
    batches = [batch_at(loader(Numbers(n), batch=b, index=index, count=w), step) for index in range(w)]
    assert torch.cat([batch.targets for batch in batches]).tolist() == expected
    assert torch.cat([batch.positions for batch in batches]).tolist() == list(range(step * b, (step + 1) * b))
    assert {batch.global_count for batch in batches} == {b}


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 4), st.integers(0, 5))
def test_augmentation_does_not_depend_on_the_world_size(n: int, b: int, w: int, step: int) -> None:
    alone = batch_at(loader(Noisy(n), batch=b), step)
    shared = [batch_at(loader(Noisy(n), batch=b, index=index, count=w), step) for index in range(w)]
    assert torch.equal(torch.cat([batch.inputs for batch in shared]), alone.inputs)


def test_resume_at_any_step_equals_the_undisturbed_run() -> None:
    undisturbed = loader(Noisy(21))
    expected = [batch_at(undisturbed, step).inputs for step in range(7)]
    for step in range(7):
        assert torch.equal(batch_at(loader(Noisy(21)), step).inputs, expected[step])


def test_a_sample_is_augmented_differently_in_the_next_epoch() -> None:
    source = loader(Noisy(8))
    first, second = ({int(row[0]): row[1:] for row in batch_at(source, step).inputs} for step in (0, 1))
    assert set(first) == set(second) == set(range(8))
    assert all((first[index] != second[index]).all() for index in range(8))


def test_another_seed_augments_differently() -> None:
    other = Loader(Noisy(8), global_batch_size=8, seed=4, share=Share(0, 1))
    mine, theirs = batch_at(loader(Noisy(8)), 0).inputs, batch_at(other, 0).inputs
    assert not np.intersect1d(mine[:, 1:].numpy(), theirs[:, 1:].numpy()).size


@pytest.mark.parametrize("dataset", [Noisy(9), Numbers(9)])
def test_loading_leaves_the_process_generators_as_they_were(dataset: Any) -> None:
    source = loader(dataset)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    source.at(0)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]  # type: ignore[index]


def test_a_batch_collated_or_loaded_singly_leaves_the_generators_too() -> None:
    class Torn(InMemory):
        def batch(self, indices: Any) -> Any:
            if len(indices) > 1:
                raise OSError("torn")
            return super().batch(indices)

    pixels, classes = torch.zeros(9, 1, 2, 2), torch.arange(9)
    collated = loader(InMemory(pixels, classes), collate=default_collate)
    for source in (collated, loader(Torn(pixels, classes), max_bad_samples=1)):
        before = torch.get_rng_state()
        assert len(batch_at(source, 0)) == 8
        assert torch.equal(torch.get_rng_state(), before)


class Grouping(Noisy):
    """A data set with a method like that of Hugging Face's ``Dataset``."""

    def batch(self, batch_size: int, drop_last_batch: bool = False) -> None:
        raise AssertionError("it does not take indices")


class WithSize(Noisy):
    batch = 32


@pytest.mark.parametrize("kind", [Grouping, WithSize])
def test_a_batch_that_takes_no_indices_is_not_asked_for_samples(kind: Any) -> None:
    source = loader(kind(9))
    assert torch.equal(batch_at(source, 0).inputs, batch_at(loader(Noisy(9)), 0).inputs)
    assert source.fingerprint() == "9 samples"
    assert [len(batch) for batch in eval_batches(kind(9), Share(0, 1), 5) if batch is not None] == [5, 4]


def test_collation_is_torchs_own() -> None:
    batch = batch_at(loader(Noisy(8)), 0)
    inputs, targets = default_collate([(row, int(row[0])) for row in batch.inputs])
    assert torch.equal(batch.inputs, inputs)
    assert torch.equal(batch.targets, targets)
    assert (batch.targets.dtype, batch.positions.dtype) == (torch.int64, torch.int64)


@pytest.mark.parametrize("dataset", [Noisy(9), Numbers(9)])
def test_a_share_without_samples_gets_an_empty_batch_of_the_right_shape(dataset: Any) -> None:
    shares = [batch_at(loader(dataset, batch=2, index=index, count=3), 0) for index in range(3)]
    assert [len(batch) for batch in shares] == [0, 1, 1]
    assert shares[0].inputs.shape == (0, *shares[1].inputs.shape[1:])
    assert (shares[0].inputs.dtype, shares[0].targets.dtype) == (shares[1].inputs.dtype, shares[1].targets.dtype)


def test_a_rank_that_has_no_share_gets_none() -> None:
    assert loader(Numbers(9), count=0).at(0) is None


def test_a_sample_that_raises_is_named_with_its_position() -> None:
    position = order(9, 3, 0, 0, 9).tolist().index(5)
    with pytest.raises(JobFailedError, match=rf"sample 5 .*\(position {position} .*OSError: truncated image"):
        loader(Damaged(9, {5}), batch=9).at(0)


def test_loader_knows_the_length_of_an_epoch_and_its_device() -> None:
    config = DataConfig(global_batch_size=8)
    built = build_loader(Numbers(20), config, Share(1, 2), seed=3, device="meta")
    assert built.dataset_size == 20
    batch = batch_at(built, 0)
    assert (batch.inputs.device.type, len(batch)) == ("meta", 4)
    built.close()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(1, 9), st.integers(1, 6))
def test_evaluation_counts_every_sample_once_for_any_world_size(n: int, b: int, w: int) -> None:
    per_share = [list(eval_batches(Numbers(n), Share(index, w), b)) for index in range(w)]
    seen = [
        index for batches in per_share for batch in batches if batch is not None for index in batch.targets.tolist()
    ]
    assert seen == list(range(n))
    assert {len(batches) for batches in per_share} == {eval_calls(n, w, b)}


def test_evaluation_of_single_samples_equals_the_data_set() -> None:
    batches = [batch for batch in eval_batches(Noisy(7), Share(1, 2), 3) if batch is not None]
    assert [batch.targets.tolist() for batch in batches] == [[3, 4, 5], [6]]
    assert torch.cat([batch.positions for batch in batches]).tolist() == [3, 4, 5, 6]


def test_evaluation_yields_nothing_to_a_rank_without_a_share() -> None:
    assert list(eval_batches(Numbers(7), Share(0, 0), 3)) == []


def batch_of(count: int) -> Batch:
    return Batch((torch.arange(count * 2.0).view(count, 2), torch.arange(count)), torch.arange(count) + 100, 64)


def test_micro_batches_are_the_batch_in_order() -> None:
    parts = batch_of(7).split(3)
    assert [len(part) for part in parts] == [2, 2, 3]
    assert torch.equal(torch.cat([part.inputs for part in parts]), batch_of(7).inputs)
    assert torch.equal(torch.cat([part.positions for part in parts]), batch_of(7).positions)
    assert {part.global_count for part in parts} == {64}


def test_micro_batches_may_be_empty_and_keep_their_shape() -> None:
    assert [tuple(part.inputs.shape) for part in batch_of(1).split(2)] == [(0, 2), (1, 2)]


def test_positions_stay_on_the_cpu() -> None:
    moved = batch_of(3).to("meta")
    assert moved.inputs.device.type == moved.targets.device.type == "meta"
    assert moved.positions.device.type == "cpu"
    assert len(moved) == 3


def test_a_share_of_nothing_is_empty() -> None:
    assert Share(0, 0).bounds(10) == (0, 0)


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, -1), (1, 0)])
def test_impossible_shares_are_refused(index: int, count: int) -> None:
    with pytest.raises(ValueError, match=r"within 0\.\.count-1"):
        Share(index, count)


def positions(loaders: list[Loader], step: int) -> list[list[int]]:
    batches = [loader.at(step) for loader in loaders]
    return [batch.positions.tolist() for batch in batches if batch is not None]


@pytest.mark.parametrize(("dataset", "workers"), [(Numbers(50), 0), (Noisy(50), 0), (Noisy(50), 2)])
def test_the_global_batch_is_the_same_however_it_is_cut(dataset: Any, workers: int) -> None:
    """The cuts change after steps 3, 6 and 7, from the earliest possible step on."""
    even = Loader(dataset, global_batch_size=12, seed=3, share=Share(0, 1))
    loaders = [
        Loader(dataset, global_batch_size=12, seed=3, share=Share(rank, 3), workers=workers) for rank in range(3)
    ]
    news = {3: [6, 3, 3], 6: [2, 2, 8], 7: [4, 5, 3]}
    expected = {0: [4, 4, 4]}
    try:
        for step in range(22):
            if step in news:
                for loader in loaders:
                    loader.rebalance(step + loader.ahead, news[step])
                # batches that workers have begun keep the cut before
                expected[step + loaders[0].ahead] = news[step]
            batches = [batch for loader in loaders if (batch := loader.at(step)) is not None]
            counts = expected[max(first for first in expected if first <= step)]
            assert [len(batch) for batch in batches] == counts, step
            whole = even.at(step)
            assert whole is not None
            for name in ("inputs", "targets", "positions"):
                parts = [getattr(batch, name) for batch in batches]
                assert np.array_equal(np.concatenate(parts), getattr(whole, name)), (step, name)
    finally:
        for loader in loaders:
            loader.close()


def test_steps_that_were_given_are_cut_as_they_were() -> None:
    loaders = [Loader(Numbers(50), global_batch_size=10, seed=3, share=Share(rank, 2)) for rank in range(2)]
    for loader in loaders:
        loader.rebalance(5, [8, 2])
        loader.rebalance(9, [3, 7])
    assert [[len(part) for part in positions(loaders, step)] for step in (9, 4, 8, 5, 30)] == [
        [3, 7],
        [5, 5],
        [8, 2],
        [8, 2],
        [3, 7],
    ]
