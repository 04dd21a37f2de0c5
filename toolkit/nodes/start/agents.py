"""The agents of a job's nodes, one on each: the connections to them, and requests.

They are started once, by srun or on this machine, for the whole job. Agents and supervisor send each other a heartbeat
every second. A thread takes what the agents send. It and all callers share one lock; what happens goes into the
supervisor's queue.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from toolkit.base import fsio, logs, outages
from toolkit.base.process_limits import limits
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent import messages, reports
from toolkit.nodes.agent.wire_protocol import (
    HEARTBEAT_S,
    SECRET_BYTES,
    SILENT_S,
    AuthenticatedConnection,
    AuthenticationError,
)
from toolkit.nodes.allocation import Allocation
from toolkit.slurm.network import job_address, listen, plain_address, wildcard

log = logs.get(__name__)

#: The queue into which all that happens goes, for the loop of the supervisor.
Events = SimpleQueue[Any]


@dataclass(frozen=True)
class Progress:
    """The progress of the ranks on ``host``; sent once a second."""

    host: str
    digest: reports.ProgressSummary


@dataclass(frozen=True)
class NodeAnswered:
    """The answer of the agent of ``host``, with the times of its request and its receipt by this process's clock."""

    host: str
    message: messages.RequestAnswered
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
    orders: dict[str, messages.NodeRequest]  #: not sent yet
    asked: dict[str, float] = field(default_factory=dict)  #: the time, for those that have not answered

    def end(self, silent: NodeSilent) -> None:
        """Report that the host will not answer, if an answer was awaited."""
        was_sent = self.asked.pop(silent.host, None) is not None
        if self.orders.pop(silent.host, None) is not None or was_sent:
            self.heard.put(silent)


#: An agent must connect within this time, or it counts as missing.
STANDS_WITHIN_S = 120.0
#: The time between two heartbeats where a lost node can be replaced, and how many are sent in a second at most.
QUICK_HEARTBEAT_S, HEARTBEATS_A_SECOND = 0.25, 4000
#: Agents that are asked to leave are gone after this time.
LEAVE_S = 2.0
#: Where ``tcpi_last_ack_recv`` stands in ``tcp_info`` of linux/tcp.h: ms since the other end's last segment.
_LAST_ACK = struct.Struct("=56xI")


@dataclass(frozen=True)
class Endpoint:
    """Where the agents connect, and the secret that they prove. The guard holds it as well.

    So no other process gets the port after a supervisor has died, and the agents find the next supervisor.
    """

    listening: socket.socket
    address: str  #: the address to connect to; empty: the one from which they are started
    secret: bytes
    secret_file: Path
    start: int = 0  #: the number of the start of agents, which they send as they connect

    @property
    def port(self) -> int:
        return int(self.listening.getsockname()[1])

    @staticmethod
    def listen(run: RunDir, hosts: Sequence[str], environ: Mapping[str, str]) -> Endpoint:
        """Listen on the first of ``hosts``, this node, for agents on all of them. Raises OSError."""
        address = job_address(hosts[0], hosts, environ)
        file = run.path / f".agents-{secrets.token_hex(8)}.key"
        advertised = "" if address == wildcard() else address
        return Endpoint(listen(address), advertised, secrets.token_bytes(SECRET_BYTES), file)


class OnFailure(Protocol):
    """Takes a failure of agents, in any thread. ``is_certain``: it holds also for those that are connected."""

    def __call__(self, hosts: Collection[str], why: str, *, is_certain: bool = True) -> None: ...


class AgentStarter(Protocol):
    """Starts agents that connect to ``at``."""

    def start(self, hosts: Sequence[str], at: Endpoint, environ: Mapping[str, str], on_failure: OnFailure) -> None:
        """Start an agent on each of ``hosts`` and return at once. The ranks inherit ``environ``."""

    def note_connected(self, host: str) -> None:
        """Note that the agent of ``host`` has connected. From now on its connection tells whether it lives."""

    def close(self) -> None:
        """End the agents that are left."""


class AgentUser:
    """Has agents work on their nodes. :attr:`Agents.lock` is held by the callers; here the methods do nothing."""

    def agent_connected(self, host: str) -> None:
        """Note that orders can be sent to ``host`` from now on."""

    def take_message(self, host: str, message: messages.Message) -> None:
        """Take a message that :class:`Agents` leaves to its users, as those about processes."""

    def agent_ended(self, host: str, why: str) -> None:
        """Note that the agent of ``host`` has ended. All that it had started has ended, too."""

    def agent_missing(self, host: str, why: str) -> None:
        """Note that no agent could be started on ``host``."""


@dataclass
class _Peer:
    """A connection to an agent, or to a stranger."""

    connection: socket.socket
    link: AuthenticatedConnection
    heard: float  #: when it last sent something, or connected
    host: str | None = None  #: once the peer has named it, and has proved that it knows the secret
    unsent: bytearray = field(default_factory=bytearray)


class Agents:
    """One agent on each node of the job.

    ``silent_hosts`` are those that have sent nothing for ``SILENT_S``, ``heard_hosts`` the others. Not even the kernels
    of ``unsure_hosts`` have answered the last two heartbeats. ``sick_hosts`` tells what is wrong with a node,
    ``usages`` what the job uses there. ``watch_command`` is there where nodes can be replaced: each agent but that of
    the batch host runs what it returns for the address and the port at which agents are awaited, to watch that host.
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
        self.lock = threading.RLock()  #: held by the thread while it takes what has come, and in every method here
        self._peers: dict[str, _Peer] = {}  #: to agents, by host
        self._strangers: set[socket.socket] = set()
        self._max_strangers = limits().most_strangers + len(allocation.hosts)
        self._hosts_by_address: dict[str, str] = {}  #: where an agent has connected from
        self._refused = logs.RateLimitedWarnings(log)
        self._was_opened = self._is_open = False
        self._is_leaving = False  #: agents are meant to leave
        self._all_left = threading.Event()
        self._returning = set[str]()  #: hosts whose agents a dead supervisor may have started; this one has not
        self._returned: SimpleQueue[str] = SimpleQueue()
        self._starting: dict[str, float] = {}  #: the time of the start, by host
        self._start_of: dict[str, int] = {}  #: the number of the last start of each host's agent
        self._missing: dict[str, NodeSilent] = {}  #: why a host has no agent
        # Requests. An answer to one of a dead supervisor's is none to this one's.
        self._numbers = itertools.count(time.time_ns())
        self._requests: dict[int, AgentRequest] = {}  #: those that some agents have not answered
        least_s = HEARTBEAT_S if watch_command is None else QUICK_HEARTBEAT_S
        self.heartbeat_s = min(HEARTBEAT_S, max(least_s, len(allocation.hosts) / HEARTBEATS_A_SECOND))
        self._next_heartbeat = 0.0
        #: In which the nodes watch the batch host. Spares come first: they are idle.
        self._turns = {host: turn for turn, host in enumerate(reversed(allocation.hosts))}
        self.silent_hosts: frozenset[str] = frozenset()
        self.heard_hosts: frozenset[str] = frozenset()
        self.unsure_hosts: frozenset[str] = frozenset()
        self.sick_hosts: Mapping[str, str] = {}
        self.usages: dict[tuple[str, float], Mapping[str, Any]] = {}  #: by host and begin of its agent
        self.environ: Mapping[str, str] = {}  #: the agents' own
        self.listeners: tuple[AgentUser, ...] = ()  #: they hear of each thing before the launcher
        self.has_torch: dict[str, bool] = {}  #: by host: whether torch could be imported there
        self.ready: dict[tuple[str, str], float] = {}  #: when a host's agent was "connected", had "imported" ...

    def listen(self, environ: Mapping[str, str], events: Events, user: AgentUser, *, again: bool = False) -> None:
        """Listen for agents. Those that are started get ``environ``; ``user`` has them work.

        Reports and the thread's errors go into ``events``. With ``again`` agents of an earlier supervisor may return.
        """
        hosts = self._allocation.hosts
        at = self._endpoint or Endpoint.listen(self._run, hosts, environ)
        # One that is there was written by a supervisor that was killed.
        if again and outages.retry_write(lambda: fsio.is_there(at.secret_file), at.secret_file, "read"):
            self._returning |= {*hosts}
        outages.retry_write(lambda: fsio.write_atomic(at.secret_file, at.secret), self._run.path)
        self._at, self._listening = at, at.listening.dup()
        self._events, self._user = events, user
        self.environ = dict(environ)
        self.reports_token = reports.token_of(at.secret)
        self._listening.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._was_opened = self._is_open = True
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Have the agents leave, and end those that are left."""
        if not self._was_opened:
            return
        with self.lock:
            self._is_leaving = True
            self.send_all(messages.LeaveOrder())
            if not self._peers:
                self._all_left.set()
        self._all_left.wait(LEAVE_S)
        self._starter.close()
        self.disconnect()
        with contextlib.suppress(OSError):
            self._at.secret_file.unlink()
        if self._endpoint is None:
            self._at.listening.close()

    def disconnect(self) -> None:
        """Close all connections. The thread ends within a heartbeat."""
        with self.lock:
            self._is_open = False
            for connection in (self._listening, *self._strangers, *(peer.connection for peer in self._peers.values())):
                connection.close()
            self._peers.clear()

    # ------------------------------------------------------------------------------------------------------- starts

    def wait_for_returning(self, hosts: Collection[str], deadline: float) -> None:
        """Wait for the agents of ``hosts`` that may return, until ``deadline`` by time.monotonic()."""
        missing = self._returning & {*hosts}
        with contextlib.suppress(Empty):
            while missing:
                missing.discard(self._returned.get(timeout=max(0.0, deadline - time.monotonic())))

    def ensure(self, hosts: Collection[str]) -> None:
        """Start agents where none runs and none is being started. At first do so on the job's other nodes, too."""
        with self.lock:
            # The spares come in a step of their own: one of them may be why a step is refused.
            for some in [hosts] if self._start_of else [hosts, self._allocation.hosts]:
                wanted = {*some} - self._peers.keys() - self._starting.keys()
                missing = [host for host in self._allocation.hosts if host in wanted]
                if missing:
                    self._start(missing)

    def _start(self, hosts: Sequence[str]) -> None:
        self._starting |= dict.fromkeys(hosts, time.monotonic())
        for host in hosts:
            self._missing.pop(host, None)
        # The number tells this start from earlier ones, also of a supervisor that has died.
        at = replace(self._at, start=time.time_ns())
        self._start_of |= dict.fromkeys(hosts, at.start)
        self._returning -= {*hosts}
        try:
            self._starter.start(hosts, at, self.environ, partial(self._note_failure, at.start))
        except OSError as error:
            self._give_up(hosts, f"agents cannot be started: {error}")

    def _note_failure(self, number: int, hosts: Collection[str], why: str, *, is_certain: bool = True) -> None:
        """Give up the hosts, see :class:`OnFailure`. Ignore those whose agent has been started again since."""
        with self.lock:
            if not self._is_leaving:
                self._give_up([h for h in hosts if self._start_of[h] == number], why, is_certain=is_certain)

    def _give_up(self, hosts: Collection[str], why: str, *, is_certain: bool = True) -> None:
        for host in hosts:
            if is_certain:
                self.drop(host, why)
            # Only a start that was awaited is reported as failed.
            if self._starting.pop(host, None) is None:
                continue
            log.warning("no agent on %s: %s", host, why)
            self._note_missing(NodeSilent(host, why, is_certain))
            self._tell(lambda user, host=host: user.agent_missing(host, why))  # type: ignore[misc]

    # ----------------------------------------------------------------------------------------- messages and requests

    def send(self, host: str, message: messages.Message) -> None:
        """Send ``message`` to the agent of ``host``, if it is connected."""
        with self.lock:
            peer = self._peers.get(host)
            if peer is not None:
                with contextlib.suppress(OSError):  # its end is read a moment later
                    self._send(peer, peer.link.send(message))

    def send_all(self, message: messages.Message) -> None:
        with self.lock:
            for host in list(self._peers):
                self.send(host, message)

    def request(self, orders: Mapping[str, messages.NodeRequest], heard: Events) -> int:
        """Send each host its order as soon as its agent is there. Return the number to withdraw the request by.

        A NodeAnswered or NodeSilent for each host goes into ``heard``, and nothing for a host that hangs.
        """
        with self.lock:
            number = next(self._numbers)
            request = AgentRequest(heard, {host: order.replace(request=number) for host, order in orders.items()})
            unanswered = {n: earlier for n, earlier in self._requests.items() if earlier.orders or earlier.asked}
            self._requests = {**unanswered, number: request}
            for host in orders:
                if host in self._peers:
                    self._ask(host, request)
                elif host not in self._starting:
                    request.end(self._missing.get(host, NodeSilent(host, "it has no agent", is_certain=False)))
            return number

    def withdraw(self, number: int) -> None:
        """Stop listening for the answers to a request."""
        with self.lock:
            self._requests.pop(number, None)

    def ask(self, orders: Mapping[str, messages.NodeRequest], wait_s: float) -> dict[str, messages.RequestAnswered]:
        """Send each host its order, and return the answers by host that come within ``wait_s``.

        Silent and absent hosts are not waited for.
        """
        heard: Events = SimpleQueue()
        awaited = orders.keys() - self.silent_hosts
        number = self.request({host: orders[host] for host in awaited}, heard)
        deadline, answers = time.monotonic() + wait_s, dict[str, messages.RequestAnswered]()
        with contextlib.suppress(Empty):
            for _ in awaited:
                event = heard.get(timeout=max(0.0, deadline - time.monotonic()))
                if isinstance(event, NodeAnswered):
                    answers[event.host] = event.message
        self.withdraw(number)
        return answers

    def ask_for_unanswered(self) -> None:
        """Ask all agents which addresses leave connections unanswered: NodeAnswered in the attempt's queue."""
        self.request(dict.fromkeys(self.heard_hosts, messages.StuckConnectionsOrder()), self._events)

    def _ask(self, host: str, request: AgentRequest) -> None:
        if host in request.orders:
            request.asked[host] = time.time()
            self.send(host, request.orders.pop(host))

    def _note_missing(self, silent: NodeSilent) -> None:
        self._missing[silent.host] = silent
        for request in self._requests.values():
            request.end(silent)

    # ------------------------------------------------------------------------------------------------------ the nodes

    @property
    def hosts(self) -> set[str]:
        with self.lock:
            return set(self._peers)

    def drop(self, host: str, why: str) -> None:
        """Close the connection to the agent of ``host``, if there is one."""
        with self.lock:
            if host in self._peers:
                self._drop(self._peers[host], why)

    def reset_silence(self) -> None:
        """Count the time of silence of all agents from now on."""
        with self.lock:
            for peer in self._peers.values():
                peer.heard = time.monotonic()

    def host_at(self, address: str) -> str | None:
        """Return the host whose agent has connected from ``address``."""
        return self._hosts_by_address.get(plain_address(address))

    def last_sign(self, host: str) -> float:
        """Return when anything last came from ``host``, by time.monotonic().

        Its kernel acknowledges heartbeats also while the agent waits for a CPU. Infinite without a connection.
        """
        peer = self._peers.get(host)
        if peer is None:
            return math.inf
        try:
            info = peer.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_ACK.size)
        except OSError:  # it has just been closed
            return peer.heard
        (silent_ms,) = _LAST_ACK.unpack(info)
        return max(peer.heard, time.monotonic() - float(silent_ms) / 1000)

    def _silent(self, bound_s: float) -> list[str]:
        now = time.monotonic()
        return [host for host, peer in self._peers.items() if now - peer.heard > bound_s]

    # ----------------------------------------------------------------------------------------------------- the thread

    def _serve(self) -> None:
        try:
            while self._is_open:
                ready = self._selector.select(self.heartbeat_s)
                with self.lock:
                    for key, events in ready if self._is_open else ():
                        if not isinstance(key.data, _Peer):
                            self._accept()
                        elif key.data.connection.fileno() >= 0:  # else it was dropped since the select
                            self._serve_peer(key.data, events)
                    self._pass_time()
        except Exception as error:  # no agent is served any more
            self._events.put(error)
            self.disconnect()
        finally:
            self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listening.accept()
            if len(self._strangers) >= self._max_strangers:
                connection.close()
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = _Peer(connection, AuthenticatedConnection(self._at.secret, "supervisor"), time.monotonic())
            self._strangers.add(connection)
            self._selector.register(connection, selectors.EVENT_READ, peer)
            self._send(peer, peer.link.greeting)

    def _serve_peer(self, peer: _Peer, ready: int) -> None:
        try:
            if ready & selectors.EVENT_WRITE:
                self._send(peer, b"")
            if ready & selectors.EVENT_READ:
                data = peer.connection.recv(1 << 16)
                received, answer = peer.link.receive(data)
                self._send(peer, answer)
                for message in received:
                    peer.heard = time.monotonic()
                    self._take(peer, message)
                if not data:
                    self._drop(peer, "its agent has ended")
        except BlockingIOError:
            pass
        except AuthenticationError as error:
            self._refused.warn("a connection that is not an agent's: %s", error)
            self._drop(peer, str(error))
        except OSError as error:
            self._drop(peer, f"its agent cannot be reached: {error.strerror}")

    def _send(self, peer: _Peer, data: bytes) -> None:
        peer.unsent += data
        if peer.unsent:
            with contextlib.suppress(BlockingIOError):
                del peer.unsent[: peer.connection.send(peer.unsent)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.connection, wanted, peer)

    def _drop(self, peer: _Peer, why: str) -> None:
        self._strangers.discard(peer.connection)
        self._selector.unregister(peer.connection)
        peer.connection.close()
        host = peer.host
        if host is None or self._peers.get(host) is not peer:
            return
        del self._peers[host]
        if not self._is_leaving:
            log.warning("node %s: %s", host, why)
            self._note_missing(NodeSilent(host, why, is_certain=False))
            self._tell(lambda user: user.agent_ended(host, why))
        elif not self._peers:
            self._all_left.set()

    def _take(self, peer: _Peer, message: messages.Message) -> None:
        if peer.host is not None:
            self._take_message(peer.host, message)
        # The first message names the host. Until then the peer has only proved that it knows the secret.
        elif isinstance(message, messages.AgentHere):
            host = message.host
            # One that was given up as late would take the place of the agent that was started instead.
            is_wanted = host in self._returning if message.again else message.start == self._start_of.get(host)
            if message.again:
                self._returning.discard(host)
                self._returned.put(host)
            if not is_wanted:
                with contextlib.suppress(OSError):  # it has disconnected already
                    self._send(peer, peer.link.send(messages.LeaveOrder()))
                return
            self._strangers.discard(peer.connection)
            peer.host, self._peers[host] = host, peer
            with contextlib.suppress(OSError):  # it has disconnected again
                self._hosts_by_address[plain_address(peer.connection.getpeername()[0])] = host
            self._starting.pop(host, None)
            self._starter.note_connected(host)
            if self._watch_command is not None and host != self._allocation.hosts[0]:
                command = self._watch_command(self._at.address or self._allocation.hosts[0], self._at.port)
                self.send(host, messages.WatchBatchHostOrder(tuple(command), self._turns[host]))
            for request in self._requests.values():
                self._ask(host, request)
            self._tell(lambda user: user.agent_connected(host))

    def _take_message(self, host: str, message: messages.Message) -> None:
        match message:
            case messages.NodeAlive(progress, usage):
                if progress is not None:
                    self._events.put(Progress(host, progress))
                if usage is not None:
                    self.usages[host, usage["since"]] = usage
            case messages.RanksReporting() | messages.ScriptRankStatus():
                self._events.put(message)
            case messages.MainRankReport(text):
                report = reports.parse(text.encode())
                if report is not None:
                    self._events.put(report)
            case messages.RequestAnswered():
                request = self._requests.get(message.request)
                asked = None if request is None else request.asked.pop(host, None)
                if request is not None and asked is not None:
                    request.heard.put(NodeAnswered(host, message, asked, time.time()))
            case messages.RankWatchEnded():
                what = "the watch for silent ranks has ended: hangs will not be detected"
                log.warning("node %s: %s: see agent-%s.log", host, what, host)
            case messages.NodeSick(what):
                known = self.sick_hosts.get(host)
                self.sick_hosts = {**self.sick_hosts, host: f"{known}, {what}" if known else what}
            case _:  # such as ProcessEnded, which AgentLauncher takes
                self._tell(lambda user: user.take_message(host, message))

    def _tell(self, tell: Callable[[AgentUser], None]) -> None:
        """Tell the listeners and the launcher. A listener that fails is dropped: an error here would end the run."""
        for listener in self.listeners:
            try:
                tell(listener)
            except Exception as error:
                log.error("what is done on the nodes besides the ranks has failed, and hears no more: %r", error)
                self.listeners = tuple(each for each in self.listeners if each is not listener)
        tell(self._user)

    def _pass_time(self) -> None:
        """Send heartbeats, and look who is silent or late. Called every ``heartbeat_s`` or more often."""
        now = time.monotonic()
        if now < self._next_heartbeat or not self._is_open:
            return
        if now > self._next_heartbeat + SILENT_S:  # this process was stopped, perhaps with the whole job
            self.reset_silence()
        self._next_heartbeat = now + self.heartbeat_s
        self.send_all(messages.Heartbeat())
        for key in [*self._selector.get_map().values()] if self._strangers else ():
            peer = key.data
            if isinstance(peer, _Peer) and peer.host is None and peer.heard < now - limits().stranger_s:
                self._drop(peer, "it has not shown that it knows the secret")
        unheard_s = limits().agent_unheard_s
        for host in self._silent(unheard_s):
            self.drop(host, f"its agent has sent nothing for {unheard_s:.0f} s: starting another one")
        self.silent_hosts = frozenset(self._silent(SILENT_S))
        self.heard_hosts = frozenset(self._peers.keys() - self.silent_hosts)
        since = now - 2.5 * self.heartbeat_s
        quiet = self._silent(2.5 * self.heartbeat_s)
        self.unsure_hosts = frozenset(host for host in quiet if self.last_sign(host) < since)
        late = [host for host, since in self._starting.items() if now - since > STANDS_WITHIN_S]
        self._give_up(late, f"no agent has connected from it within {STANDS_WITHIN_S:.0f} s", is_certain=False)
