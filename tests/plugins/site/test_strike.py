"""The target of resume-check's signal. It is a rank that the attempt needs, in a step that the training makes."""

from __future__ import annotations

import pytest

from toolkit.base.errors import RequestError
from toolkit.config import JobConfig, ParameterServerConfig, StrategyConfig
from toolkit.plugins.site.resume_check import _needed, _strike
from toolkit.plugins.site.resume_report import CheckPlan


@pytest.mark.parametrize(
    ("strategy", "struck"),
    [
        (StrategyConfig("ddp"), {0, 1, 2, 3}),
        (StrategyConfig("parameter_server", parameter_server=ParameterServerConfig(servers=2)), {0, 1}),
    ],
    ids=["ddp", "parameter server"],
)
def test_any_rank_is_struck_that_the_attempt_needs_and_no_other(strategy: StrategyConfig, struck: set[int]) -> None:
    needed = _needed(JobConfig(strategy=strategy), 4)
    assert {_strike(CheckPlan(seed=seed), needed, 60)["rank"] for seed in range(60)} == struck


@pytest.mark.parametrize("steps", [3, 4, 20, 60])
def test_a_step_is_struck_that_is_neither_the_first_nor_the_last(steps: int) -> None:
    struck = {_strike(CheckPlan(seed=seed), 2, steps)["step"] for seed in range(200)}
    assert struck <= set(range(1, steps - 1))


@pytest.mark.parametrize(
    ("at", "steps", "says"),
    [
        (20, 20, "ended by itself after 20 of the 60 steps, and --at must be within 0..18"),
        (19, 20, "ended by itself after 20 of the 60 steps, and --at must be within 0..18"),
        (None, 2, "ended by itself after 2 of the 60 steps, and 3 are needed"),
        (None, 0, "has recorded no step"),
    ],
)
def test_a_step_that_the_training_does_not_reach_is_refused(at: int | None, steps: int, says: str) -> None:
    with pytest.raises(RequestError, match=f"{says}.*own loop|{says}.*toolkit.start"):
        _strike(CheckPlan(step=at), 2, steps)
