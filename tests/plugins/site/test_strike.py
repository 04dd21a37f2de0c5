"""The places of resume-check's kills. Each comes soon after a checkpoint, in a step that the training makes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from toolkit.base.errors import RequestError
from toolkit.plugins.site.resume_check import FARTHEST, choose_strikes
from toolkit.plugins.site.resume_compare import EPOCH_END, FIRST_EPOCH, LATER_EPOCH, CheckPlan, WitnessRecord, places


def of_epochs(*lengths: int) -> dict[int, str]:
    epochs = [number for number, length in enumerate(lengths) for _ in range(length)]
    lines: Any = {step: {0: {"epoch": epoch}} for step, epoch in enumerate(epochs)}
    return places(WitnessRecord(lines, {}, {}, []))


def strikes(
    seed: int, *lengths: int, plan: CheckPlan | None = None, every: int | None = None, ranks: int = 4
) -> list[dict[str, Any]]:
    return choose_strikes(plan or CheckPlan(), ranks, of_epochs(*lengths), sum(lengths), every, random.Random(seed))


def test_any_rank_is_struck() -> None:
    assert {each["rank"] for seed in range(60) for each in strikes(seed, 60)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("lengths", "every", "expected"),
    [
        ([20, 20, 20], None, [FIRST_EPOCH, LATER_EPOCH, EPOCH_END]),
        ([31, 29], None, [FIRST_EPOCH, LATER_EPOCH, EPOCH_END]),
        ([59, 1], None, [FIRST_EPOCH]),  # no step is left behind the end
        ([58, 2], None, [FIRST_EPOCH, EPOCH_END]),
        ([60], None, [FIRST_EPOCH]),
        ([1] * 60, None, [EPOCH_END]),
        ([2] * 30, None, [FIRST_EPOCH, LATER_EPOCH, EPOCH_END]),
        ([20, 20, 20], 10, [FIRST_EPOCH, LATER_EPOCH, EPOCH_END]),
        ([20, 20, 20], 20, [EPOCH_END]),
        ([20, 20, 20], 7, [FIRST_EPOCH, LATER_EPOCH]),
        ([3], None, [FIRST_EPOCH]),
    ],
)
def test_a_kill_follows_a_checkpoint_of_each_place_that_there_is(
    lengths: list[int], every: int | None, expected: list[str]
) -> None:
    found, where = of_epochs(*lengths), set[str]()
    for seed in range(100):
        chosen = strikes(seed, *lengths, every=every)
        saved = [each["saved"] for each in chosen]
        assert saved == sorted({*saved})
        assert {found[step] for step in saved} <= {*expected}
        where |= {found[step] for step in saved}
        for each, following in zip(chosen, [*saved[1:], sum(lengths) - 1], strict=True):
            assert each["saved"] <= each["step"] < min(each["saved"] + FARTHEST, following)
            assert every is None or each["saved"] % every == 0
    assert where == {*expected}


def test_a_step_that_is_asked_for_is_struck_after_a_checkpoint_soon_before_it() -> None:
    (one,) = strikes(1, 60, plan=CheckPlan(step=25))
    assert one["step"] == 25
    assert 25 - FARTHEST < one["saved"] <= 25
    (at_the_users_pace,) = strikes(1, 60, plan=CheckPlan(step=25), every=1000)
    assert (at_the_users_pace["step"], at_the_users_pace["saved"]) == (25, 0)


@pytest.mark.parametrize(
    ("at", "steps", "every", "says"),
    [
        (20, 20, None, "ended by itself after 20 of the 60 steps, and --at must be within 1..18"),
        (19, 20, None, "ended by itself after 20 of the 60 steps, and --at must be within 1..18"),
        (None, 2, None, "ended by itself after 2 of the 60 steps, and 3 are needed"),
        (None, 0, None, "has recorded no step.*toolkit.start"),
        (None, 60, 200, "checkpoint.every_steps=200: no checkpoint of these 60 steps comes before a kill"),
    ],
)
def test_a_check_that_could_prove_nothing_is_refused(at: int | None, steps: int, every: int | None, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        strikes(1, steps, plan=CheckPlan(step=at), every=every)
