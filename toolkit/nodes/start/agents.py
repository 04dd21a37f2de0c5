"""The agents of a job's nodes, one on each, and requests to them.

They are started once, by srun or on this machine, for the whole job. Agents and supervisor send each other a heartbeat
every second. From it the supervisor knows which nodes are silent, and how the ranks of the others progress; the agents
notice that the batch host is silent.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from toolkit.base import fsio, logs, outages
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent import reports
from toolkit.nodes.agent.link import HEARTBEAT_S, SECRET_BYTES, SILENT_S, Message
from toolkit.nodes.agent.reports import Digest
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agent_links import AgentLinks
from toolkit.nodes.start.launcher import Events, FirstReports, MainReport, Progress, RankActivity, RankWatchEnded
from toolkit.slurm.network import job_address, listen, plain_address, wildcard

log = logs.get(__name__)


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


#: An agent must connect within this time, or its node counts as one where nothing can be started.
STANDS_WITHIN_S = 120.0
#: An agent that sends nothing for this long is replaced, also if its node answers: it may be stopped (SIGSTOP).
#: A network may be away for half a minute, and a file server that the agent waits for somewhat longer.
UNHEARD_S = 120.0
#: The time between two heartbeats where a lost node can be replaced, and how many are sent in a second at most.
QUICK_HEARTBEAT_S, HEARTBEATS_A_SECOND = 0.25, 4000
#: Agents that are told to leave are gone after this time.
LEAVE_S = 2.0


@dataclass(frozen=True)
class Endpoint:
    """Where the agents connect, and the secret that they prove.

    The guard holds it as well. So no other process gets the port after a supervisor has died, and the agents find the
    next supervisor. They still hold the memory in which the ranks have left their state.
    """

    listening: socket.socket
    address: str  #: the address to connect to; empty: the one from which they are started
    secret: bytes
    secret_file: Path
    start: int = 0  #: the number of the start of agents, which they send as they connect

    @property
    def port(self) -> int:
        """Return the port at which they connect."""
        return int(self.listening.getsockname()[1])

    @staticmethod
    def open(run: RunDir, hosts: Sequence[str], environ: Mapping[str, str]) -> Endpoint:
        """Listen on the first of ``hosts``, this node, for agents on all of them. Raises OSError."""
        address = job_address(hosts[0], hosts, environ)
        file = run.path / f".agents-{secrets.token_hex(8)}.key"
        advertised = "" if address == wildcard() else address
        return Endpoint(listen(address), advertised, secrets.token_bytes(SECRET_BYTES), file)


class OnFailure(Protocol):
    """A function to call when agents cannot be started, or have ended; in any thread."""

    def __call__(self, hosts: Collection[str], why: str, *, is_certain: bool = True) -> None:
        """Take the failure. ``is_certain``: it holds also for hosts whose agents are connected."""


class AgentStarter(Protocol):
    """Starts agents that connect to ``at``."""

    def start(self, hosts: Sequence[str], at: Endpoint, environ: Mapping[str, str], on_failure: OnFailure) -> None:
        """Start an agent on each of ``hosts`` and return at once. The ranks inherit ``environ``."""

    def note_connected(self, host: str) -> None:
        """Note that the agent of ``host`` has connected. From now on its connection tells whether it lives."""

    def close(self) -> None:
        """End the agents that are left."""


class AgentUser:
    """Has agents start ranks, or do other work on their nodes.

    The links' thread calls all methods; here they do nothing.
    """

    def agent_connected(self, host: str) -> None:
        """Note that orders can be sent to ``host`` from now on."""

    def take_message(self, host: str, message: Message) -> None:
        """Take a message that :class:`Agents` leaves to its users, as those about processes."""

    def agent_ended(self, host: str, why: str) -> None:
        """Note that the agent of ``host`` has ended. All that it had started has ended, too."""

    def agent_missing(self, host: str, why: str) -> None:
        """Note that no agent could be started on ``host``."""


class Agents:
    """One agent on each node of the job.

    ``silent_hosts`` are those that have sent nothing for ``SILENT_S``, ``heard_hosts`` the others. Not even the kernels
    of ``unsure_hosts`` have answered the last two heartbeats. ``sick_hosts`` tells what is wrong with a node,
    ``usages`` what the job uses there, as its monitor has sent it. ``watch_command`` is there where nodes can be
    replaced: each agent but that of the batch host runs the command that it returns for the address and the port at
    which the agents are awaited. It watches the batch host.
    """

    def __init__(
        self,
        run: RunDir,
        allocation: Allocation,
        starter: AgentStarter,
        endpoint: Endpoint | None = None,
        *,
        watch_command: Callable[[str, int], list[str]] | None = None,
    ) -> None:
        self._run, self._allocation, self._starter = run, allocation, starter
        self._endpoint, self._watch_command = endpoint, watch_command
        self._returning = set[str]()  #: hosts whose agents a dead supervisor may have started; this one has not
        self._returned: SimpleQueue[str] = SimpleQueue()
        self._links: AgentLinks | None = None
        self._requests = AgentRequests(lambda host, order: self.links.send(host, order))
        # Of requests. An answer to one of a dead supervisor's is none to this one's.
        self._numbers = itertools.count(time.time_ns())
        self._starting: dict[str, float] = {}  #: the time of the start, by host
        self._start_of: dict[str, int] = {}  #: the number of the last start of each host's agent
        least_s = HEARTBEAT_S if watch_command is None else QUICK_HEARTBEAT_S
        self.heartbeat_s = min(HEARTBEAT_S, max(least_s, len(allocation.hosts) / HEARTBEATS_A_SECOND))
        self._next_heartbeat = 0.0
        #: In which the nodes watch the batch host. Spares come first: they are idle.
        self._turns = {host: turn for turn, host in enumerate(reversed(allocation.hosts))}
        self._is_closed = threading.Event()
        self._all_left = threading.Event()
        self.silent_hosts: frozenset[str] = frozenset()
        self.heard_hosts: frozenset[str] = frozenset()
        self.unsure_hosts: frozenset[str] = frozenset()
        self.sick_hosts: Mapping[str, str] = {}
        self.usages: dict[tuple[str, float], Message] = {}  #: by host and begin of its agent
        self.environ: Mapping[str, str] = {}  #: the agents' own
        self.listeners: tuple[AgentUser, ...] = ()  #: they hear of each thing before the launcher
        self.has_torch: dict[str, bool] = {}  #: by host: whether torch could be imported there
        self.ready: dict[tuple[str, str], float] = {}  #: when a host's agent was "connected", had "imported" ...

    def open(self, environ: Mapping[str, str], events: Events, user: AgentUser, *, again: bool = False) -> None:
        """Listen for agents. Those that are started get ``environ``, and ``user`` says which are to be started.

        The ranks' reports and the errors of the links' thread go into ``events``. With ``again`` agents may return that
        a supervisor before this one has started.
        """
        hosts = self._allocation.hosts
        at = self._endpoint or Endpoint.open(self._run, hosts, environ)
        if again and at.secret_file.exists():  # written by a supervisor that was killed
            self._returning |= {*hosts}
        outages.persist(lambda: fsio.write_atomic(at.secret_file, at.secret), self._run.path)
        self._at = at
        self._events, self._user = events, user
        self.environ = dict(environ)
        self.reports_token = reports.token_of(at.secret)
        self._links = AgentLinks(at.listening.dup(), at.secret, self, len(hosts))
        self._links.start()

    def wait_for_returning(self, hosts: Collection[str], deadline: float) -> None:
        """Wait for the agents of ``hosts`` that may return, until ``deadline`` by time.monotonic()."""
        missing = self._returning & {*hosts}
        with contextlib.suppress(Empty):
            while missing:
                missing.discard(self._returned.get(timeout=max(0.0, deadline - time.monotonic())))

    def request(self, orders: Mapping[str, Message], heard: Events) -> int:
        """Send each host its order as soon as its agent is there.

        Return the request's number, which serves to withdraw it. A NodeAnswered or NodeSilent for each host goes into
        ``heard``, and nothing for a host that hangs.
        """
        number = next(self._numbers)
        request = AgentRequest(heard, {host: {**order, "request": number} for host, order in orders.items()})
        self.links.call(lambda: self._requests.begin(number, request, self.links.hosts, self._starting))
        return number

    def withdraw(self, number: int) -> None:
        """Stop listening for the answers to a request."""
        self.links.call(lambda: self._requests.withdraw(number))

    def ask(self, orders: Mapping[str, Message], wait_s: float) -> dict[str, Message]:
        """Send each host its order, and return the answers by host.

        Silent and absent hosts are not waited for. The others, also those that start at this moment, are waited for at
        most ``wait_s``.
        """
        heard: Events = SimpleQueue()
        awaited = orders.keys() - self.silent_hosts
        number = self.request({host: orders[host] for host in awaited}, heard)
        deadline, answers = time.monotonic() + wait_s, dict[str, Message]()
        # At the deadline stop with the answers that have arrived.
        with contextlib.suppress(Empty):
            for _ in awaited:
                event = heard.get(timeout=max(0.0, deadline - time.monotonic()))
                if isinstance(event, NodeAnswered):
                    answers[event.host] = event.message
        self.withdraw(number)
        return answers

    def ask_for_unanswered(self) -> None:
        """Ask all agents which addresses leave connections unanswered: NodeAnswered in the attempt's queue."""
        self.request({host: {"do": "connections"} for host in self.heard_hosts}, self._events)

    def hear_all(self) -> None:
        """Count the time of silence of all agents from now on."""
        self.links.call(self.links.hear_all)

    def host_at(self, address: str) -> str | None:
        """Return the host whose agent has connected from ``address``."""
        return self.links.addresses.get(plain_address(address))

    def close(self) -> None:
        """Have the agents leave, and end those that are left."""
        if self._links is None:
            return

        def leave() -> None:
            self._is_closed.set()
            self.links.send_all({"do": "leave"})
            if not self.links.hosts:
                self._all_left.set()

        # Ask the agents to leave, then end those that are left, then close the connections.
        self._links.call(leave)
        self._all_left.wait(LEAVE_S)
        self._starter.close()
        self._links.call(self._links.close)
        with contextlib.suppress(OSError):
            self._at.secret_file.unlink()
        if self._endpoint is None:
            self._at.listening.close()

    def dismiss(self, host: str) -> None:
        """Have the agent of ``host`` leave. Its ranks have ended, and the node is no longer to be used."""
        if self._links is not None:
            self._links.call(lambda: self.links.send(host, {"do": "leave"}))

    @property
    def links(self) -> AgentLinks:
        """Return the connections, once they are open."""
        assert self._links is not None
        return self._links

    # --------------------------------------------------------------------------------------------------- the thread

    def ensure(self, hosts: Collection[str]) -> None:
        """Start agents where none runs and none is being started. At first do so on the job's other nodes, too."""
        # The spares come in a step of their own: one of them may be why a step is refused.
        for some in [hosts] if self._start_of else [hosts, self._allocation.hosts]:
            wanted = {*some} - self.links.hosts - self._starting.keys()
            missing = [host for host in self._allocation.hosts if host in wanted]
            if not missing:
                continue
            self._starting |= dict.fromkeys(missing, time.monotonic())
            for host in missing:
                self._requests.missing.pop(host, None)
            # The number tells this start from earlier ones, also of a supervisor that has died.
            at = replace(self._at, start=time.time_ns())
            self._start_of |= dict.fromkeys(missing, at.start)
            self._returning -= {*missing}
            try:
                self._starter.start(missing, at, self.environ, partial(self._note_failure, at.start))
            except OSError as error:
                self._give_up(missing, f"agents cannot be started: {error}")

    def _note_failure(self, number: int, hosts: Collection[str], why: str, *, is_certain: bool = True) -> None:
        """Give up the hosts, see :class:`OnFailure`. Ignore those whose agent has been started again since."""
        self.links.call(
            lambda: self._give_up([h for h in hosts if self._start_of[h] == number], why, is_certain=is_certain)
        )

    def _give_up(self, hosts: Collection[str], why: str, *, is_certain: bool = True) -> None:
        for host in hosts:
            if is_certain:
                self.links.drop(host, why)
            # Only a start that was awaited is reported as failed.
            if self._starting.pop(host, None) is None:
                continue
            log.warning("no agent on %s: %s", host, why)
            self._requests.note_missing(NodeSilent(host, why, is_certain))
            self._tell("agent_missing", host, why)

    def _tell(self, method: str, *what: Any) -> None:
        """Tell the listeners and the launcher. One that fails hears no more: an error here would end the run."""
        for listener in self.listeners:
            try:
                getattr(listener, method)(*what)
            except Exception as error:  # it may be other people's code
                log.error("what is done on the nodes beside the ranks has failed, and hears no more: %r", error)
                self.listeners = tuple(each for each in self.listeners if each is not listener)
        getattr(self._user, method)(*what)

    # what the links tell

    def admits(self, host: str, message: Message) -> bool:
        """True if the agent of ``host`` is wanted; it describes itself in ``message``. A refused one ends."""
        if message["again"]:
            is_wanted = host in self._returning
            self._returning.discard(host)
            self._returned.put(host)
            return is_wanted
        # One that was given up as late would take the place of the agent that was started instead.
        return bool(message["start"] == self._start_of.get(host))

    def agent_came(self, host: str) -> None:
        """Note that messages can be sent to the agent of ``host`` from now on."""
        self._starting.pop(host, None)
        self._starter.note_connected(host)
        if self._watch_command is not None and host != self._allocation.hosts[0]:
            address = self._at.address or self._allocation.hosts[0]
            command = self._watch_command(address, self._at.port)
            self.links.send(host, {"do": "watch", "command": command, "turn": self._turns[host]})
        self._requests.note_here(host)
        self._tell("agent_connected", host)

    def take_message(self, host: str, message: Message) -> None:
        match message["is"]:
            case "alive":
                if message["progress"] is not None:
                    self._events.put(Progress(host, Digest(**message["progress"])))
                if "usage" in message:
                    self.usages[host, message["usage"]["since"]] = message["usage"]
            case "reporting":
                self._events.put(FirstReports(message["attempt"], host, tuple(message["ranks"])))
            case "report":
                report = reports.parse(message["text"].encode())
                if report is not None:
                    self._events.put(MainReport(report))
            case "answer":
                self._requests.take_answer(host, message)
            case "activity":
                activity = RankActivity(message["attempt"], message["rank"], message["state"], message["still_s"])
                self._events.put(activity)
            case "watch_ended":
                self._events.put(RankWatchEnded(message["attempt"], host))
            case "sick":
                known, what = self.sick_hosts.get(host), str(message["what"])
                self.sick_hosts = {**self.sick_hosts, host: f"{known}, {what}" if known else what}
            case _:
                self._tell("take_message", host, message)

    def agent_left(self, host: str, why: str) -> None:
        """Note that the agent has ended, or cannot be reached any more."""
        # While closing, agents are meant to leave.
        if self._is_closed.is_set():
            if not self.links.hosts:
                self._all_left.set()
            return
        log.warning("node %s: %s", host, why)
        self._requests.note_missing(NodeSilent(host, why, is_certain=False))
        self._tell("agent_ended", host, why)

    def broke(self, error: Exception) -> None:
        """Take an error of the links' thread: no agent is served any more."""
        self._events.put(error)

    def time_passed(self) -> None:
        """Send heartbeats, and look who is silent or late. Called every ``heartbeat_s`` or more often."""
        now = time.monotonic()
        if now < self._next_heartbeat:
            return
        if now > self._next_heartbeat + SILENT_S:  # this process was stopped, perhaps with the whole job
            self.links.hear_all()
        self._next_heartbeat = now + self.heartbeat_s
        self.links.send_all({"do": "alive"})
        for host in self.links.silent(UNHEARD_S):
            self.links.drop(host, f"its agent has sent nothing for {UNHEARD_S:.0f} s: another one takes its place")
        self.silent_hosts = frozenset(self.links.silent(SILENT_S))
        self.heard_hosts = frozenset(self.links.hosts - self.silent_hosts)
        since = now - 2.5 * self.heartbeat_s
        quiet = self.links.silent(2.5 * self.heartbeat_s)
        self.unsure_hosts = frozenset(host for host in quiet if self.links.last_sign(host) < since)
        # Agents that did not connect in time count as missing.
        late = [host for host, since in self._starting.items() if now - since > STANDS_WITHIN_S]
        self._give_up(late, f"no agent has come from it within {STANDS_WITHIN_S:.0f} s", is_certain=False)
