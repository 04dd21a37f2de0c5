"""Decides when an attempt counts as hung: by what its ranks report, or from outside where they report nothing.

*Progress* means that any rank gets on, see :class:`toolkit.nodes.agent.reports.NodeProgress`. One rank's progress is
enough, since the others may wait for it: in a collective, or while rank 0 writes a checkpoint. So a rank that hangs
beside others is noticed when these have reached the point where they wait for it, and the time counts from there.

Time is counted in looks of the supervisor. If the supervisor itself was stopped, by ``scontrol suspend`` or a disk that
did not answer, that time does not count: the reports of that time are still in its queue.

The ranks of a script that reports nothing are watched on each node (hang/node_watch.py). The run hangs when *all* of
them are silent for the bound, since a silent one may wait for another that works. So ranks that wait in NCCL, which
keeps a core or the GPU busy, hide a hang.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty
from typing import Any

from toolkit.base import logs
from toolkit.files.rundir import RunDir
from toolkit.hang import node_watch
from toolkit.health import bare_python
from toolkit.nodes.agent.reports import LONGEST_LOOK_S, Digest, Standing
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.line_channel import ChannelEnded, ErrorLine, LineChannel, NodeLine, open_channel

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


#: The watch is started after this share of the bound. Many scripts have ended by then, or called `toolkit.start()` and
#: report by themselves.
START_AFTER_SHARE = 0.2
#: Stacks are waited for this long.
STACKS_LIMIT_S = 20.0

log = logs.get(__name__)


def start_watch(
    run: RunDir, attempt: int, plan: Allocation, environ: Mapping[str, str], bound_s: float
) -> SilenceWatch:
    """Start a watch on each node of ``plan``. It is a step beside the ranks, or without Slurm runs here."""
    asked = {"run": str(run.path), "attempt": attempt, "bound_s": bound_s}
    command = bare_python("toolkit.hang.node_watch", json.dumps(asked))
    here = plan.job_id is None
    talk = LineChannel(command, environ) if here else open_channel(command, plan.hosts, environ, plan.gres(plan.hosts))
    return SilenceWatch(talk, plan, bound_s)


class SilenceWatch:
    """Has the methods of a :class:`~toolkit.hang.watchdog.Watchdog`, for ranks that are watched from outside."""

    def __init__(
        self, talk: LineChannel, plan: Allocation, bound_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._talk, self._nodes, self._clock = talk, len(plan.hosts), clock
        self._waiting = set(range(plan.world_size))  #: ranks that have not ended
        self._silent: dict[int, float] = {}  #: by rank: since when, by this process's clock
        self._confirm_s = 2 * node_watch.look_every_s(bound_s)
        self._all_silent_since: float | None = None
        self._answers = 0
        self._complaint = ""

    def is_stuck(self) -> bool:
        """True if every living rank has been silent for the bound. Another look since must have confirmed it."""
        with suppress(Empty):
            while True:
                self._take(self._talk.events.get_nowait())
        # One rank that works is enough: the others may wait for it.
        if not self._waiting or self._waiting - self._silent.keys():
            self._all_silent_since = None
            return False
        if self._all_silent_since is None:
            self._all_silent_since = self._clock()
        return self._clock() - self._all_silent_since > self._confirm_s

    @property
    def still_s(self) -> float:
        """Return for how long all ranks have been silent."""
        return min(standing.still_s for standing in self.standings())

    def standings(self) -> list[Standing]:
        """Return how long each silent rank has been silent."""
        now = self._clock()
        return [
            Standing(rank, node_watch.SILENT, None, now - since, False) for rank, since in sorted(self._silent.items())
        ]

    def ask_for_stacks(self) -> None:
        """Have the ranks' stacks written, which may end them. Return when all nodes have done so, or time is up."""
        self._talk.send("stacks")
        deadline = time.monotonic() + STACKS_LIMIT_S
        with suppress(Empty):
            while self._answers < self._nodes:
                self._take(self._talk.events.get(timeout=max(0.0, deadline - time.monotonic())))

    def close(self) -> None:
        """End the watch on every node."""
        self._talk.end()

    def _take(self, event: NodeLine | ErrorLine | ChannelEnded) -> None:
        match event:
            case NodeLine(_, text, received):
                try:
                    self._hear(json.loads(text), received)
                except (ValueError, TypeError, KeyError, AttributeError):
                    self._complaint = text
            case ErrorLine(text):
                self._complaint = text
            case ChannelEnded():
                self._answers = self._nodes
                log.warning(
                    "the watch for silent ranks has ended, a hang is not noticed: %s", self._complaint or "no word"
                )

    def _hear(self, message: Mapping[str, Any], received: float) -> None:
        if "answered" in message:
            self._answers += 1
            return
        rank, state, still_s = int(message["rank"]), message["is"], float(message["still_s"])
        # News of a rank replaces what was known of it.
        self._silent.pop(rank, None)
        self._waiting.add(rank)
        if state == node_watch.ENDED:
            self._waiting.discard(rank)
        elif state == node_watch.HIDDEN:
            log.warning("rank %d: what it does cannot be seen from its node, so a hang is not noticed", rank)
        elif state == node_watch.SILENT:
            self._silent[rank] = self._clock() - (time.time() - received) - still_s
