"""Copies of the state in the nodes' memory, as the loop makes them.

This module decides how often, and whether there is room.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

from toolkit.base import logs
from toolkit.base.errors import ConfigError
from toolkit.checkpoint.memory import Memory
from toolkit.checkpoint.memory_load import KEY
from toolkit.checkpoint.policy import CopyClock
from toolkit.checkpoint.reader import Loaded
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json
from toolkit.train.state import TrainingState

log = logs.get(__name__)


class MemoryCopies:
    """One rank's copies of the state in memory (:class:`Memory`), every ``every`` steps. With None there are none."""

    def __init__(self, every: int | str | None, session: Session, state: TrainingState) -> None:
        self._session, self._state = session, state
        self._clock: CopyClock | None = None  #: None: nothing is copied
        self._memory: Memory | None = None
        self._is_sure_of_room = False
        if every is not None:
            self._clock = CopyClock(every)
            self._memory = Memory.of_this_rank(session.rank, session.world_size, session.attempt, os.environ)

    def load(self, newest_on_disk: Callable[[], int | None]) -> Loaded | None:
        """Load the copy kept before a restart inside the job. None: there is none newer than what is on disk.

        Only rank 0 calls ``newest_on_disk``.
        """
        if self._memory is None:
            return None
        newer_than = newest_on_disk() if self._session.is_main else None
        return self._memory.load(self._state.places(), self._session.store, newer_than)

    def is_due(self, step: int) -> bool:
        """True if the state is to be copied after ``step`` steps."""
        memory, clock = self._memory, self._clock
        return memory is not None and memory.is_usable and clock is not None and clock.is_due(step)

    def keep(self, step: int, reached: Mapping[str, Json], began_s: float) -> None:
        """Copy the state after ``step`` steps into the nodes' memory; every rank calls it.

        ``began_s``: when the training began to wait for the copy, by ``time.monotonic``. Where the copies do not fit it
        raises ConfigError; with ``auto`` it turns the copies off instead, on all ranks.
        """
        memory, clock = self._memory, self._clock
        assert memory is not None
        assert clock is not None
        idle_s = memory.wait()
        state = self._state.now()
        shortage = None if self._is_sure_of_room else memory.shortage(state)
        if shortage is not None and not clock.is_auto:
            raise ConfigError(shortage)
        figures = clock.figures(step, began_s, memory.background_s)
        # Also a barrier: from here on the copy before this one is complete on all ranks and on their partners.
        sums = self._state.source.sum({**figures, "short": float(shortage is not None)})
        # One rank without room turns the copies off on all of them.
        if sums["short"]:
            log.warning("%s: auto is off: %s", KEY, shortage or "the copies do not fit into another node's memory")
            self._clock = None
            return
        self._is_sure_of_room = True
        every = clock.agree(step, sums)
        if every is not None and self._session.is_main:
            log.info("the state is kept in memory every %d steps from here on", every)
        # Waits for the copy before and for new memory are left out of the cost by which ``auto`` sets the interval.
        idle_s += memory.write(step, state, {**self._state.meta, **reached})
        now_s = time.monotonic()
        clock.copied(step, now_s - began_s - idle_s, now_s)

    def close(self) -> None:
        """Wait until the last copy is complete on this node."""
        if self._memory is not None:
            self._memory.close()
