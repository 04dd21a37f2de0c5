"""How long each thing takes in the loop of one attempt, from its first step on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from toolkit.launch.goodput import MEASURED


class Timesheet:
    """Seconds by name, closed at the end of each step and of whatever comes between two: one reading of the clock each.

    What began and has not ended is not in it: of a step in which the ranks die nothing counts.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._mark = clock()
        #: The same dict always: the report thread reads it at any time.
        self.spent = dict.fromkeys(MEASURED, 0.0)

    def begin(self) -> None:
        """The first step begins: what was before is start-up."""
        self._mark = self._clock()

    def step_done(self, data_wait_s: float) -> None:
        """A step has ended, which waited ``data_wait_s`` for its data."""
        now, spent = self._clock(), self.spent
        spent["training"] += now - self._mark - data_wait_s
        spent["data_wait"] += data_wait_s
        self._mark = now

    def add(self, name: str) -> None:
        """The time since the last mark went into ``name``."""
        now = self._clock()
        self.spent[name] += now - self._mark
        self._mark = now

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """What is done within is ``name``; what came since the last step, as reading the loss, is still training."""
        self.add("training")
        try:
            yield
        finally:
            self.add(name)
