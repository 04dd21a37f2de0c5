"""Logs to stderr, with the rank in front of each line. Stdout stays free for a command's output."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

from toolkit.base import fsio, terminal
from toolkit.base.errors import MOST_CHARS, shortened

LOGGER = logging.getLogger("toolkit")


class EscapingFormatter(logging.Formatter):
    """Escapes what a terminal would take for a command, whatever text of others is in a line."""

    def format(self, record: logging.LogRecord) -> str:
        return terminal.visible(shortened(super().format(record), 4 * MOST_CHARS))


class _CommandFormatter(EscapingFormatter):
    def format(self, record: logging.LogRecord) -> str:
        return terminal.fitted(f"toolkit: {record.levelname.lower()}: {super().format(record)}", sys.stderr)


def setup(who: str = "") -> None:
    """Send this package's log to stderr. Each line begins with the time and ``who``, such as ``rank 3/8 node2``.

    A second call replaces the heading: a rank learns its number only after the process has started.
    """
    handler = logging.StreamHandler(sys.stderr)
    head = f"%(asctime)s {who} " if who else "%(asctime)s "
    handler.setFormatter(EscapingFormatter(head + "%(levelname)s %(message)s", datefmt="%H:%M:%S"))
    LOGGER.handlers[:] = [handler]
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False


def setup_for_command() -> None:
    """Send warnings to stderr as the command line sends its errors: ``toolkit: warning: ...``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.setFormatter(_CommandFormatter("%(message)s"))
    LOGGER.handlers[:] = [handler]


def get(name: str) -> logging.Logger:
    """Return a child of the package's logger, named after the module that asks."""
    return LOGGER.getChild(name.removeprefix("toolkit."))


def add_file(path: Path) -> None:
    """Append the log to a private file as well, with full dates."""
    logging.raiseExceptions = False  # else each line that a full disk refuses puts a traceback into the job's output
    fd = fsio.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    handler = logging.StreamHandler(os.fdopen(fd, "a", buffering=1))
    handler.setFormatter(EscapingFormatter("%(asctime)s %(levelname)s %(message)s"))
    LOGGER.addHandler(handler)


class RateLimitedWarnings:
    """Logs a kind of warning once a minute at most: others could fill a disk with what they cause."""

    EVERY_S = 60.0

    def __init__(self, log: logging.Logger) -> None:
        self._log, self._next, self._left_out = log, 0.0, 0

    def warn(self, text: str, *values: object) -> None:
        """Log the warning, with the number of those that were left out before it."""
        now = time.monotonic()
        if now < self._next:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last such line)" if self._left_out else ""
        self._next, self._left_out = now + self.EVERY_S, 0
        self._log.warning("%s%s", text % values, more)
