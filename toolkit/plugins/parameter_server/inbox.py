"""The messages that a rank has received, and which ranks are dead according to them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from toolkit.base.errors import ToolkitError
from toolkit.plugins.parameter_server.mail import Kind, Mail, PeerMessage

Handler: TypeAlias = Callable[[PeerMessage], None]


class PeerInbox:
    """Hands messages to the ``handlers`` of their kinds as they come. Other kinds are kept until they are awaited.

    ``dead`` follows the order of the messages: what a dead worker had sent before still counts. Other ranks may know of
    more deaths at this moment, or of fewer. Every method may raise ToolkitError for a death without which the training
    cannot go on.
    """

    def __init__(
        self, mail: Mail, servers: Sequence[int], workers: Sequence[int], handlers: Mapping[Kind, Handler]
    ) -> None:
        self._mail, self._servers, self._workers, self._handlers = mail, servers, workers, handlers
        self._waiting: defaultdict[Kind, deque[PeerMessage]] = defaultdict(deque)
        self.dead: set[int] = set()

    @property
    def living(self) -> list[int]:
        """Return the living workers."""
        return [rank for rank in self._workers if rank not in self.dead]

    def handle_next(self) -> None:
        """Wait for the next message, and handle or keep it."""
        message = self._mail.receive()
        if message.kind is Kind.LOST:
            self.dead.add(message.sender)
            if message.sender in self._servers:
                raise ToolkitError(f"rank {message.sender}, a parameter server, is gone; see its log")
            if not self.living:
                first, count = self._workers[0], len(self._workers)
                raise ToolkitError(f"all {count} workers have died; see the logs of ranks {first} and up")
        if message.kind in self._handlers:
            self._handlers[message.kind](message)
        elif message.kind is not Kind.LOST:
            self._waiting[message.kind].append(message)

    def wait_for(self, kind: Kind) -> PeerMessage:
        """Return the next message of ``kind``."""
        while not self._waiting[kind]:
            self.handle_next()
        return self._waiting[kind].popleft()

    def answer(self, peer: int, kind: Kind) -> PeerMessage | None:
        """Return the next message of ``kind``, which ``peer`` was asked for. None if it dies before it answers."""
        while peer not in self.dead and not self._waiting[kind]:
            self.handle_next()
        return self._waiting[kind].popleft() if self._waiting[kind] else None

    def gather(self, kind: Kind) -> list[PeerMessage]:
        """Return a message of ``kind`` from every other living rank, in rank order. Rank 0 calls it."""
        received: dict[int, PeerMessage] = {}
        others = [*self._servers, *self._workers][1:]
        while True:
            while self._waiting[kind]:
                message = self._waiting[kind].popleft()
                received[message.sender] = message
            # A rank that dies meanwhile is not waited for.
            if all(rank in received or rank in self.dead for rank in others):
                return [received[rank] for rank in sorted(received)]
            self.handle_next()
