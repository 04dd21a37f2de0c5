"""Carries a rank's reports to its node's agent, over an abstract Unix socket.

Each report is one message. An abstract name needs no folder that both sides see, so a rank finds it from inside a
container, too. It is gone as soon as the agent is. Every user of the node may connect to it, and may bind the name when
an agent has ended. Both ends therefore use only what is of their own user; the kernel names the user (SO_PEERCRED,
unix(7)). The agent binds the first of several names that no other user has, and a rank tries them all. A name is known
to others only once an agent has bound it: no name is derived from another one without the job's secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Mapping, Sequence

from toolkit.base import proc_stat
from toolkit.nodes.agent.progress import MAX_BYTES

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


def token_of(secret: bytes) -> str:
    """Return the job's :data:`VARIABLE`. The secret cannot be derived from it."""
    return hmac.digest(secret, b"reports", "sha256").hex()[:32]


def addresses(token: str, environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names that the socket may have on this node. Nodes that share one machine have their own."""
    words = [f"{token} {environ.get('SLURMD_NODENAME', '')} {number}" for number in range(NAMES)]
    return [f"\0toolkit-{hashlib.sha256(os.fsencode(text)).hexdigest()[:32]}" for text in words]


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the user of the process at the other end."""
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

        An earlier agent of this job, which may hold a name, is killed after ``wait_s``, at once if it is stopped: it
        was given up.
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
                stat = proc_stat.read(pid)
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

        Without patience this never waits. The agent of an srun step may start after its ranks. Raises AgentGoneError
        where there was an agent.
        """
        deadline = time.monotonic() + wait_s
        while not self._connect():
            if time.monotonic() >= deadline:
                return False
            time.sleep(_RETRY_S)
        assert self._socket is not None
        # With patience the send may block until the agent reads; without it never does.
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

    def _connect(self) -> bool:
        if self._socket is None:
            self._socket = next(filter(None, map(_connected, self._names)), None)
        return self._socket is not None
