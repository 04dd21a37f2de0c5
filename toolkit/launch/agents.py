"""The agents of a job's nodes, one on each: started once, by srun or on this machine, and there to the end.

Agents and supervisor send each other a heartbeat every second. By it the supervisor sees which nodes are silent, and
how the ranks of the others get on; the agents see that the batch host is silent.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from toolkit import fsio, logs
from toolkit.agent import progress, reports
from toolkit.agent.link import HEARTBEAT_S, SECRET_BYTES, SILENT_S, Message
from toolkit.agent.progress import Digest
from toolkit.cluster.network import job_address, listen, plain_address, wildcard
from toolkit.launch import batch_host_watch, patience
from toolkit.launch.agent_links import AgentLinks
from toolkit.launch.agent_requests import NodeAnswered, NodeSilent, Request, Requests
from toolkit.launch.allocation import Allocation
from toolkit.launch.steps import Events, FirstReports, MainReport, Progress
from toolkit.rundir import RunDir

#: An agent must stand after so long, or its node counts as one where nothing can be started.
STANDS_WITHIN_S = 120.0
#: Agents that are told to leave are gone after this long.
LEAVE_S = 2.0

log = logs.get(__name__)


@dataclass(frozen=True)
class Endpoint:
    """Where the agents connect, and the secret by which they do.

    The guard holds it as well: nobody else gets the port after a supervisor has died, and the agents find the next one.
    """

    listening: socket.socket
    address: str  #: that they connect to; empty: where they are started from
    secret: bytes
    secret_file: Path

    @property
    def port(self) -> int:
        """The port at which they connect."""
        return int(self.listening.getsockname()[1])

    @staticmethod
    def open(run: RunDir, hosts: Sequence[str], environ: Mapping[str, str]) -> Endpoint:
        """Listen on the first of ``hosts``, this node, for agents on all of them. Raises OSError."""
        address = job_address(hosts[0], hosts, environ)
        file = run.path / f".agents-{secrets.token_hex(8)}.key"
        told = "" if address == wildcard() else address
        return Endpoint(listen(address), told, secrets.token_bytes(SECRET_BYTES), file)


class OnFailure(Protocol):
    """What is called when agents cannot be started, or have ended; in any thread."""

    def __call__(self, hosts: Collection[str], why: str, *, is_certain: bool = True) -> None:
        """``is_certain``: also of those that are connected."""


class AgentStarter(Protocol):
    """Starts agents that connect to ``at``."""

    def start(self, hosts: Sequence[str], at: Endpoint, environ: Mapping[str, str], on_failure: OnFailure) -> None:
        """Start one on each of ``hosts``, with ``environ``, which the ranks inherit, and return at once."""

    def note_connected(self, host: str) -> None:
        """Take that the agent of ``host`` has connected: from now on its connection tells how it does."""

    def close(self) -> None:
        """End what is left of them."""


class AgentUser:
    """Starts ranks on the agents' nodes. All of this is called by the links' thread, and does nothing by itself."""

    def agent_connected(self, host: str) -> None:
        """Orders can be sent to ``host`` from now on."""

    def agent_said(self, host: str, message: Message) -> None:
        """Take what it says of a process."""

    def agent_ended(self, host: str, why: str) -> None:
        """What it has started has ended with it."""

    def agent_missing(self, host: str, why: str) -> None:
        """None could be started there."""


class Awaited:
    """The ranks of an attempt whose supervisor has died. The agents that have started them connect to us."""

    def __init__(self, attempt: int, ranks: Mapping[str, int]) -> None:
        """``ranks``: how many each host has; none on a spare, whose agent comes as well."""
        self._ranks, self._attempt = ranks, attempt
        self._missing = {*ranks}
        self._has_come = threading.Event()
        self._fits = True

    def take(self, host: str, message: Message) -> bool:
        """Take what the agent of ``host`` says of itself. False where that is not what was awaited."""
        ranks = self._ranks[host]
        if host not in self._missing:
            return False
        if ranks == 0:
            fits = not message["lives"]
        else:
            fits = message["attempt"] == self._attempt and message["ranks"] == ranks
            self._fits = self._fits and fits
        self._missing.discard(host)
        if not self._fits or not self._missing:
            self._has_come.set()
        return fits

    def wait(self, patience_s: float) -> bool:
        """True if all ranks are there, as soon as that is known."""
        self._has_come.wait(patience_s)
        return self._fits and not any(self._ranks[host] for host in self._missing)


class Agents:
    """One agent on each node of the job.

    ``silent_hosts`` are those of which nothing has been heard for ``SILENT_S``, ``heard_hosts`` the others.
    ``sick_hosts`` says what is wrong with a node, see :mod:`toolkit.agent.sickness`. With ``watch_batch_host`` the
    agents requeue the job when its batch host is gone, see :mod:`toolkit.launch.batch_host_watch`.
    """

    def __init__(
        self,
        run: RunDir,
        allocation: Allocation,
        starter: AgentStarter,
        endpoint: Endpoint | None = None,
        *,
        watch_batch_host: bool = False,
    ) -> None:
        self._run, self._allocation, self._starter = run, allocation, starter
        self._endpoint, self._watch_batch_host = endpoint, watch_batch_host
        self._awaited: Awaited | None = None
        self._links: AgentLinks | None = None
        self._requests = Requests(lambda host, order: self.links.send(host, order))
        self._numbers = itertools.count()
        self._starting: dict[str, float] = {}  #: since when
        self._start_of: dict[str, int] = {}  #: the number of the last start of each host's agent
        self._next_heartbeat = 0.0
        self._turns = {host: turn for turn, host in enumerate(reversed(allocation.hosts))}
        self._is_closed = threading.Event()
        self._all_left = threading.Event()
        self.silent_hosts: frozenset[str] = frozenset()
        self.heard_hosts: frozenset[str] = frozenset()
        self.sick_hosts: Mapping[str, str] = {}
        self.environ: Mapping[str, str] = {}  #: the agents' own

    def open(self, environ: Mapping[str, str], events: Events, user: AgentUser, awaited: Awaited | None = None) -> None:
        """Listen for them, with ``environ`` for those that are started; ``user`` says which are to be.

        What the ranks report goes into ``events``, and so do our own mistakes. ``awaited``: the ranks that are there.
        """
        at = self._endpoint or Endpoint.open(self._run, self._allocation.hosts, environ)
        self._at, self._awaited = at, awaited
        patience.persist(lambda: fsio.write_atomic(at.secret_file, at.secret), self._run.path)
        self.environ, self._events, self._user = dict(environ), events, user
        self.reports_token = reports.token_of(at.secret)
        self._links = AgentLinks(at.listening.dup(), at.secret, self, len(self._allocation.hosts))

    def request(self, orders: Mapping[str, Message], heard: Events) -> int:
        """Send each host its order, as soon as its agent is there, and return a number to withdraw it by.

        NodeAnswered or NodeSilent of each goes into ``heard``, and nothing of a host that hangs.
        """
        number = next(self._numbers)
        request = Request(heard, {host: {**order, "request": number} for host, order in orders.items()})
        self.links.call(lambda: self._requests.begin(number, request, self.links.hosts, self._starting))
        return number

    def withdraw(self, number: int) -> None:
        """Hear nothing more of a request."""
        self.links.call(lambda: self._requests.withdraw(number))

    def ask(self, orders: Mapping[str, Message], patience_s: float) -> dict[str, Message]:
        """Send each host its order, and return the answers by host.

        Those that are silent or away are not waited for, the others, also those that start at this moment, for
        ``patience_s`` at most.
        """
        heard: Events = SimpleQueue()
        awaited = orders.keys() - self.silent_hosts
        number = self.request({host: orders[host] for host in awaited}, heard)
        deadline, answers = time.monotonic() + patience_s, dict[str, Message]()
        with contextlib.suppress(Empty):
            for _ in awaited:
                event = heard.get(timeout=max(0.0, deadline - time.monotonic()))
                if isinstance(event, NodeAnswered):
                    answers[event.host] = event.message
        self.withdraw(number)
        return answers

    def ask_for_unanswered(self) -> None:
        """Have all agents say which addresses do not answer their node's connections: NodeAnswered in our queue."""
        order: Message = {"do": "connections"}
        self.request(dict.fromkeys(self.heard_hosts, order), self._events)

    def host_at(self, address: str) -> str | None:
        """Return the host whose agent has connected from ``address``."""
        return self.links.addresses.get(plain_address(address))

    def close(self) -> None:
        """Have them leave, and end what is left of them."""
        if self._links is not None:
            self._links.call(self._leave)
            self._all_left.wait(LEAVE_S)
            self._starter.close()
            self._links.call(self._links.close)
            with contextlib.suppress(OSError):
                self._at.secret_file.unlink()
            if self._endpoint is None:
                self._at.listening.close()

    def dismiss_all(self) -> None:
        """Have all leave that are there, with what they have started. Others can be started at once."""

        def dismiss() -> None:
            self._awaited = None
            self.links.dismiss()

        self.links.call(dismiss)

    def dismiss(self, host: str) -> None:
        """Have the agent of ``host`` leave, whose ranks have ended: the node is no longer to be used."""
        if self._links is not None:
            self._links.call(lambda: self.links.send(host, {"do": "leave"}))

    @property
    def is_open(self) -> bool:
        """True once they can connect."""
        return self._links is not None

    @property
    def links(self) -> AgentLinks:
        """The connections, once they are open."""
        assert self._links is not None
        return self._links

    # --------------------------------------------------------------------------------------------------- the thread

    def ensure(self, hosts: Collection[str]) -> None:
        """Start agents where none is and none is on its way; at first also on the job's other nodes."""
        is_first = not self._start_of
        self._start_on(hosts)
        if is_first:  # the spares, apart: one of them may be why a step is refused
            self._start_on(self._allocation.hosts)

    def _start_on(self, hosts: Collection[str]) -> None:
        wanted = {*hosts} - self.links.hosts - self._starting.keys()
        missing = [host for host in self._allocation.hosts if host in wanted]
        if missing:
            self._starting |= dict.fromkeys(missing, time.monotonic())
            for host in missing:
                self._requests.missing.pop(host, None)
            number = max(self._start_of.values(), default=0) + 1
            self._start_of |= dict.fromkeys(missing, number)
            on_failure = partial(self._note_failure, number)
            try:
                self._starter.start(missing, self._at, self.environ, on_failure)
            except OSError as error:
                self._give_up(missing, f"agents cannot be started: {error}")

    def _leave(self) -> None:
        self._is_closed.set()
        for host in self.links.hosts:
            self.links.send(host, {"do": "leave"})
        if not self.links.hosts:
            self._all_left.set()

    def _note_failure(self, number: int, hosts: Collection[str], why: str, *, is_certain: bool = True) -> None:
        """See :class:`OnFailure`. Of an agent that has been started again since, nothing is to be heard any more."""
        self.links.call(
            lambda: self._give_up([h for h in hosts if self._start_of[h] == number], why, is_certain=is_certain)
        )

    def _give_up(self, hosts: Collection[str], why: str, *, is_certain: bool = True) -> None:
        for host in hosts:
            if is_certain:
                self.links.drop(host, why)
            if self._starting.pop(host, None) is None:
                continue
            log.warning("no agent on %s: %s", host, why)
            self._requests.note_missing(NodeSilent(host, why, is_certain))
            self._user.agent_missing(host, why)

    def _order_watch(self, host: str) -> Message:
        """Have ``host`` look after the batch host; spares before the others, for they have nothing else to do."""
        job = self._allocation
        address = self._at.address or job.hosts[0]
        command = batch_host_watch.command(self._run, job, address, self._at.port, os.getpid())
        return {"do": "watch", "command": command, "turn": self._turns[host]}

    # what the links tell

    def admits(self, host: str, message: Message) -> bool:
        """See :class:`~toolkit.launch.agent_links.Listener`. Ranks that nobody goes on with end with their agent."""
        return not message["again"] or (self._awaited is not None and self._awaited.take(host, message))

    def agent_came(self, host: str) -> None:
        """See :class:`~toolkit.launch.agent_links.Listener`."""
        self._starting.pop(host, None)
        self._starter.note_connected(host)
        if self._watch_batch_host and host != self._allocation.hosts[0]:
            self.links.send(host, self._order_watch(host))
        self._requests.note_here(host)
        self._user.agent_connected(host)

    def agent_said(self, host: str, message: Message) -> None:
        """See :class:`~toolkit.launch.agent_links.Listener`."""
        match message["is"]:
            case "alive":
                if message["progress"] is not None:
                    self._events.put(Progress(host, Digest(**message["progress"])))
            case "reporting":
                self._events.put(FirstReports(message["attempt"], host, tuple(message["ranks"])))
            case "report":
                report = progress.parse(message["text"].encode())
                if report is not None:
                    self._events.put(MainReport(report))
            case "answer":
                self._requests.take_answer(host, message)
            case "sick":
                known, what = self.sick_hosts.get(host), str(message["what"])
                self.sick_hosts = {**self.sick_hosts, host: f"{known}, {what}" if known else what}
            case _:
                self._user.agent_said(host, message)

    def agent_left(self, host: str, why: str) -> None:
        """See :class:`~toolkit.launch.agent_links.Listener`."""
        if self._is_closed.is_set():
            if not self.links.hosts:
                self._all_left.set()
            return
        log.warning("node %s: %s", host, why)
        self._requests.note_missing(NodeSilent(host, why, is_certain=False))
        self._user.agent_ended(host, why)

    def broke(self, error: Exception) -> None:
        """See :class:`~toolkit.launch.agent_links.Listener`."""
        self._events.put(error)

    def time_passed(self) -> None:
        """See :class:`~toolkit.launch.agent_links.Listener`."""
        now = time.monotonic()
        if now < self._next_heartbeat:
            return
        self._next_heartbeat = now + HEARTBEAT_S
        for host in self.links.hosts:
            self.links.send(host, {"do": "alive"})
        self.silent_hosts = frozenset(self.links.silent(SILENT_S))
        self.heard_hosts = frozenset(self.links.hosts - self.silent_hosts)
        late = [host for host, since in self._starting.items() if now - since > STANDS_WITHIN_S]
        if late:
            why = f"no agent has come from it within {STANDS_WITHIN_S:.0f} s"
            self._give_up(late, why, is_certain=False)
