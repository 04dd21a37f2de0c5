from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.config import TrainConfig
from toolkit.errors import ConfigError
from toolkit.train.loop import total_steps
from toolkit.train.loss_window import LossWindow
from toolkit.train.not_finite import NotFinite, bad_weights


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


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn, torch.bfloat16])
def test_weights_of_every_type_that_can_be_nan_are_looked_at(dtype: torch.dtype) -> None:
    good, bad = torch.ones(3).to(dtype), torch.full((3,), math.nan).to(dtype)
    assert bad_weights({"weights/a": good, "weights/b": bad, "weights/c": torch.ones(3, dtype=torch.int8)}) == ["b"]


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


def test_a_window_of_another_number_of_ranks_is_rank_0s_alone() -> None:
    saved = {"steps": 4, "sums": {"loss": [1.0, 2.0]}}
    held = []
    for rank in range(3):
        window = LossWindow(rank, 3, lambda values: {name: torch.tensor(value) for name, value in values.items()})
        window.restore(saved)
        held.append(window._before["loss"])
    assert held == [3.0, 0.0, 0.0]
