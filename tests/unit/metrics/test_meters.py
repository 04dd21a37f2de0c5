"""Meters against a clock that the test moves by hand."""

from __future__ import annotations

import pytest

from toolkit.metrics.meters import Throughput


class Clock:
    """A clock that stands still until the test moves it."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_speed_wait_and_time_left_are_those_of_the_window() -> None:
    clock = Clock()
    meter = Throughput(window=2, clock=clock)
    for seconds, samples, wait in ((9.0, 1, 9.0), (1.0, 10, 0.5), (3.0, 30, 1.5)):  # the first leaves the window
        clock.now += seconds
        meter.update(samples, wait)
    assert meter.samples_per_s == pytest.approx(40 / 4)
    assert meter.data_wait_fraction == pytest.approx(2 / 4)
    assert meter.eta_s(6) == pytest.approx(6 * 4 / 2)


def test_an_evaluation_between_two_steps_is_not_counted() -> None:
    clock = Clock()
    meter = Throughput(clock=clock)
    clock.now += 2
    meter.update(8)
    clock.now += 100
    meter.pause()
    clock.now += 2
    meter.update(8)
    assert meter.samples_per_s == pytest.approx(16 / 4)


def test_before_the_first_step_there_is_no_speed_and_no_estimate() -> None:
    meter = Throughput(clock=Clock())
    assert (meter.samples_per_s, meter.data_wait_fraction, meter.eta_s(5)) == (0.0, 0.0, None)
