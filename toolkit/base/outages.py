"""Waits for a controller that does not answer and for a full disk. Both pass, and a run must outlive them."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from toolkit.base import logs
from toolkit.base.errors import SlurmError, SlurmRefusedError

#: How long a controller that does not answer, or a full disk, is waited for before the job gives up on it.
GIVE_UP_AFTER_S = 300.0
RETRY_EVERY_S = 2.0
#: Errors of a disk, or a user's quota, that is full: they pass.
FULL = (errno.ENOSPC, errno.EDQUOT)

log = logs.get(__name__)
T = TypeVar("T")


def ask(call: Callable[[], T], what: str, wait_s: float = GIVE_UP_AFTER_S) -> T | None:
    """Return ``call()``, retried for ``wait_s`` while Slurm does not answer.

    Return None when Slurm refuses or ``wait_s`` is over. ``what`` says what is not known or not done then, for the log.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return call()
        except (SlurmError, OSError) as error:  # a call may also read the run's folder
            log.warning("%s: %s", what, error)
            # A refusal will not pass; only silence is waited out.
            if isinstance(error, SlurmRefusedError) or time.monotonic() >= deadline:
                return None
        time.sleep(RETRY_EVERY_S)


def persist(write: Callable[[], T], path: Path, doing: str = "written") -> T:
    """Return ``write()``, called until the disk under ``path`` takes it. Raises its OSError when patience has run out.

    ``doing`` is what cannot be done, for the log.
    """
    deadline = time.monotonic() + GIVE_UP_AFTER_S
    while True:
        try:
            return write()
        except OSError as error:
            log.error("%s: cannot be %s: %s", path, doing, error)
            if time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_EVERY_S)
