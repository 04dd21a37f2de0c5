"""How long each part of a rank's start takes, from the start of its process on."""

from __future__ import annotations

import os
import time
from pathlib import Path


class StartUp:
    """Seconds by part. Each is counted when it ends, and the next one begins there.

    The first part, ``program``, has ended when this is made: what the rank's process did before its session.
    """

    def __init__(self) -> None:
        self._mark = time.monotonic()
        # How long ago this process was started or forked, to 10 ms; 0 where the kernel does not tell.
        try:
            ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
            age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            age_s = 0.0
        else:
            age_s = round(max(0.0, age_s), 3)
        self.parts = {"program": age_s}

    def end(self, part: str) -> None:
        """Note that ``part`` has ended."""
        now = time.monotonic()
        self.parts = {**self.parts, part: round(now - self._mark, 3)}
        self._mark = now
