"""Where resume-check's blow falls: on a rank without which the attempt ends, or there is no resume to check."""

from __future__ import annotations

import pytest

from toolkit.config import JobConfig, ParameterServerConfig, StrategyConfig
from toolkit.diagnose.resume_check import CheckPlan, _needed, _strike


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
    assert {_strike(CheckPlan(seed=seed), needed)["rank"] for seed in range(60)} == struck
