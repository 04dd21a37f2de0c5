"""The agent's side of what watches its node.

The monitor, :mod:`toolkit.plugins.node_watch.monitor_program`, is its own process for the whole job. While a script
reports nothing, :mod:`toolkit.plugins.node_watch.silent_scripts` is another one.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from toolkit.base import logs
from toolkit.base.this_node import bare_python
from toolkit.files.records import JsonRecord, SchemaError
from toolkit.nodes.agent.helpers import HelperLines, Helpers
from toolkit.nodes.agent.messages import Message, NodeSick, RankWatchEnded, ScriptRankStatus, WatchRanksOrder
from toolkit.plugins.node_watch.usage import NodeUsage

MONITOR_COMMAND = bare_python("toolkit.plugins.node_watch.monitor_program")
#: The monitor starts after this time, and one that has printed nothing for so many heartbeats hangs.
MONITOR_AFTER_S, MONITOR_HANGS = 2.0, 300

log = logs.get(__name__)


@dataclass(frozen=True)
class MonitorLine(JsonRecord):
    """A line that the monitor prints: one of these."""

    usage: NodeUsage | None = None
    sick: str | None = None
    log: str | None = None

    def __post_init__(self) -> None:
        if self.usage is None and self.sick is None and self.log is None:
            raise SchemaError("it has none of the monitor's keys")


class MonitorProcess:
    """Starts the monitor, and takes what it prints. See :class:`toolkit.nodes.agent.node.NodeMonitor`."""

    def __init__(self, helpers: Helpers, send: Callable[[Message], None]) -> None:
        """Take ``send`` for what makes the node sick."""
        self._helpers, self._send = helpers, send
        self._start_at = time.monotonic() + MONITOR_AFTER_S
        self._usage: dict[str, Any] | None = None  #: a sample that has not been taken
        self._lines = HelperLines("monitor", MonitorLine)
        self._rank_watch: int | None = None  #: the pid of what watches the ranks
        self._silence = 0  #: heartbeats since its last line

    def at_heartbeat(self) -> dict[str, Any] | None:
        """Start the monitor when it is due, report one that hangs, and return the newest sample that was not taken.

        Heartbeats are counted, not time: a suspended job stops both processes.
        """
        self._silence += 1
        if self._silence == MONITOR_HANGS:
            self._send(NodeSick("its monitor hangs: a disk or the GPUs' driver does not answer"))
        if time.monotonic() >= self._start_at:
            self._start_at = math.inf
            try:
                self._helpers.start(MONITOR_COMMAND, self._take)
            except OSError as error:  # no memory or no processes are left: the ranks may continue
                self._note_end(str(error))
        usage, self._usage = self._usage, None
        return usage

    def _note_end(self, why: str) -> None:
        log.warning("the node's monitor has ended: what the job uses here is no longer known: %s", why)
        self._silence = -sys.maxsize

    def _take(self, data: bytes) -> bool:
        if not data:
            self._note_end("it has closed its output")
        for line in self._lines.feed(data):
            self._silence = 0
            if line.usage is not None:
                self._usage = asdict(line.usage)
            if line.sick is not None:
                self._send(NodeSick(line.sick))
            if line.log is not None:
                log.warning("%s", line.log)
        return True

    def watch_ranks(self, order: WatchRanksOrder) -> None:
        """Watch the ranks of a script by the command of ``order``, and send each change. Without one end the watch."""
        if self._rank_watch in self._helpers.pids:  # else it has ended, and the number may be another process's
            os.kill(self._rank_watch, signal.SIGKILL)
        self._rank_watch = None
        if not order.command:
            return
        lines = HelperLines("watch for silent ranks", ScriptRankStatus)

        def take(data: bytes) -> bool:
            for change in lines.feed(data):
                self._send(change)
            if not data and self._rank_watch == pid:
                self._send(RankWatchEnded(order.attempt))
            return True

        try:
            pid = self._rank_watch = self._helpers.start(order.command, take)
        except OSError as error:  # no memory or no processes are left: the ranks may continue
            log.warning("silent ranks are not watched: %s", error)
            self._send(RankWatchEnded(order.attempt))
