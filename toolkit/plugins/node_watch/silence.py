"""Watches the ranks of a script that reports nothing, on each node.

Each node's watch is :mod:`.node_watch`. The run hangs when *all* ranks are silent for the bound, since a silent one may
wait for another that works. So ranks that wait in NCCL, which keeps a core or the GPU busy, hide a hang.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from queue import Empty
from typing import Any

from toolkit.base import logs
from toolkit.base.this_node import bare_python
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent.reports import Standing
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.line_channel import ChannelEnded, ErrorLine, LineChannel, NodeLine, open_channel
from toolkit.plugins.node_watch import silent_scripts as node_watch

#: Stacks are waited for this long.
STACKS_LIMIT_S = 20.0

log = logs.get(__name__)


def start_watch(run: RunDir, attempt: int, plan: Allocation, environ: Mapping[str, str], bound_s: float) -> NodesWatch:
    """Start a watch on each node of ``plan``. It is a step beside the ranks, or without Slurm runs here."""
    asked = {"run": str(run.path), "attempt": attempt, "bound_s": bound_s}
    command = bare_python("toolkit.plugins.node_watch.silent_scripts", json.dumps(asked))
    here = plan.job_id is None
    talk = LineChannel(command, environ) if here else open_channel(command, plan.hosts, environ, plan.gres(plan.hosts))
    return NodesWatch(talk, plan, bound_s)


class NodesWatch:
    """Watches a script that reports nothing, by a process on each node."""

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
