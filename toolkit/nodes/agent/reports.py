"""What a node's ranks report, the agent's digest of it, and the socket that carries it.

A rank reports every second, whether anything is new or not: that is its sign of life. The agent keeps the newest report
of each rank and sends the supervisor one :class:`ProgressSummary` a second.

Each report is one message over an abstract Unix socket: a rank finds its name from inside a container, too, and it is
gone as soon as the agent is. Every user of the node may connect to it, and may bind the name when an agent has ended.
Both ends therefore use only what is of their own user (SO_PEERCRED, unix(7)). The agent binds the first of several
names that no other user has, and a rank tries them all. No name is derived from another one without the job's secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from toolkit.base import procfs
from toolkit.files import records
from toolkit.files.records import JsonRecord

#: A rank that has not reported for this long is stopped or dead, or a library holds Python's lock.
SILENT_S = 5.0
#: Time is counted in looks. The time between two of them counts as at most this long: while the whole job is stopped,
#: by ``scontrol suspend``, no rank could have made progress.
LONGEST_LOOK_S = 2.0
#: A longer report is not delivered.
MAX_BYTES = 1 << 17
#: The variable of a rank from which the names of its job's sockets are made.
VARIABLE = "TOOLKIT_REPORTS"
#: One call of :meth:`Inbox.take` reads no more than this, even if a sender never stops.
MOST_ROUNDS = 1000
#: Another user may bind the name of an agent that has ended. A job's agents on a node can lose this many names.
NAMES = 64
#: Connections that wait to be accepted, of all users.
QUEUE = 4096
_RETRY_S = 0.1
_UCRED = struct.Struct("3i")


@dataclass(frozen=True)
class RankReport:
    """A rank's report on itself. Rank 0 adds what a user sees of the run, and at the end the run's result."""

    attempt: int
    rank: int
    phase: str  #: see :mod:`toolkit.hang`
    step: int | None  #: steps done; None: not even one in this attempt
    count: int
    fields: Mapping[str, Any] | None = None
    result: Mapping[str, Any] | None = None

    def as_bytes(self) -> bytes:
        return json.dumps(vars(self)).encode()


def parse(data: bytes) -> RankReport | None:
    """Return the report in ``data``; None for data that no rank can have written."""
    try:
        return records.decode(RankReport, json.loads(data.decode()))  # json would take UTF-16, too
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True)
class RankProgress(JsonRecord):
    """How far a rank is."""

    rank: int
    phase: str | None  #: None: it has not reported yet
    step: int | None  #: steps done; None: not even one in this attempt
    still_s: float  #: since its step, counter or phase changed last
    is_silent: bool  #: it has sent nothing for ``SILENT_S``


@dataclass(frozen=True)
class ProgressSummary(JsonRecord):
    """The progress of the ranks of one node in an attempt: as long for many ranks as for one."""

    attempt: int
    ranks: int  #: those that have reported
    silent: int  #: of those, the ones that have sent nothing for ``SILENT_S``
    moves: int  #: how often one of them made progress; it only grows
    least: int | None  #: steps done by the rank that has done the fewest; None: one has done none
    most: int | None  #: steps done by the rank that has done the most


@dataclass
class _Rank:
    position: tuple[int | None, int] | None = None  #: step and counter
    phase: str | None = None
    phases: set[str] = field(default_factory=set)  #: the phases that it has been in at this position
    moved: float = 0.0
    heard: float = 0.0


class NodeProgress:
    """The newest report of each rank of one node.

    A rank makes progress when its step or its counter changes, or when it enters a phase that it has not been in since:
    not if it only cycles through phases.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._looked, self._now = clock(), 0.0
        self._attempt, self._moves = 0, 0
        self._ranks: dict[int, _Rank] = {}

    def on_report(self, report: RankReport) -> bool:
        """Take a report. True if it is its rank's first in this attempt. Earlier attempts' reports are ignored."""
        self._pass_time()
        if report.attempt < self._attempt:
            return False
        if report.attempt > self._attempt:
            self._attempt, self._moves, self._ranks = report.attempt, 0, {}
        is_first = report.rank not in self._ranks
        rank = self._ranks.setdefault(report.rank, _Rank())
        rank.heard = self._now
        phase, position = report.phase, (report.step, report.count)
        # A phase counts as progress only once at each position.
        if (phase, position) != (rank.phase, rank.position):
            rank.moved = self._now
            if position != rank.position:
                rank.phases.clear()
            self._moves += phase not in rank.phases
            rank.phases.add(phase)
            rank.phase, rank.position = phase, position
        return is_first

    def summarize(self) -> ProgressSummary | None:
        """Return the progress of all ranks; None before the first report. Call it every ``LONGEST_LOOK_S`` or so."""
        self._pass_time()
        if not self._ranks:
            return None
        steps = [rank.position[0] for rank in self._ranks.values() if rank.position]
        done = [step for step in steps if step is not None]
        least = min(done) if len(done) == len(steps) else None
        silent = sum(map(self._is_silent, self._ranks.values()))
        return ProgressSummary(self._attempt, len(steps), silent, self._moves, least, max(done, default=None))

    def of_rank(self, attempt: int, rank: int) -> RankProgress | None:
        """Return where ``rank`` stands now; None where it has not reported in ``attempt``."""
        self._pass_time()
        known = self._ranks.get(rank) if attempt == self._attempt else None
        if known is None or known.position is None:
            return None
        return RankProgress(rank, known.phase, known.position[0], self._now - known.moved, self._is_silent(known))

    def _is_silent(self, rank: _Rank) -> bool:
        return self._now - rank.heard > SILENT_S

    def _pass_time(self) -> None:
        now = self._clock()
        self._now += min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now


def token_of(secret: bytes) -> str:
    """Return the job's :data:`VARIABLE`. The secret cannot be derived from it."""
    return hmac.digest(secret, b"reports", "sha256").hex()[:32]


def addresses(token: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names that the socket may have on this node. Nodes that share one machine have their own."""
    words = [f"{token} {environ.get('SLURMD_NODENAME', '')} {number}" for number in range(NAMES)]
    return [f"\0toolkit-{hashlib.sha256(os.fsencode(text)).hexdigest()[:32]}" for text in words]


def _peer(connection: socket.socket) -> tuple[int, int]:
    pid, user, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, user


def _connected(name: str) -> socket.socket | None:
    """Return a connection to a socket of this user's. None without one, or while its queue is full."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.setblocking(False)
    with contextlib.suppress(OSError):
        connection.connect(name)
        if _peer(connection)[1] == os.geteuid():
            return connection
    connection.close()
    return None


class Inbox:
    """The agent's end. A selector may wait until it is readable, and then :meth:`take` the messages."""

    def __init__(self, names: Sequence[str], wait_s: float = 0.0) -> None:
        """Bind the first of ``names`` that no other user has. Raises OSError where there is none.

        An earlier agent of this job that has a name was given up: it is killed after ``wait_s``, if stopped at once.
        """
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        deadline = time.monotonic() + wait_s
        try:
            self._bind(list(names), deadline)
        except OSError:
            self._listening.close()
            raise
        self._listening.listen(QUEUE)
        self._listening.setblocking(False)
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)

    def _bind(self, names: list[str], deadline: float) -> None:
        for name in names:
            while True:
                try:
                    self._listening.bind(name)
                    return
                except OSError as error:
                    taken = error
                earlier = _connected(name)
                if earlier is None:  # it is another user's
                    break
                with earlier:
                    pid, _ = _peer(earlier)
                # An earlier agent leaves as soon as it notices that it was given up, unless it is stopped.
                stat = procfs.read(pid)
                if time.monotonic() >= deadline or (stat is not None and stat.state in "Tt"):
                    if pid in (0, os.getpid()):  # 0: of another pid namespace
                        raise taken
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(_RETRY_S)
        raise taken

    def fileno(self) -> int:
        return self._selector.fileno()

    def take(self) -> list[bytes]:
        """Return the messages that have arrived, those of each rank in their order."""
        messages: list[bytes] = []
        for _ in range(MOST_ROUNDS):
            ready = self._selector.select(0)
            if not ready:
                break
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj is self._listening:
                    self._accept()
                else:
                    messages += self._read(key.fileobj)
        return messages

    def close(self) -> None:
        """Close all connections, so that the ranks notice that the agent is gone."""
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listening.accept()
        except OSError:  # it has disconnected already, or there are too many open files
            return
        if _peer(connection)[1] != os.geteuid():  # only this user's processes may report
            connection.close()
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> list[bytes]:
        try:
            message = connection.recv(MAX_BYTES)
        except BlockingIOError:
            return []
        except OSError:
            message = b""
        if message:
            return [message]
        self._selector.unregister(connection)
        connection.close()
        return []


class AgentGoneError(Exception):
    """The agent that took the reports has ended."""


class Outbox:
    """A rank's end; for one thread."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._socket: socket.socket | None = None

    def send(self, message: bytes, wait_s: float = 0.0) -> bool:
        """Send a message of at most ``MAX_BYTES``. Return False where the agent does not take it within ``wait_s``.

        The agent of an srun step may start after its ranks. Raises AgentGoneError where there was an agent.
        """
        deadline = time.monotonic() + wait_s
        while self._socket is None:
            self._socket = next(filter(None, map(_connected, self._names)), None)
            if self._socket is None:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_RETRY_S)
        if wait_s:
            self._socket.settimeout(max(0.0, deadline - time.monotonic()))
        try:
            self._socket.send(message)
        except (BlockingIOError, TimeoutError):
            return False
        except ConnectionError as error:
            raise AgentGoneError from error
        finally:
            if wait_s:
                self._socket.setblocking(False)
        return True

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
