from __future__ import annotations

import pytest

from toolkit.config import TrainConfig
from toolkit.train.loop import total_steps


@pytest.mark.parametrize(
    ("epochs", "samples", "batch", "steps"), [(1, 50, 20, 3), (2, 50, 20, 5), (4, 50, 20, 10), (1, 10, 64, 1)]
)
def test_the_last_step_is_the_first_after_which_every_sample_was_seen_often_enough(
    epochs: int, samples: int, batch: int, steps: int
) -> None:
    assert total_steps(TrainConfig(epochs=epochs), samples, batch) == steps


def test_max_steps_ends_a_run_early_and_never_late() -> None:
    assert total_steps(TrainConfig(epochs=4, max_steps=3), 50, 20) == 3
    assert total_steps(TrainConfig(epochs=4, max_steps=30), 50, 20) == 10
