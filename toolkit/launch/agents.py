"""The agents of a job's nodes, one on each: started once, by one srun step or on this machine, and there to the end.

Agents and supervisor send each other a heartbeat every second. By it the supervisor sees which nodes are silent, and
the agents see that the batch host is.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from toolkit import fsio, logs
from toolkit.agent.link import HEARTBEAT_S, SECRET_BYTES, SILENT_S, Message
from toolkit.cluster.network import job_address, listen, wildcard
from toolkit.launch import batch_host_watch, patience
from toolkit.launch.agent_links import AgentLinks
from toolkit.launch.allocation import Allocation
from toolkit.launch.steps import Events
from toolkit.rundir import RunDir

#: An agent must stand after so long, or its node counts as one where nothing can be started.
STANDS_WITHIN_S = 120.0
#: Agents that are told to leave are gone after this long.
LEAVE_S = 2.0

log = logs.get(__name__)


class OnFailure(Protocol):
    """What is called when agents cannot be started, or have ended; in any thread."""

    def __call__(self, hosts: Collection[str], why: str, *, is_certain: bool = True) -> None:
        """``is_certain``: also of those that are connected."""


class AgentStarter(Protocol):
    """Starts agents that connect to ``address`` and ``port``; an empty address is where they are started from."""

    def start(
        self,
        hosts: Sequence[str],
        secret_file: Path,
        address: str,
        port: int,
        environ: Mapping[str, str],
        on_failure: OnFailure,
    ) -> None:
        """Start one on each of ``hosts``, with ``environ``, which the ranks inherit, and return at once."""

    def note_connected(self, host: str) -> None:
        """Take that the agent of ``host`` has connected: from now on its connection tells how it does."""

    def close(self) -> None:
        """End what is left of them."""


class AgentUser(Protocol):
    """Has processes started by the agents. All of this is called by the links' thread."""

    def agent_connected(self, host: str) -> None:
        """Orders can be sent to ``host`` from now on."""

    def agent_said(self, host: str, message: Message) -> None:
        """Take what it says of a process."""

    def agent_ended(self, host: str, why: str) -> None:
        """Its processes have ended with it."""

    def agent_missing(self, host: str, why: str) -> None:
        """None could be started there."""


class Agents:
    """One agent on each node of the job.

    ``silent_hosts`` are those of which nothing has been heard for ``SILENT_S``. With ``watch_batch_host`` the agents
    requeue the job when its batch host is gone, see :mod:`toolkit.launch.batch_host_watch`.
    """

    def __init__(
        self, run: RunDir, allocation: Allocation, starter: AgentStarter, *, watch_batch_host: bool = False
    ) -> None:
        self._run, self._allocation, self._starter = run, allocation, starter
        self._watch_batch_host = watch_batch_host
        self._links: AgentLinks | None = None
        self._user: AgentUser | None = None
        self._starting: dict[str, float] = {}  #: since when
        self._start_of: dict[str, int] = {}  #: the number of the last start of each host's agent
        self._next_heartbeat = 0.0
        self._is_closed = threading.Event()
        self._all_left = threading.Event()
        self.silent_hosts: frozenset[str] = frozenset()
        self.environ: Mapping[str, str] = {}  #: the agents' own

    def open(self, environ: Mapping[str, str], events: Events, user: AgentUser | None = None) -> None:
        """Listen for them, with ``environ`` for those that are started. Our own mistakes go into ``events``.

        A ``user`` says which are to be started; without one all are.
        """
        if self._links is not None:
            return
        here, hosts = self._allocation.hosts[0], self._allocation.hosts
        address = job_address(here, hosts, environ)
        self._secret_file = self._run.path / f".agents-{secrets.token_hex(8)}.key"
        secret = secrets.token_bytes(SECRET_BYTES)
        patience.persist(lambda: fsio.write_atomic(self._secret_file, secret), self._run.path)
        listening = listen(address)
        self._address = "" if address == wildcard() else address
        self._port = int(listening.getsockname()[1])
        self.environ, self._events, self._user = dict(environ), events, user
        self._links = AgentLinks(listening, secret, self)
        if user is None:
            self._links.call(lambda: self.ensure(hosts))

    def close(self) -> None:
        """Have them leave, and end what is left of them."""
        if self._links is not None:
            self._links.call(self._leave)
            self._all_left.wait(LEAVE_S)
            self._starter.close()
            with contextlib.suppress(OSError):
                self._secret_file.unlink()

    @property
    def links(self) -> AgentLinks:
        """The connections, once they are open."""
        assert self._links is not None
        return self._links

    # --------------------------------------------------------------------------------------------------- the thread

    def ensure(self, hosts: Collection[str]) -> None:
        """Start agents where none is and none is on its way."""
        there = self.links.hosts | self._starting.keys()
        missing = [host for host in self._allocation.hosts if host in hosts and host not in there]
        if missing:
            self._starting |= dict.fromkeys(missing, time.monotonic())
            number = max(self._start_of.values(), default=0) + 1
            self._start_of |= dict.fromkeys(missing, number)
            on_failure = partial(self._note_failure, number)
            try:
                self._starter.start(missing, self._secret_file, self._address, self._port, self.environ, on_failure)
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
            if self._user is not None:
                self._user.agent_missing(host, why)

    def _order_watch(self, host: str) -> Message:
        """Have ``host`` look after the batch host; spares before the others, for they have nothing else to do."""
        job = self._allocation
        command = batch_host_watch.command(self._run, job, self._address or job.hosts[0], self._port, os.getpid())
        return {"do": "watch", "command": command, "turn": len(job.hosts) - 1 - job.hosts.index(host)}

    # what the links tell

    def agent_came(self, host: str) -> None:
        """See :class:`~toolkit.launch.agent_links.Listener`."""
        self._starting.pop(host, None)
        self._starter.note_connected(host)
        if self._watch_batch_host and host != self._allocation.hosts[0]:
            self.links.send(host, self._order_watch(host))
        if self._user is not None:
            self._user.agent_connected(host)

    def agent_said(self, host: str, message: Message) -> None:
        """See :class:`~toolkit.launch.agent_links.Listener`."""
        if message["is"] != "alive" and self._user is not None:
            self._user.agent_said(host, message)

    def agent_left(self, host: str, why: str) -> None:
        """See :class:`~toolkit.launch.agent_links.Listener`."""
        if self._is_closed.is_set():
            if not self.links.hosts:
                self._all_left.set()
            return
        log.warning("node %s: %s", host, why)
        if self._user is not None:
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
        late = [host for host, since in self._starting.items() if now - since > STANDS_WITHIN_S]
        if late:
            self._give_up(late, f"no agent has come from it within {STANDS_WITHIN_S:.0f} s")
