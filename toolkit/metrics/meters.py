"""Meters of the training loop: speed, share of time spent waiting for data, time left, time of work on a device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from toolkit.devices.accelerator import module_of, with_streams


@dataclass
class Throughput:
    """Speed over the last `window` steps, by a steady clock.

    Call `update` once a step, and `pause` after anything but training. The host's clock is read without a device sync:
    on a GPU a single lap is the time to enqueue a step. The sum over a window is right if that ends in a sync, as at a
    logging step.
    """

    window: int = 100
    clock: Callable[[], float] = time.perf_counter
    _laps: deque[tuple[float, int, float]] = field(init=False)  #: seconds, samples, seconds of waiting for them
    _mark: float = field(init=False)

    def __post_init__(self) -> None:
        self._laps = deque(maxlen=self.window)
        self._mark = self.clock()

    def update(self, samples: int, data_wait_s: float = 0.0) -> None:
        """Count a step over `samples` samples. It waited `data_wait_s` for them, measured around the fetch."""
        now = self.clock()
        self._laps.append((now - self._mark, samples, data_wait_s))
        self._mark = now

    def pause(self) -> None:
        """Leave out the time since the last step. It went into an evaluation, a checkpoint or start-up."""
        self._mark = self.clock()

    def reset(self) -> None:
        """Start a new window, after the first steps, which include compilation."""
        self._laps.clear()
        self.pause()

    @property
    def samples_per_s(self) -> float:
        """Return samples per second; 0 before the first step."""
        return self._per_second(sum(samples for _, samples, _ in self._laps))

    @property
    def data_wait_fraction(self) -> float:
        """Return the share of the time, 0 to 1, in which steps waited for samples."""
        return self._per_second(sum(data_wait_s for _, _, data_wait_s in self._laps))

    def eta_s(self, steps_left: int) -> float | None:
        """Return the seconds until `steps_left` more steps are done at this speed. None before the first step."""
        steps_per_s = self._per_second(len(self._laps))
        return steps_left / steps_per_s if steps_per_s else None

    def _per_second(self, amount: float) -> float:
        seconds = sum(seconds for seconds, _, _ in self._laps)
        return amount / seconds if seconds else 0.0


#: On a GPU at most this many laps are read: each takes two events, and a window may have thousands of steps.
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


class DeviceStopwatch:
    """The stopwatch for work that is only enqueued when the call returns.

    A ring of events keeps the last ``KEPT_LAPS`` laps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, module_of(device)
        event = partial(self._module.Event, enable_timing=True)
        self._events = [(event(), event()) for _ in range(KEPT_LAPS)]
        self._laps = 0

    def start(self) -> None:
        self._record(0)

    def stop(self) -> None:
        self._record(1)
        self._laps += 1

    def _record(self, end: int) -> None:
        # Without the device torch would first look for it, which takes several microseconds.
        self._events[self._laps % KEPT_LAPS][end].record(self._module.current_stream(self._device))

    def take(self) -> float:
        count = min(self._laps, KEPT_LAPS)
        if not count:
            return 0.0
        # The end of the last lap: once the device is there, all events before it have a time.
        self._events[(self._laps - 1) % KEPT_LAPS][1].synchronize()
        laps = [self._events[(self._laps - 1 - back) % KEPT_LAPS] for back in range(count)]
        self._laps = 0
        return sum(float(begin.elapsed_time(end)) for begin, end in laps) / count / 1000


def stopwatch(device: torch.device) -> Stopwatch:
    """Return the stopwatch for work on ``device``."""
    return HostStopwatch() if with_streams(device) is None else DeviceStopwatch(device)
