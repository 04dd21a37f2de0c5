"""When an attempt counts as hung: fed with the ranks' reports and the time, it does nothing itself.

*Progress* is that any rank's step or counter changes, or that it enters a phase that it has not been in since they last
did: a rank that goes round in circles gets nowhere. One rank's progress is enough, since the others may wait for it: in
a collective, or while rank 0 writes a checkpoint. So a rank that hangs beside others is noticed when these have come to
the point where they wait for it, and the time counts from there.

Time is counted in looks of the supervisor. If it was stopped itself, by ``scontrol suspend`` or a disk that did not
answer, that time does not count: the reports of that time are still in its queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

STUCK_SHARE = 0.5
#: Until the first step of an attempt has ended: imports from a cold disk, compiling and choosing kernels, opening the
#: network take long and show no sign of how far they are. Below 1, or torch's own timeout would come first, and say
#: less: that a collective timed out, but not on whom it waited.
START_SHARE = 0.8
#: Ranks report each half second or so; one that is silent for this long is stopped, cut off or dead, or a library
#: keeps Python's lock.
SILENT_S = 5.0
LONGEST_LOOK_S = 2.0


@dataclass(frozen=True)
class Standing:
    """Where a rank stands, as its reports tell."""

    rank: int
    phase: str | None  #: None: it has not reported yet
    step: int | None  #: steps done; None: not even one in this attempt
    still_s: float  #: since its step, counter or phase changed last
    is_silent: bool  #: nothing has been heard of it lately


@dataclass
class _Rank:
    position: tuple[int | None, int] = (None, 0)
    phase: str | None = None
    phases: set[str] = field(default_factory=set)
    moved: float = 0.0
    heard: float = 0.0


class Watchdog:
    """Watches one attempt of ``world_size`` ranks whose process group times out after ``timeout_s``."""

    def __init__(self, world_size: int, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._looked = clock()
        self._now = 0.0
        self._progress = 0.0
        self._ranks = [_Rank() for _ in range(world_size)]

    def hear(self, rank: int, report: Mapping[str, Any]) -> None:
        """Take a rank's report, whether it says anything new or not."""
        self._pass_time()
        known = self._ranks[rank]
        known.heard = self._now
        phase, position = report["doing"], (report["done"], report["count"])
        if (phase, position) == (known.phase, known.position):
            return
        known.moved = self._now
        if position != known.position:
            known.phases.clear()
        if phase not in known.phases:
            self._progress = self._now
        known.phases.add(phase)
        known.phase, known.position = phase, position

    def is_stuck(self) -> bool:
        """Whether there was no progress for too long. To be asked more often than each ``LONGEST_LOOK_S``."""
        self._pass_time()
        return self._now - self._progress > self.bound_s

    @property
    def bound_s(self) -> float:
        """How long there may be no progress."""
        begun = any(known.position[0] is not None for known in self._ranks)
        return self._timeout_s * (STUCK_SHARE if begun else START_SHARE)

    @property
    def still_s(self) -> float:
        """For how long there has been no progress."""
        return self._now - self._progress

    def standings(self) -> list[Standing]:
        """Where each rank stands now."""
        return [self._standing(rank, known) for rank, known in enumerate(self._ranks)]

    def _standing(self, rank: int, known: _Rank) -> Standing:
        silent = known.phase is not None and self._now - known.heard > SILENT_S
        return Standing(rank, known.phase, known.position[0], self._now - known.moved, silent)

    def _pass_time(self) -> None:
        now = self._clock()
        self._now += min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
