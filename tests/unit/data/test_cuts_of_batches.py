"""What loaders give when the shares of the ranks are moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.data.samples import Noisy, Numbers
from toolkit.data.loader import Loader
from toolkit.ranks.batch import Share


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
                    loader.cut(step + loader.ahead, news[step])
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
        loader.cut(5, [8, 2])
        loader.cut(9, [3, 7])
    assert [[len(part) for part in positions(loaders, step)] for step in (9, 4, 8, 5, 30)] == [
        [3, 7],
        [5, 5],
        [8, 2],
        [8, 2],
        [3, 7],
    ]
