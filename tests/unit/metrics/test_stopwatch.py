from __future__ import annotations

import time
from typing import ClassVar

import pytest
import torch

from toolkit.metrics.meters import KEPT_LAPS, DeviceStopwatch, HostStopwatch, stopwatch


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
