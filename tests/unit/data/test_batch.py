from __future__ import annotations

import pytest
import torch

from toolkit.ranks.batch import Batch, Share


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
