"""Requests to agents and their answers. All of it belongs to the links' thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from toolkit.nodes.agent.link import Message
from toolkit.nodes.start.launcher import Events


@dataclass(frozen=True)
class NodeAnswered:
    """The answer of the agent of ``host``.

    It was asked for after ``asked`` and received at ``received``, both by this process's clock.
    """

    host: str
    message: Message
    asked: float
    received: float


@dataclass(frozen=True)
class NodeSilent:
    """``host`` will not answer. ``is_certain``: no agent can be started there; else one was lost."""

    host: str
    why: str
    is_certain: bool


@dataclass
class AgentRequest:
    """An order to some agents. ``heard`` gets a NodeAnswered or a NodeSilent of each, or nothing."""

    heard: Events
    orders: dict[str, Message]  #: not sent yet
    asked: dict[str, float] = field(default_factory=dict)  #: the time, for those that have not answered

    def end(self, silent: NodeSilent) -> None:
        """Report that the host will not answer, if an answer was awaited."""
        was_sent = self.asked.pop(silent.host, None) is not None
        if self.orders.pop(silent.host, None) is not None or was_sent:
            self.heard.put(silent)


class AgentRequests:
    """The requests that some agents have not answered."""

    def __init__(self, send: Callable[[str, Message], None]) -> None:
        """Take ``send``, which sends an order to an agent that is connected."""
        self._send = send
        self._requests: dict[int, AgentRequest] = {}
        self.missing: dict[str, NodeSilent] = {}  #: why a host has no agent

    def begin(self, number: int, request: AgentRequest, there: Collection[str], starting: Collection[str]) -> None:
        """Ask the agents that are ``there``. Those that are ``starting`` are asked when they connect."""
        # Forget requests that all agents have answered.
        unanswered = {n: earlier for n, earlier in self._requests.items() if earlier.orders or earlier.asked}
        self._requests = {**unanswered, number: request}
        for host in list(request.orders):
            if host in there:
                self._ask(host, request)
            elif host not in starting:
                request.end(self.missing.get(host, NodeSilent(host, "it has no agent", is_certain=False)))

    def withdraw(self, number: int) -> None:
        """Report nothing more of a request."""
        self._requests.pop(number, None)

    def note_here(self, host: str) -> None:
        """Send the agent of ``host``, which has connected, the requests that wait for it."""
        for request in self._requests.values():
            self._ask(host, request)

    def note_missing(self, silent: NodeSilent) -> None:
        """Note that a host will not answer."""
        self.missing[silent.host] = silent
        for request in self._requests.values():
            request.end(silent)

    def _ask(self, host: str, request: AgentRequest) -> None:
        if host in request.orders:
            request.asked[host] = time.time()
            self._send(host, request.orders.pop(host))

    def take_answer(self, host: str, message: Message) -> None:
        """Take the answer of ``host``, if one is awaited."""
        request = self._requests.get(message["request"])
        asked = None if request is None else request.asked.pop(host, None)
        if request is not None and asked is not None:
            request.heard.put(NodeAnswered(host, message, asked, time.time()))
