"""Orders that a job provides. They give the same samples on any number of ranks and at any step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from toolkit.base.errors import ConfigError
from toolkit.data.datasets import InMemory
from toolkit.data.loader import Loader
from toolkit.ranks.batch import Share

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
        (lambda epoch: [0.5], r"order\(0\) of the job is no list of indices"),
        (lambda epoch: [], r"order\(0\) of the job is no list of indices"),
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
