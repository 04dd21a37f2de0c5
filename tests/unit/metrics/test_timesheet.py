"""Where the loop's seconds go, by a clock that the test moves."""

from __future__ import annotations

import pytest

from toolkit.metrics.goodput import Timesheet


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sheet(clock: Clock) -> Timesheet:
    sheet = Timesheet(clock)
    clock.now += 50.0  # loading
    sheet.begin()
    return sheet


def test_every_second_of_the_loop_has_one_name(sheet: Timesheet, clock: Clock) -> None:
    clock.now += 3.0
    sheet.step_done(data_wait_s=1.0)
    clock.now += 0.5  # reading the loss
    with sheet.on("evaluation"):
        clock.now += 4.0
    with sheet.on("checkpoint"):
        clock.now += 8.0
    clock.now += 2.0
    sheet.step_done(data_wait_s=0.0)
    assert sheet.spent == {"training": 4.5, "data_wait": 1.0, "evaluation": 4.0, "checkpoint": 8.0}


def test_a_step_that_never_ends_counts_nowhere(sheet: Timesheet, clock: Clock) -> None:
    clock.now += 300.0
    assert sum(sheet.spent.values()) == 0.0


def test_a_save_that_fails_has_cost_its_time(sheet: Timesheet, clock: Clock) -> None:
    def fails() -> None:
        clock.now += 2.0
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"), sheet.on("checkpoint"):
        fails()
    assert sheet.spent["checkpoint"] == 2.0


def test_a_long_evaluation_is_counted_while_it_goes_on(sheet: Timesheet, clock: Clock) -> None:
    with sheet.on("evaluation"):
        for batches in (1, 2, 3):
            clock.now += 10.0
            sheet.add("evaluation")
            assert sheet.spent["evaluation"] == 10.0 * batches
