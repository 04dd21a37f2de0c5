"""Meters of the training loop: speed, share of time spent waiting for data, time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class _Lap:
    seconds: float
    samples: int
    data_wait_s: float


@dataclass
class Throughput:
    """Speed over the last `window` steps, by a steady clock.

    Call `update` once a step, and `pause` after anything but training. The host's clock is read without a device sync:
    on CUDA a single lap is the time to enqueue a step. The sum over a window that ends in a sync, as at a logging step,
    is right.
    """

    window: int = 100
    clock: Callable[[], float] = time.perf_counter
    _laps: deque[_Lap] = field(init=False)
    _mark: float = field(init=False)

    def __post_init__(self) -> None:
        self._laps = deque(maxlen=self.window)
        self._mark = self.clock()

    def update(self, samples: int, data_wait_s: float = 0.0) -> None:
        """Count a step over `samples` samples. It waited `data_wait_s` for them, measured around the fetch."""
        now = self.clock()
        self._laps.append(_Lap(now - self._mark, samples, data_wait_s))
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
        return self._per_second(sum(lap.samples for lap in self._laps))

    @property
    def steps_per_s(self) -> float:
        """Return steps per second; 0 before the first step."""
        return self._per_second(len(self._laps))

    @property
    def data_wait_fraction(self) -> float:
        """Return the share of the time, 0 to 1, in which steps waited for samples."""
        return self._per_second(sum(lap.data_wait_s for lap in self._laps))

    def eta_s(self, steps_left: int) -> float | None:
        """Return the seconds until `steps_left` more steps are done at this speed. None before the first step."""
        return steps_left / self.steps_per_s if self.steps_per_s else None

    def _per_second(self, amount: float) -> float:
        seconds = sum(lap.seconds for lap in self._laps)
        return amount / seconds if seconds else 0.0
