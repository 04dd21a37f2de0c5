from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.config import TrainConfig
from toolkit.errors import ConfigError
from toolkit.train.loop import total_steps
from toolkit.train.not_finite import NotFinite


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


def test_a_stop_between_two_means_that_are_not_finite_keeps_their_count() -> None:
    held: Any = SimpleNamespace(sum=lambda values: {}, live=dict, global_samples=lambda step: [step])

    def checks() -> NotFinite:
        return NotFinite(TrainConfig(), held, held, held, lambda step, newest: None)

    held.activity = SimpleNamespace()
    before, after = checks(), checks()
    before.judge(10, math.nan, [])
    after.restore(before.state())
    with pytest.raises(ConfigError, match="not finite since step 10"):
        after.judge(20, math.nan, [])
