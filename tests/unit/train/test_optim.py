from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from toolkit.config import OptimConfig
from toolkit.errors import ConfigError
from toolkit.train.optim import build_optimizer, build_schedule


def torch_rates(scheduler_class: type, steps: int, **options: float) -> list[float]:
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = scheduler_class(optimizer, **options)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def rates(steps: int, total: int, **options: object) -> list[float]:
    schedule = build_schedule(OptimConfig(lr=0.4, **options), total)  # type: ignore[arg-type]
    return [schedule(step) for step in range(steps)]


def test_cosine_is_that_of_torch() -> None:
    assert rates(20, 20, schedule="cosine") == pytest.approx(torch_rates(CosineAnnealingLR, 20, T_max=20))


def test_linear_is_that_of_torch() -> None:
    expected = torch_rates(LinearLR, 20, start_factor=1.0, end_factor=0.0, total_iters=20)
    assert rates(20, 20, schedule="linear") == pytest.approx(expected)


def test_constant_stays() -> None:
    assert rates(5, 5, schedule="constant") == [0.4] * 5


def test_warm_up_rises_to_the_full_rate_and_the_rest_of_the_run_follows_the_schedule() -> None:
    warmed = rates(24, 24, schedule="cosine", warmup_steps=4)
    assert warmed[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert warmed[4:] == pytest.approx(rates(20, 20, schedule="cosine"))


def test_a_rate_is_never_negative_when_a_step_lies_behind_the_end() -> None:
    assert rates(12, 10, schedule="linear")[-2:] == [0.0, 0.0]


def test_a_warm_up_longer_than_the_run_is_no_division_by_zero() -> None:
    assert rates(3, 3, schedule="cosine", warmup_steps=5) == pytest.approx([0.08, 0.16, 0.24])


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_each_optimizer_is_torchs_own_and_leaves_frozen_parameters_out(name: str) -> None:
    model = nn.Linear(2, 3)
    model.bias.requires_grad_(False)
    optimizer = build_optimizer(OptimConfig(name, lr=0.3, momentum=0.5, weight_decay=0.1), model)
    assert type(optimizer).__name__.lower() == name
    assert optimizer.param_groups[0]["params"] == [model.weight]
    assert (optimizer.defaults["lr"], optimizer.defaults["weight_decay"]) == (0.3, 0.1)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"optim\.name: there is no 'adamv'; did you mean"):
        build_optimizer(OptimConfig("adamv"), nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"optim\.schedule: there is no 'cosin'; did you mean 'cosine'"):
        build_schedule(OptimConfig(schedule="cosin"), 10)
