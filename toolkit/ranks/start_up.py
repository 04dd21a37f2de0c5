"""Times each part of a rank's start, from the start of its process on."""

from __future__ import annotations

import time

from toolkit.base import proc_stat


class StartUp:
    """Seconds by part. Each is counted when it ends, and the next one begins there.

    The first part, ``program``, has ended when this is made: what the rank's process did before its session.
    """

    def __init__(self) -> None:
        self._mark = time.monotonic()
        # How long ago this process was started or forked, to 10 ms; 0 where the kernel does not tell.
        stat, age_s = proc_stat.read("self"), 0.0
        if stat is not None:
            age_s = max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started_s)
        self.parts = {"program": round(age_s, 3)}

    def end(self, part: str) -> None:
        """Note that ``part`` has ended."""
        now = time.monotonic()
        self.parts = {**self.parts, part: round(now - self._mark, 3)}
        self._mark = now
