from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.base.errors import NotFiniteError
from toolkit.config import TrainConfig
from toolkit.config.learning_rate import total_steps
from toolkit.train import not_finite
from toolkit.train.loss_windows import LossWindow
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


def checks(**train: Any) -> NotFinite:
    held: Any = SimpleNamespace(sum=dict, global_samples=lambda step: [step], activity=None, device="cpu")
    held.live = lambda: {"weights/a": torch.tensor([math.nan])}
    return NotFinite(TrainConfig(**train), held, held, held, lambda step, newest: None)


def test_a_resumed_state_of_weights_that_were_not_finite_stays_marked() -> None:
    """Before, an evaluation after the resume wrote into the checkpoint that they were finite."""
    before, after = checks(on_nan="warn"), checks(on_nan="warn")
    assert before.may_save(10, is_last=False)
    after.restore(before.state())
    assert after.state()["finite"] is False


def test_a_stop_between_two_means_that_are_not_finite_keeps_their_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(not_finite, "on_ranks", lambda *_: "")
    before, after = checks(), checks()
    before.judge(10, math.nan, [])
    after.restore(before.state())
    with pytest.raises(NotFiniteError, match="not finite since step 10"):
        after.judge(20, math.nan, [])


def test_a_window_of_another_number_of_ranks_is_rank_0s_alone() -> None:
    saved = {"steps": 4, "sums": {"loss": [1.0, 2.0]}}
    held = []
    for rank in range(3):
        window = LossWindow(rank, 3, lambda values: {name: torch.tensor(value) for name, value in values.items()})
        window.restore(saved)
        held.append(window._before["loss"])
    assert held == [3.0, 0.0, 0.0]
