"""How long each kind of work takes in an attempt's loop, from its first step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from toolkit.metrics.goodput import MEASURED


class Timesheet:
    """Seconds by kind of work: a step, or what comes between two steps.

    Work is counted when it ends, with one reading of the clock. Work that has not ended is not counted, so a step in
    which the ranks die counts nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._mark = clock()
        #: Never replaced by another dict, because the report thread reads it at any time.
        self.spent = dict.fromkeys(MEASURED, 0.0)

    def begin(self) -> None:
        """Start the clock as the first step begins. The time before is start-up."""
        self._mark = self._clock()

    def step_done(self, data_wait_s: float) -> None:
        """Count a step that has ended, and that waited ``data_wait_s`` for its data."""
        # The loop has measured the wait for data itself: what is left is training.
        now, spent = self._clock(), self.spent
        spent["training"] += now - self._mark - data_wait_s
        spent["data_wait"] += data_wait_s
        self._mark = now

    def add(self, name: str) -> None:
        """Count the time since the last mark as ``name``."""
        now = self._clock()
        self.spent[name] += now - self._mark
        self._mark = now

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        """Count the block as ``name``. The time since the last step, such as reading the loss, is still training."""
        self.add("training")
        try:
            yield
        finally:
            self.add(name)
