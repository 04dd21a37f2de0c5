"""Where the loop's seconds go, by a clock that the test moves."""

from __future__ import annotations

import time
from typing import ClassVar

import pytest
import torch

from toolkit.metrics.goodput import TimeBreakdown
from toolkit.metrics.meters import KEPT_LAPS, DeviceStopwatch, HostStopwatch, Throughput, stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breakdown(clock: Clock) -> TimeBreakdown:
    breakdown = TimeBreakdown(clock)
    clock.now += 50.0  # loading
    breakdown.begin()
    return breakdown


def test_every_second_of_the_loop_has_one_name(breakdown: TimeBreakdown, clock: Clock) -> None:
    clock.now += 3.0
    breakdown.step_done(data_wait_s=1.0)
    clock.now += 0.5  # reading the loss
    with breakdown.measure("evaluation"):
        clock.now += 4.0
    with breakdown.measure("checkpoint"):
        clock.now += 8.0
    clock.now += 2.0
    breakdown.step_done(data_wait_s=0.0)
    assert breakdown.spent == {"training": 4.5, "data_wait": 1.0, "evaluation": 4.0, "checkpoint": 8.0}


def test_a_step_that_never_ends_counts_nowhere(breakdown: TimeBreakdown, clock: Clock) -> None:
    clock.now += 300.0
    assert sum(breakdown.spent.values()) == 0.0


def test_a_save_that_fails_has_cost_its_time(breakdown: TimeBreakdown, clock: Clock) -> None:
    def fails() -> None:
        clock.now += 2.0
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"), breakdown.measure("checkpoint"):
        fails()
    assert breakdown.spent["checkpoint"] == 2.0


def test_a_long_evaluation_is_counted_while_it_goes_on(breakdown: TimeBreakdown, clock: Clock) -> None:
    with breakdown.measure("evaluation"):
        for batches in (1, 2, 3):
            clock.now += 10.0
            breakdown.add("evaluation")
            assert breakdown.spent["evaluation"] == 10.0 * batches


def test_a_lap_is_the_mean_since_it_was_last_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 10.0, 13.0, 20.0, 25.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    watch = HostStopwatch()
    for _ in range(2):
        watch.start()
        watch.stop()
    assert watch.take() == 2.0
    watch.start()
    watch.stop()
    assert watch.take() == 5.0
    assert watch.take() == 0.0


def test_the_cpu_is_measured_by_the_hosts_clock() -> None:
    assert isinstance(stopwatch(torch.device("cpu")), HostStopwatch)


class Event:
    """Stands for a CUDA event on a device that is always busy.

    The device's clock moves by 2 ms between two records, and by 8 ms in the first lap.
    """

    made: ClassVar[list[Event]] = []
    clock_ms = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.waited = False
        Event.made.append(self)

    def record(self, stream: str) -> None:
        assert stream == "that of cuda:1"
        Event.clock_ms += 8.0 if Event.clock_ms < 8.0 else 2.0
        self.at_ms = Event.clock_ms

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


def test_on_cuda_the_last_laps_are_read_from_a_ring_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"that of {device}")
    watch = DeviceStopwatch(torch.device("cuda", 1))
    for _ in range(3 * KEPT_LAPS):
        watch.start()
        watch.stop()
    assert watch.take() == pytest.approx(0.002)
    assert len(Event.made) == 2 * KEPT_LAPS
    assert [event.waited for event in Event.made].count(True) == 1  # for the end of the last lap, and for nothing else
    assert watch.take() == 0.0


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
