"""How often a run's files are written and looked at: all runs of a cluster share the file server.

Twice a second in the first minute, in which people watch and much changes. From then on each ``files_every_s``; each
``watched_every_s`` while somebody watches, who touches ``requests/watched``.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress

from toolkit.base.process_limits import limits
from toolkit.files.rundir import RunDir

MARK = "watched"


class PollTimer:
    """Tells when the files are due."""

    def __init__(self) -> None:
        self.has_viewer = False
        self._began = time.monotonic()
        self._last: tuple[float, object] | None = None

    def is_due(self, state: object) -> bool:
        """True if the files are due at this moment. A new ``state`` is always told at once."""
        now, last = time.monotonic(), self._last  # once: a signal handler may set it to None
        every_s = limits().watched_every_s if self.has_viewer else limits().files_every_s
        is_early = now - self._began < limits().files_often_s
        if not is_early and last is not None and last[1] == state and now - last[0] < every_s:
            return False
        self._last = now, state
        return True

    def hurry(self) -> None:
        """Have the files due at once: a user has asked for something."""
        self._last = None


def mark_viewer(run: RunDir) -> None:
    """Note that somebody watches. Another user's run, or one on a full disk, is shown as it is."""
    with suppress(OSError):
        if run.path.stat().st_uid != os.geteuid():  # its owner could not touch the mark
            return
        mark = run.requests / MARK
        with suppress(FileNotFoundError):
            if time.time() - mark.stat().st_mtime > limits().files_every_s:
                os.utime(mark)
            return
        run.make_requests()
        mark.touch(0o600)


def has_viewer(run: RunDir) -> bool:
    """True while somebody watches."""
    with suppress(OSError):
        return time.time() - (run.requests / MARK).stat().st_mtime < 4 * limits().files_every_s
    return False
