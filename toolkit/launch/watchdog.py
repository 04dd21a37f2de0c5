"""When an attempt counts as hung: fed with what the nodes tell and the time, it does nothing itself.

*Progress* is that any rank gets on, see :class:`toolkit.agent.progress.NodeProgress`. One rank's progress is enough,
since the others may wait for it: in a collective, or while rank 0 writes a checkpoint. So a rank that hangs beside
others is noticed when these have come to the point where they wait for it, and the time counts from there.

Time is counted in looks of the supervisor. If it was stopped itself, by ``scontrol suspend`` or a disk that did not
answer, that time does not count: the reports of that time are still in its queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from toolkit.agent.progress import LONGEST_LOOK_S, Digest

STUCK_SHARE = 0.5
#: Until the first step of an attempt has ended: imports from a cold disk, compiling and choosing kernels, opening the
#: network take long and show no sign of how far they are. Below 1, or torch's own timeout would come first, and say
#: less: that a collective timed out, but not on whom it waited.
START_SHARE = 0.8


class Watchdog:
    """Watches one attempt of ranks whose process group times out after ``timeout_s``."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._looked = clock()
        self._now = 0.0
        self._progress = 0.0
        self._has_begun = False
        self.nodes: dict[str, Digest] = {}  #: what each has told last

    def hear(self, host: str, digest: Digest) -> None:
        """Take what a node tells of its ranks, whether that is anything new or not."""
        self._pass_time()
        known = self.nodes.get(host)
        if known is None or known.moves != digest.moves:
            self._progress = self._now
        self._has_begun |= digest.most is not None
        self.nodes[host] = digest

    def is_stuck(self) -> bool:
        """Whether there was no progress for too long. To be asked more often than each ``LONGEST_LOOK_S``."""
        self._pass_time()
        return self._now - self._progress > self.bound_s

    @property
    def bound_s(self) -> float:
        """How long there may be no progress."""
        return self._timeout_s * (STUCK_SHARE if self._has_begun else START_SHARE)

    @property
    def still_s(self) -> float:
        """For how long there has been no progress."""
        return self._now - self._progress

    def _pass_time(self) -> None:
        now = self._clock()
        self._now += min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now
