"""The copies of packages on the node's disk: made, and checked, in separate processes (:mod:`toolkit.base.staged`)."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping

from toolkit.base import logs
from toolkit.files.records import NUMBER, TEXT, ListOf, MapOf, Maybe, Record
from toolkit.nodes.agent.helpers import Helpers, parsed
from toolkit.nodes.agent.link import Message
from toolkit.nodes.agent.processes import Processes
from toolkit.slurm.network import listen

COPY_COMMAND = (sys.executable, "-P", "-m", "toolkit.plugins.staging.relay")
CHECK_COMMAND = (sys.executable, "-P", "-m", "toolkit.plugins.staging.whole")
#: Copies that were whole this recently are not looked at again. Cleaners come once a day.
SEEN_FOR_S = 60.0
#: A disk that does not answer within this time is not waited for.
CHECK_S = 60.0
_ANSWER = Record(
    {"copies": MapOf(TEXT), "problems": ListOf(TEXT), "damaged": Maybe(ListOf(TEXT)), "took_s": Maybe(NUMBER)}
)

log = logs.get(__name__)


class CopyKeeper:
    """Has copies made, and has an attempt use only those that are whole."""

    def __init__(self, helpers: Helpers, processes: Processes, send: Callable[[Message], None], secret: bytes) -> None:
        self._helpers, self._processes, self._send, self._secret = helpers, processes, send, secret
        self._listening: socket.socket | None = None
        self._relay: socket.socket | None = None  #: takes connections of other nodes
        self._seen_whole = 0.0  #: when, by time.monotonic()

    def listen(self, address: str) -> Message | None:
        """Listen on ``address`` for nodes that take packages from this one; return the :class:`~.relay.NodeAddress`."""
        with contextlib.suppress(OSError):  # without it they read the shared disk
            if self._listening is None:
                self._listening = listen(address)
                self._listening.setblocking(False)
                self._helpers.selector.register(self._listening, selectors.EVENT_READ, self._pass_on)
            address, port = self._listening.getsockname()[:2]
            return {"address": address, "port": port}
        return None

    def _pass_on(self) -> None:
        """Give a connection to the process that copies; close it if there is none."""
        assert self._listening is not None
        with contextlib.suppress(OSError):
            connection, _ = self._listening.accept()
            with connection:
                if self._relay is not None:
                    socket.send_fds(self._relay, [b"c"], [connection.fileno()])

    def stage(self, order: Message) -> None:
        """Copy packages to the node's own disk, from the nodes ``above``. Then send ``staged``.

        What is started waits ``wait_s`` for that.
        """
        if order["wait_s"]:
            self._processes.hold(order["wait_s"])
        if self._relay is not None:
            self._relay.close()
        self._relay, channel = socket.socketpair()
        self._relay.setblocking(False)

        def take(answer: Message) -> None:
            channel.close()  # so connections are refused as soon as the process takes none
            self._take(answer)

        given = {key: order[key] for key in ("request", "above", "is_above")}
        given |= {"secret": self._secret.hex(), "channel": channel.fileno()}
        start(self._helpers, given, take)

    def _take(self, answer: Message) -> None:
        self._seen_whole = time.monotonic()
        self._processes.use_copies(answer["copies"])
        self._send({"is": "staged", **answer})

    def check(self) -> None:
        """Use the copies no more if files of theirs are gone. To be called before processes are started.

        These wait for the answer. Without one they do without copies: half a copy is worse than none.
        """
        processes = self._processes
        if not processes.copies or time.monotonic() - self._seen_whole < SEEN_FOR_S:
            return
        paths, processes.copies = processes.copies, {}
        processes.hold(CHECK_S)

        def take(text: bytes) -> None:
            whole: Mapping[str, str] = parsed(text, MapOf(TEXT)) or {}
            # Ranks use the original of each copy that is not whole.
            lost = [source for source in paths if source not in whole]
            if lost:
                problems = [f"{source}: files of its copy were removed from this node's disk" for source in lost]
                self._send({"is": "staged", "copies": whole, "problems": problems})
            self._seen_whole = time.monotonic()
            processes.use_copies(whole)

        try:
            self._helpers.ask(CHECK_COMMAND, take, json.dumps(paths).encode())
        except OSError as error:
            log.warning("the copies cannot be checked: %s", error)
            take(b"")


def start(helpers: Helpers, request: Message, take: Callable[[Message], None], tries: int = 2) -> None:
    """Copy packages in a separate process. It holds the copies until this one ends; ``take`` gets its answer.

    The process may be killed: then it is started once more. One that cannot be started is a problem in the answer.
    """

    def hear(text: bytes) -> None:
        if not text and tries > 1:
            log.warning("the copying to this node's disk has ended without an answer: trying again")
            start(helpers, request, take, tries - 1)
            return
        take(parsed(text, _ANSWER) or {"copies": {}, "problems": ["the copying was killed: see the agent's log"]})

    try:
        helpers.ask(COPY_COMMAND, hear, json.dumps(request).encode(), pass_fds=[request["channel"]])
    except OSError as error:
        take({"copies": {}, "problems": [str(error)]})
