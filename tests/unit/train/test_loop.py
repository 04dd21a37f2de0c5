import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from toolkit.base.errors import NotFiniteError
from toolkit.config import TrainConfig
from toolkit.config.learning_rate import total_steps
from toolkit.train import not_finite
from toolkit.train.loss_windows import LossWindow
from toolkit.train.not_finite import JobNotFinite, bad_weights


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


HELD: Any = SimpleNamespace(
    sum=dict,
    global_indices=lambda step: [step],
    device="cpu",
    live_state=lambda: {"weights/a": torch.tensor([math.nan])},
)


def checks(**train: Any) -> JobNotFinite:
    return JobNotFinite(TrainConfig(**train), HELD, HELD, HELD, lambda step, newest: None)


def test_a_resumed_state_of_weights_that_were_not_finite_stays_marked() -> None:
    """Before, an evaluation after the resume wrote into the checkpoint that they were finite."""
    before, after = checks(on_nan="warn"), checks(on_nan="warn")
    assert before.may_save(10, HELD)
    after.restore(before.state())
    assert after.state()["finite"] is False


def test_a_stop_between_two_means_that_are_not_finite_keeps_their_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(not_finite, "bad_ranks_phrase", lambda *_: "")
    before, after = checks(), checks()
    before.judge(10, math.nan, [])
    after.restore(before.state())
    with pytest.raises(NotFiniteError, match="not finite since step 10"):
        after.judge(20, math.nan, [])


def window(rank: int, *others: Mapping[str, float], are_parts: bool = False) -> LossWindow:
    """Return a window of a rank whose peers give what ``others`` say, and 0 for all else."""

    def by_rank(values: Mapping[str, float | torch.Tensor]) -> dict[str, torch.Tensor]:
        rows = [values, *others]
        return {name: torch.tensor([float(row.get(name, 0.0)) for row in rows]) for name in values}

    return LossWindow(rank, 1 + len(others), by_rank, lambda own: [own], are_parts=are_parts)


def test_a_window_is_a_mean_over_the_steps_that_were_made() -> None:
    first, again = window(0, are_parts=True), window(0, are_parts=True)
    for loss in (4.0, 0.0, 2.0):
        first.add({"train/loss": torch.tensor(loss), "train/kl": torch.tensor(loss / 4)})
    first.leave_out(1)
    again.restore(first.state())
    assert again.state() == first.state(), "a stop before the first step saves it once more"
    again.add({"train/loss": torch.tensor(3.0), "train/kl": torch.tensor(0.0)})
    assert first.take(0.5) == ({"train/loss": 3.0, "train/kl": 0.75}, [0.5])
    assert again.take(0.5) == ({"train/loss": 3.0, "train/kl": 0.5}, [0.5])


def test_a_loss_of_some_steps_is_a_mean_over_all_that_were_made() -> None:
    parts = window(0, are_parts=True)
    for step in range(10):
        rare = {"train/kl": 1.0} if step < 2 else {}
        parts.add({"train/loss": 0.0 if step > 6 else 2.0, **rare})
    parts.leave_out(3)
    assert parts.take()[0] == {"train/loss": 2.0, "train/kl": 2 / 7}


def test_a_window_of_values_is_their_mean_over_the_ranks_that_have_some() -> None:
    own = window(0, {"sum train/loss": 7.0, "count train/loss": 1.0})
    own.add({"train/loss": 1.0})
    own.add({"train/loss": 4.0})
    assert own.take()[0] == {"train/loss": 4.0}
    assert own.taken == [1.0, 5.0]
    assert not own.is_open


@pytest.mark.parametrize(("are_parts", "count"), [(True, 4.0), (False, 7.0)])
def test_a_window_of_another_number_of_ranks_is_rank_0s_alone(are_parts: bool, count: float) -> None:
    saved = {"train/loss": {"sums": [1.0, 2.0], "counts": [4.0, 3.0]}}
    windows = [window(rank, {}, {}, are_parts=are_parts) for rank in range(3)]
    for each in windows:
        each.restore(saved)
    assert windows[0].state() == {"train/loss": {"sums": [3.0, 0.0, 0.0], "counts": [count, 0.0, 0.0]}}
    assert [each.is_open for each in windows] == [True, False, False]
