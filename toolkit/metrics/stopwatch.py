"""A stopwatch for work on a device: on the host's clock for the CPU, by events on the stream for CUDA."""

from __future__ import annotations

import time
from typing import Protocol

import torch

#: On CUDA the laps of this many steps at most are read: two events each, and a window may have thousands of steps.
KEPT_LAPS = 64


class Stopwatch(Protocol):
    """Measures laps; ``start`` and ``stop`` cost the host some microseconds and never wait."""

    def start(self) -> None:
        """A lap begins."""

    def stop(self) -> None:
        """It has ended, or will when the device gets here."""

    def take(self) -> float:
        """The mean lap, in seconds, since last asked; 0 for none. Waits until the device has ended the last lap."""


class HostStopwatch:
    """For work that is done when the call returns."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._laps = 0
        self._began = 0.0

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> None:
        self._seconds += time.perf_counter() - self._began
        self._laps += 1

    def take(self) -> float:
        mean = self._seconds / self._laps if self._laps else 0.0
        self._seconds, self._laps = 0.0, 0
        return mean


class CudaStopwatch:
    """For work that is only enqueued when the call returns: the last ``KEPT_LAPS`` laps, by a ring of events."""

    def __init__(self) -> None:
        self._events = [(_event(), _event()) for _ in range(KEPT_LAPS)]
        self._laps = 0

    def start(self) -> None:
        self._events[self._laps % KEPT_LAPS][0].record()

    def stop(self) -> None:
        self._events[self._laps % KEPT_LAPS][1].record()
        self._laps += 1

    def take(self) -> float:
        count = min(self._laps, KEPT_LAPS)
        if not count:
            return 0.0
        self._events[(self._laps - 1) % KEPT_LAPS][1].synchronize()
        laps = [self._events[(self._laps - 1 - back) % KEPT_LAPS] for back in range(count)]
        self._laps = 0
        return sum(float(begin.elapsed_time(end)) for begin, end in laps) / count / 1000


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def stopwatch(device: torch.device) -> Stopwatch:
    """The one for work on ``device``."""
    return CudaStopwatch() if device.type == "cuda" else HostStopwatch()
