"""What takes the place of a sample that cannot be loaded."""

from __future__ import annotations

import errno
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.samples import Damaged, Noisy
from toolkit.base.errors import JobFailedError
from toolkit.config import DataConfig
from toolkit.data.loader import Loader, build_loader, eval_batches
from toolkit.data.permutation import order
from toolkit.data.workers import TRIES
from toolkit.ranks.batch import BadSample, Batch, Share


def batch_at(dataset: Any, step: int = 0, *, batch: int = 9, share: Share = Share(0, 1)) -> Batch:  # noqa: B008
    loader = Loader(dataset, global_batch_size=batch, seed=3, share=share, max_bad_samples=100)
    found = loader.at(step)
    assert found is not None
    return found


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 12), st.integers(1, 9), st.integers(1, 4), st.integers(0, 5), st.data())
def test_which_sample_takes_the_place_of_a_bad_one_does_not_depend_on_the_world_size(
    n: int, b: int, w: int, step: int, data: st.DataObject
) -> None:
    dataset = Damaged(n, data.draw(st.sets(st.integers(0, n - 1), max_size=n // 2)))
    alone = batch_at(dataset, step, batch=b)
    shared = [batch_at(dataset, step, batch=b, share=Share(index, w)) for index in range(w)]
    assert torch.equal(torch.cat([batch.inputs for batch in shared]), alone.inputs)
    assert [bad for batch in shared for bad in batch.bad] == list(alone.bad)
    assert (len(alone), alone.global_count) == (b, b)


def test_only_bad_samples_are_replaced_and_each_is_told_with_its_position() -> None:
    good, damaged = batch_at(Noisy(9)), batch_at(Damaged(9, {2, 5}))
    rows = range(9)
    different = [row for row in rows if not torch.equal(good.inputs[row], damaged.inputs[row])]
    at = {sample: order(9, 3, 0, 0, 9).tolist().index(sample) for sample in (2, 5)}
    assert different == sorted(at.values())
    assert {2, 5}.isdisjoint(damaged.targets.tolist())
    assert damaged.targets.tolist() == damaged.inputs[:, 0].long().tolist(), "the target is the replacement's"
    for sample, position in at.items():
        assert BadSample(sample, position, "OSError: truncated image") in damaged.bad
    assert {(bad.index, bad.position) for bad in damaged.bad} <= {(s, p) for s in at for p in at.values()}


def test_another_position_draws_another_replacement() -> None:
    """Otherwise one good sample would replace all bad ones of a run."""
    epoch = batch_at(Damaged(1000, range(500)), batch=1000)
    replaced = epoch.targets[sorted({bad.position for bad in epoch.bad})]
    assert len(replaced) == 500
    assert replaced.min() >= 500
    assert len(replaced.unique()) > 250  # of 500 draws out of 500, 316 are expected


def test_a_replacement_comes_from_the_same_epoch_of_the_jobs_order() -> None:
    """The samples that the order leaves out may be the evaluation's."""

    def fold(epoch: int) -> range:
        return range(10 * epoch, 10 * epoch + 10)

    dataset = Damaged(1000, {3, 8, 11, 12, 19})
    loader = Loader(dataset, global_batch_size=10, seed=3, share=Share(0, 1), max_bad_samples=100, order=fold)
    for epoch in range(2):
        batch = loader.at(epoch)
        assert batch is not None
        assert batch.bad
        assert set(batch.targets.tolist()) <= {*fold(epoch)} - {*dataset.bad}


@pytest.mark.parametrize("error", [MemoryError(), OSError(errno.EMFILE, "too many open files")], ids=repr)
def test_a_machine_out_of_memory_or_files_is_no_bad_sample(error: Exception) -> None:
    with pytest.raises(JobFailedError, match=r"^sample 5 .*cannot be loaded"):
        batch_at(Damaged(9, {5}, error))


def test_storage_that_is_away_ends_the_run_instead_of_being_tried_for_ever() -> None:
    with pytest.raises(JobFailedError, match=rf"nor any of {TRIES - 1} drawn in its place.*whether the storage"):
        batch_at(Damaged(9, range(9)))


def test_an_evaluation_never_skips() -> None:
    with pytest.raises(JobFailedError, match="sample 5"):
        list(eval_batches(Damaged(9, {5}), Share(0, 1), 3))


@pytest.mark.parametrize(("policy", "most"), [("fail", None), ("skip", 7)])
def test_the_config_says_what_becomes_of_bad_samples(policy: str, most: int | None) -> None:
    config = DataConfig(global_batch_size=9, bad_samples=policy, max_bad_samples=7)
    loader = build_loader(Damaged(9, {5}), config, Share(0, 1), seed=3)
    assert loader.max_bad_samples == most
    if most is None:
        with pytest.raises(JobFailedError):
            loader.at(0)
    else:
        assert len(loader.at(0) or ()) == 9
