"""The agent's side of what watches its node.

The monitor, :mod:`toolkit.plugins.node_watch.program`, is a process of its own for the whole job. While a script
reports nothing, :mod:`toolkit.plugins.node_watch.silent_scripts` is another one.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from toolkit.base import logs
from toolkit.base.this_node import bare_python
from toolkit.nodes.agent.helpers import Helpers
from toolkit.nodes.agent.messages import Message, NodeSick, RankActivity, RankWatchEnded, WatchRanksOrder

MONITOR_COMMAND = bare_python("toolkit.plugins.node_watch.program")
#: The monitor starts after this time, and one that has printed nothing for so many heartbeats hangs.
MONITOR_AFTER_S, MONITOR_HANGS = 2.0, 300

log = logs.get(__name__)


class MonitorProcess:
    """Starts the monitor, and takes what it prints. See :class:`toolkit.nodes.agent.node.NodeMonitor`."""

    def __init__(self, helpers: Helpers, send: Callable[[Message], None]) -> None:
        """Take ``send`` for what makes the node sick."""
        self._helpers, self._send = helpers, send
        self._start_at = time.monotonic() + MONITOR_AFTER_S
        self._usage: dict[str, Any] | None = None  #: a sample that has not been taken
        self._lines = _Lines("monitor")
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
            except OSError as error:  # no memory or no processes are left: the ranks may go on
                self._note_end(str(error))
        usage, self._usage = self._usage, None
        return usage

    def _note_end(self, why: str) -> None:
        log.warning("the node's monitor has ended: what the job uses here is no longer known: %s", why)
        self._silence = -sys.maxsize

    def _take(self, data: bytes) -> bool:
        if not data:
            self._note_end("it has closed its output")
        for message in self._lines.cut(data):
            self._silence = 0
            match message:
                case {"usage": usage}:
                    self._usage = usage
                case {"sick": what}:
                    self._send(NodeSick(what))
                case {"log": text}:
                    log.warning("%s", text)
        return True

    def watch_ranks(self, order: WatchRanksOrder) -> None:
        """Watch the ranks of a script by the command of ``order``, and send each change. Without one end the watch."""
        if self._rank_watch in self._helpers.pids:  # else it has ended, and the number may be another process's
            os.kill(self._rank_watch, signal.SIGKILL)
        self._rank_watch = None
        if not order.command:
            return
        lines = _Lines("watch for silent ranks")

        def take(data: bytes) -> bool:
            for change in lines.cut(data):
                self._send(RankActivity(order.attempt, **change))
            if not data and self._rank_watch == pid:
                self._send(RankWatchEnded(order.attempt))
            return True

        try:
            pid = self._rank_watch = self._helpers.start(order.command, take)
        except OSError as error:  # no memory or no processes are left: the ranks may go on
            log.warning("silent ranks are not watched: %s", error)
            self._send(RankWatchEnded(order.attempt))


class _Lines:
    """Cuts what a helper prints into lines of JSON."""

    def __init__(self, name: str) -> None:
        self._name, self._rest = name, b""

    def cut(self, data: bytes) -> list[dict[str, Any]]:
        """Return the objects in the lines that ``data`` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                message = None
            if isinstance(message, dict):
                found.append(message)
            else:  # a library of the driver may print, too
                log.warning("a line of the node's %s that is none was ignored: %.80r", self._name, line)
        return found
