"""The messages that a rank has received. A peer that dies ends the attempt."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

from toolkit.base.errors import ToolkitError
from toolkit.plugins.parameter_server.mail import Kind, Mail, PeerMessage

Handler: TypeAlias = Callable[[PeerMessage], None]


class PeerInbox:
    """Hands messages to the ``handlers`` of their kinds as they come. Other kinds are kept until they are awaited.

    Every method raises ToolkitError when a peer has died, after all that it had sent.
    """

    def __init__(self, mail: Mail, handlers: Mapping[Kind, Handler]) -> None:
        self._mail, self._handlers = mail, handlers
        self._waiting: defaultdict[Kind, deque[PeerMessage]] = defaultdict(deque)

    def handle_next(self) -> None:
        """Wait for the next message, and handle or keep it."""
        message = self._mail.receive()
        if message.kind is Kind.LOST:
            raise ToolkitError(f"rank {message.sender} is gone; see its log")
        if message.kind in self._handlers:
            self._handlers[message.kind](message)
        else:
            self._waiting[message.kind].append(message)

    def wait_for(self, kind: Kind) -> PeerMessage:
        """Return the next message of ``kind``."""
        while not self._waiting[kind]:
            self.handle_next()
        return self._waiting[kind].popleft()

    def gather(self, kind: Kind, senders: Collection[int]) -> list[PeerMessage]:
        """Return a message of ``kind`` from each of ``senders``, in rank order."""
        received: dict[int, PeerMessage] = {}
        while len(received) < len(senders):
            message = self.wait_for(kind)
            received[message.sender] = message
        return [received[rank] for rank in sorted(received)]
