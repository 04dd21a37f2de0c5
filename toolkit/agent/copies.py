"""The copies of packages on the node's disk: made, and checked, in separate processes (:mod:`toolkit.staging`)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping

from toolkit import logs
from toolkit.agent.helpers import Helpers, parsed
from toolkit.agent.link import Message
from toolkit.agent.processes import Processes
from toolkit.records import NUMBER, TEXT, ListOf, MapOf, Maybe, Record

COPY_COMMAND = (sys.executable, "-P", "-m", "toolkit.staging.copying")
CHECK_COMMAND = (sys.executable, "-P", "-m", "toolkit.staging.whole")
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

    def __init__(self, helpers: Helpers, processes: Processes, send: Callable[[Message], None]) -> None:
        self._helpers, self._processes, self._send = helpers, processes, send
        self._seen_whole = 0.0  #: when, by time.monotonic()

    def stage(self, order: Message) -> None:
        """Carry out the supervisor's order to copy."""
        if order["wait_s"]:
            self._processes.copies.expect(order["wait_s"])
        start(self._helpers, order["request"], self._take)

    def _take(self, answer: Message) -> None:
        self._seen_whole = time.monotonic()
        self._processes.use_copies(answer["copies"])
        self._send({"is": "staged", **answer})

    def check(self) -> None:
        """Use the copies no more if files of theirs are gone. To be called before processes are started.

        These wait for the answer. Without one they do without copies: half a copy is worse than none.
        """
        if not self._processes.copies.paths or time.monotonic() - self._seen_whole < SEEN_FOR_S:
            return
        paths = self._processes.copies.put_aside(CHECK_S)

        def take(text: bytes) -> None:
            whole: Mapping[str, str] = parsed(text, MapOf(TEXT)) or {}
            lost = [source for source in paths if source not in whole]
            if lost:
                problems = [f"{source}: files of its copy were removed from this node's disk" for source in lost]
                self._send({"is": "staged", "copies": whole, "problems": problems})
            self._seen_whole = time.monotonic()
            self._processes.use_copies(whole)

        try:
            self._helpers.ask(CHECK_COMMAND, take, json.dumps(paths).encode())
        except OSError as error:
            log.warning("the copies cannot be checked: %s", error)
            take(b"")


def start(helpers: Helpers, request: Message, take: Callable[[Message], None], tries: int = 2) -> None:
    """Copy packages in a separate process, which holds the copies until this one ends; ``take`` gets its answer.

    The process may be killed: then it is started once more. One that cannot be started is a problem in the answer.
    """

    def hear(text: bytes) -> None:
        if not text and tries > 1:
            log.warning("the copying to this node's disk has ended without an answer: trying again")
            start(helpers, request, take, tries - 1)
            return
        take(parsed(text, _ANSWER) or {"copies": {}, "problems": ["the copying was killed: see the agent's log"]})

    try:
        helpers.ask(COPY_COMMAND, hear, json.dumps(request).encode())
    except OSError as error:
        take({"copies": {}, "problems": [str(error)]})
