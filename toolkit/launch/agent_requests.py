"""Questions to agents and their answers. All of it belongs to the links' thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from toolkit.agent.link import Message
from toolkit.launch.steps import Events


@dataclass(frozen=True)
class NodeAnswered:
    """What the agent of ``host`` has answered: asked after ``asked``, heard of at ``received``, by our clock."""

    host: str
    message: Message
    asked: float
    received: float


@dataclass(frozen=True)
class NodeSilent:
    """``host`` will not answer. ``is_certain``: because no agent can be started there, and not because one was lost."""

    host: str
    why: str
    is_certain: bool


@dataclass
class Request:
    """What some agents are asked; who hears of it gets a NodeAnswered or a NodeSilent of each, or nothing."""

    heard: Events
    orders: dict[str, Message]  #: that have not been sent
    asked: dict[str, float] = field(default_factory=dict)  #: when, of those that have not answered

    def end(self, silent: NodeSilent) -> None:
        """Tell that its host will not answer, if it was to."""
        was_sent = self.asked.pop(silent.host, None) is not None
        if self.orders.pop(silent.host, None) is not None or was_sent:
            self.heard.put(silent)


class Requests:
    """Those that have not been answered by all."""

    def __init__(self, send: Callable[[str, Message], None]) -> None:
        """``send`` sends an agent that is there an order."""
        self._send = send
        self._requests: dict[int, Request] = {}
        self.missing: dict[str, NodeSilent] = {}  #: why a host has no agent

    def begin(self, number: int, request: Request, there: Collection[str], starting: Collection[str]) -> None:
        """Ask the agents that are ``there``. Those that are ``starting`` are asked when they come."""
        unanswered = {n: earlier for n, earlier in self._requests.items() if earlier.orders or earlier.asked}
        self._requests = {**unanswered, number: request}
        for host in list(request.orders):
            if host in there:
                self._ask(host, request)
            elif host not in starting:
                request.end(self.missing.get(host, NodeSilent(host, "it has no agent", is_certain=False)))

    def withdraw(self, number: int) -> None:
        """Tell nothing more of a request."""
        self._requests.pop(number, None)

    def note_here(self, host: str) -> None:
        """Ask the agent of ``host``, which has come, what it is to be asked."""
        for request in self._requests.values():
            self._ask(host, request)

    def note_missing(self, silent: NodeSilent) -> None:
        """Take that its host will not answer."""
        self.missing[silent.host] = silent
        for request in self._requests.values():
            request.end(silent)

    def _ask(self, host: str, request: Request) -> None:
        if host in request.orders:
            request.asked[host] = time.time()
            self._send(host, request.orders.pop(host))

    def take_answer(self, host: str, message: Message) -> None:
        """Take the answer of ``host``, if one is awaited."""
        request = self._requests.get(message["request"])
        asked = None if request is None else request.asked.pop(host, None)
        if request is not None and asked is not None:
            request.heard.put(NodeAnswered(host, message, asked, time.time()))
