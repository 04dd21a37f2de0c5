"""Waits for a controller that does not answer, a full disk, a file server that is away. A run must outlive them."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from toolkit.base import logs
from toolkit.base.errors import SlurmError, SlurmRefusedError
from toolkit.base.process_limits import limits

#: Errors that pass: of a disk or a user's quota that is full, and of a file server that is away.
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT)

log = logs.get(__name__)
T = TypeVar("T")


def retry_slurm(call: Callable[[], T], what: str, wait_s: float | None = None) -> T | None:
    """Return ``call()``, retried for ``wait_s``, or ``give_up_after_s``, while Slurm does not answer.

    Return None when Slurm refuses or the time is over. ``what`` says what is not known or not done then, for the log.
    """
    deadline = time.monotonic() + (limits().give_up_after_s if wait_s is None else wait_s)
    while True:
        try:
            return call()
        except (SlurmError, OSError) as error:  # a call may also read the run's folder
            log.warning("%s: %s", what, error)
            # A refusal will not pass; only silence is waited out.
            if isinstance(error, SlurmRefusedError) or time.monotonic() >= deadline:
                return None
        time.sleep(limits().retry_every_s)


def retry_write(write: Callable[[], T], path: Path, doing: str = "written") -> T:
    """Return ``write()``, retried until the disk under ``path`` takes it. Raises its OSError after the time limit.

    ``doing`` is what cannot be done, for the log.
    """
    deadline, warnings = time.monotonic() + limits().give_up_after_s, logs.RateLimitedWarnings(log)
    while True:
        try:
            return write()
        except OSError as error:
            warnings.warn("%s: cannot be %s: %s", path, doing, error)
            if time.monotonic() >= deadline:
                raise
        time.sleep(limits().retry_every_s)
