"""When a save by time is due. Rank 0's clock decides, and the ranks then agree on the step."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from toolkit.checkpoint import policy
from toolkit.config import CheckpointConfig
from toolkit.files.rundir import RunDir
from toolkit.ranks.session import Session

#: The kind of request by which the ranks agree on the step of a save by time.
SAVE = "save"


class SaveTimer:
    """Asks the ranks for a save by time. Only rank 0's clock counts: on the others nothing happens."""

    def __init__(self, config: CheckpointConfig, session: Session) -> None:
        self._config, self._session = config, session
        self._timer: threading.Timer | None = None
        self._due_s = 0.0  #: when the timer fires, by ``time.monotonic``

    def set(self, blocked_s: float, save_s: float) -> None:
        """Start the time to the next save.

        The training waited ``blocked_s`` for the last one, which took ``save_s``. Called on every rank.
        """
        if not self._session.is_main:
            return
        self.cancel()
        # ``every_min`` and ``every_steps: auto`` may both be set: the shorter wait counts.
        waits = [60.0 * self._config.every_min] if self._config.every_min is not None else []
        if self._config.every_steps == "auto":
            try:
                attempts = RunDir(self._session.run_dir).attempts()
            except OSError:  # the disk is away: as in a run's first attempt
                attempts = []
            waits.append(policy.interval_s(blocked_s, save_s, policy.between_failures_s(attempts)))
        if waits:
            self._due_s = time.monotonic() + min(waits)
            self._start()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Put off the timer's request for the block.

        The gate hands out one request after the other. A save that waits for the end of an evaluation would keep a stop
        from cutting it short.
        """
        timer = self._timer if self._timer is not None and self._timer.is_alive() else None
        if timer is not None:
            timer.cancel()
        yield
        if timer is not None:
            self._start()

    def cancel(self) -> None:
        """Ask for nothing from here on."""
        if self._timer is not None:
            self._timer.cancel()

    def _start(self) -> None:
        wait_s = max(0.0, self._due_s - time.monotonic())
        self._timer = threading.Timer(wait_s, self._session.gate.request, [SAVE])
        self._timer.daemon = True
        self._timer.start()
