"""A stopwatch for work on a device. It goes by the host's clock for the CPU, by events on the stream for CUDA."""

from __future__ import annotations

import time
from typing import Protocol

import torch

#: On CUDA at most this many laps are read: each takes two events, and a window may have thousands of steps.
KEPT_LAPS = 64


class Stopwatch(Protocol):
    """Measures laps; ``start`` and ``stop`` cost the host some microseconds and never wait."""

    def start(self) -> None:
        """Begin a lap."""

    def stop(self) -> None:
        """End the lap, now or when the device has come to this point."""

    def take(self) -> float:
        """Return the mean lap since the last call, in seconds; 0 for none. Waits for the device to end the last lap."""


class HostStopwatch:
    """The stopwatch for work that is done when the call returns."""

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
    """The stopwatch for work that is only enqueued when the call returns.

    A ring of events keeps the last ``KEPT_LAPS`` laps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = [(_event(), _event()) for _ in range(KEPT_LAPS)]
        self._laps = 0

    def start(self) -> None:
        self._record(0)

    def stop(self) -> None:
        self._record(1)
        self._laps += 1

    def _record(self, end: int) -> None:
        # Without the device torch would first look for it, which takes several microseconds.
        self._events[self._laps % KEPT_LAPS][end].record(torch.cuda.current_stream(self._device))

    def take(self) -> float:
        count = min(self._laps, KEPT_LAPS)
        if not count:
            return 0.0
        # The end of the last lap: once the device is there, all events before it have a time.
        self._events[(self._laps - 1) % KEPT_LAPS][1].synchronize()
        laps = [self._events[(self._laps - 1 - back) % KEPT_LAPS] for back in range(count)]
        self._laps = 0
        return sum(float(begin.elapsed_time(end)) for begin, end in laps) / count / 1000


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def stopwatch(device: torch.device) -> Stopwatch:
    """Return the stopwatch for work on ``device``."""
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()
