"""The target of resume-check's signal. It is any rank, in a step that the training makes."""

from __future__ import annotations

import pytest

from toolkit.base.errors import RequestError
from toolkit.plugins.site.resume_check import _strike
from toolkit.plugins.site.resume_report import CheckPlan


def test_any_rank_is_struck() -> None:
    assert {_strike(CheckPlan(seed=seed), 4, 60)["rank"] for seed in range(60)} == {0, 1, 2, 3}


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
