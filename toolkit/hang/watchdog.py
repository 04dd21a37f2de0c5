"""Decides by what its ranks report when an attempt counts as hung.

*Progress* means that any rank gets on, see :class:`toolkit.nodes.agent.reports.NodeProgress`. One rank's progress is
enough, since the others may wait for it: in a collective, or while rank 0 writes a checkpoint. So a rank that hangs
beside others is noticed when these have reached the point where they wait for it, and the time counts from there.

Time is counted in looks of the supervisor. If the supervisor itself was stopped, by ``scontrol suspend`` or a disk that
did not answer, that time does not count: the reports of that time are still in its queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from toolkit.nodes.agent.reports import LONGEST_LOOK_S, Digest

STUCK_SHARE = 0.5
#: Until the first step of an attempt has ended: imports from a cold disk and opening the network take long and show no
#: progress. A rank that compiles shows it by its use of the CPU, see toolkit.ranks.report. Below 1, or torch's own
#: timeout would come first, and tell less: that a collective timed out, but not on which rank it waited.
START_SHARE = 0.8


class Watchdog:
    """Watches one attempt of ranks whose process group times out after ``timeout_s``."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._clock, self._looked = timeout_s, clock, clock()
        self._now = self._progress = 0.0
        self._has_begun = False
        self.nodes: dict[str, Digest] = {}  #: the last digest of each node

    def hear(self, host: str, digest: Digest) -> None:
        """Take a node's digest of its ranks, whether it has anything new or not."""
        self._pass_time()
        known = self.nodes.get(host)
        # A node that reports for the first time counts as progress, too.
        if known is None or known.moves != digest.moves:
            self._progress = self._now
        self._has_begun |= digest.most is not None
        self.nodes[host] = digest

    def is_stuck(self) -> bool:
        """True if there was no progress for too long. To be called more often than every ``LONGEST_LOOK_S``."""
        self._pass_time()
        return self._now - self._progress > self.bound_s

    @property
    def bound_s(self) -> float:
        """Return how long there may be no progress."""
        return self._timeout_s * (STUCK_SHARE if self._has_begun else START_SHARE)

    @property
    def still_s(self) -> float:
        """Return for how long there has been no progress."""
        return self._now - self._progress

    def _pass_time(self) -> None:
        now = self._clock()
        self._now += min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
