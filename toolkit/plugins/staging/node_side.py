"""The copies of packages on the node's disk: made, and checked, in separate processes (:mod:`toolkit.base.staged`)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

from toolkit.base import logs
from toolkit.base.process_limits import limits
from toolkit.nodes.agent.helpers import Helpers, parsed
from toolkit.nodes.agent.messages import Message, NodeStaged, StageOrder
from toolkit.nodes.agent.processes import Processes

COPY_COMMAND = (sys.executable, "-P", "-m", "toolkit.plugins.staging.copying")
CHECK_COMMAND = (*COPY_COMMAND, "check")
#: A disk that does not answer within this time is not waited for.
CHECK_S = 60.0
#: A process that copies is started once more if it is killed.
TRIES = 2

log = logs.get(__name__)


class CopyKeeper:
    """Has copies made, and has an attempt use only those that are whole."""

    def __init__(self, helpers: Helpers, processes: Processes, send: Callable[[Message], None]) -> None:
        self._helpers, self._processes, self._send = helpers, processes, send
        self._seen_whole = 0.0  #: when, by time.monotonic()

    def stage(self, order: StageOrder) -> None:
        """Copy packages to the node's own disk, then report it. What is started waits ``wait_s`` for that."""
        if order.wait_s:
            self._processes.defer_starts(order.wait_s)
        self._copy(json.dumps(order.request).encode(), TRIES)

    def _copy(self, request: bytes, tries: int) -> None:
        """Copy in a separate process, which holds the copies until this one ends."""

        def take(text: bytes) -> None:
            if not text and tries > 1:
                log.warning("the copying to this node's disk has ended without an answer: trying again")
                self._copy(request, tries - 1)
                return
            none = NodeStaged({}, ("the copying was killed: see the agent's log",))
            self._use(parsed(text, NodeStaged) or none)

        try:
            self._helpers.ask(COPY_COMMAND, take, request)
        except OSError as error:
            self._use(NodeStaged({}, (str(error),)))

    def _use(self, staged: NodeStaged) -> None:
        self._seen_whole = time.monotonic()
        self._processes.use_copies(staged.copies)
        self._send(staged)

    def check(self) -> None:
        """Use the copies no more if files of theirs are gone. To be called before processes are started.

        These wait for the answer. Without one they do without copies: half a copy is worse than none.
        """
        processes = self._processes
        if not processes.copies or time.monotonic() - self._seen_whole < limits().copy_is_whole_s:
            return
        paths, processes.copies = processes.copies, {}
        processes.defer_starts(CHECK_S)

        def take(text: bytes) -> None:
            whole = parsed(text, dict[str, str]) or {}
            # Ranks use the original of each copy that is not whole.
            lost = [source for source in paths if source not in whole]
            if lost:
                problems = (f"{source}: files of its copy were removed from this node's disk" for source in lost)
                self._send(NodeStaged(whole, tuple(problems)))
            self._seen_whole = time.monotonic()
            processes.use_copies(whole)

        try:
            self._helpers.ask(CHECK_COMMAND, take, json.dumps(paths).encode())
        except OSError as error:
            log.warning("the copies cannot be checked: %s", error)
            take(b"")
