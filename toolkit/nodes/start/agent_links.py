"""The supervisor's connections to the agents, served by a thread of their own."""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING

from toolkit.base import logs
from toolkit.nodes.agent.link import AuthenticatedLink, Message, StrangerError
from toolkit.slurm.network import plain_address

if TYPE_CHECKING:
    from toolkit.nodes.start.agents import Agents

#: A connection that has not proved within this time that it knows the secret is closed.
STRANGER_S = 10.0
#: Unproved connections beside one of each agent that may connect; more are closed at once.
MAX_STRANGERS = 256
#: Where ``tcpi_last_ack_recv`` stands in ``tcp_info`` of linux/tcp.h: ms since the other end's last segment.
_LAST_ACK = struct.Struct("=56xI")

log = logs.get(__name__)


@dataclass
class _Peer:
    """A connection to an agent, or to a stranger."""

    connection: socket.socket
    link: AuthenticatedLink
    heard: float  #: when it last sent something, or connected
    host: str | None = None  #: once the peer has named it, and has proved that it knows the secret
    unsent: bytearray = field(default_factory=bytearray)


class AgentLinks:
    """One connection to the agent of each host. All methods except ``call`` belong to the thread.

    The thread tells ``listener`` what happens.
    """

    def __init__(self, listening: socket.socket, secret: bytes, listener: Agents, hosts: int) -> None:
        """Take the listening socket. ``hosts``: how many agents may connect, all of them at once."""
        self._max_strangers = MAX_STRANGERS + hosts
        self._listening, self._secret, self._listener = listening, secret, listener
        self._peers: dict[str, _Peer] = {}
        self.addresses: dict[str, str] = {}  #: the host by address, for those from which an agent has connected
        self._strangers: set[socket.socket] = set()
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for end, what in ((listening, self._accept), (self._woken, self._carry_out_calls)):
            end.setblocking(False)
            self._selector.register(end, selectors.EVENT_READ, what)
        self._waker.setblocking(False)
        self._is_closed = False
        self._refused = logs.SparseWarnings(log)

    def start(self) -> None:
        """Begin to serve connections."""
        threading.Thread(target=self._serve, daemon=True).start()

    def call(self, what: Callable[[], None]) -> None:
        """Have the thread do ``what``: no other method here may be called by two threads."""
        self._calls.put(what)
        with contextlib.suppress(OSError):  # it is full, so the thread wakes anyway; or it is closed
            self._waker.send(b"x")

    def close(self) -> None:
        """End the thread and its connections. To be called in the thread."""
        self._is_closed = True

    @property
    def hosts(self) -> set[str]:
        """The hosts whose agents are connected."""
        return set(self._peers)

    def send(self, host: str, message: Message) -> None:
        """Send ``message`` to the agent of ``host``, if it is connected."""
        peer = self._peers.get(host)
        if peer is not None:
            with contextlib.suppress(OSError):  # its end is read a moment later
                self._send(peer, peer.link.send(message))

    def send_all(self, message: Message) -> None:
        """Send ``message`` to every agent that is connected."""
        for host in self.hosts:
            self.send(host, message)

    def drop(self, host: str, why: str) -> None:
        """Close the connection to the agent of ``host``, if there is one."""
        if host in self._peers:
            self._drop(self._peers[host], why)

    def hear_all(self) -> None:
        """Count the time of silence of all agents from now on."""
        for peer in self._peers.values():
            peer.heard = time.monotonic()

    def silent(self, bound_s: float) -> list[str]:
        """Return the hosts whose agents have sent nothing for ``bound_s``."""
        now = time.monotonic()
        return [host for host, peer in self._peers.items() if now - peer.heard > bound_s]

    def last_sign(self, host: str) -> float:
        """Return when anything last came from ``host``, by time.monotonic(); in any thread.

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

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                for key, ready in self._selector.select(self._listener.heartbeat_s):
                    if not isinstance(key.data, _Peer):
                        key.data()
                    elif key.data.connection.fileno() >= 0:  # else a call has dropped it since the select
                        self._serve_peer(key.data, ready)
                # Strangers that have proved nothing in time are closed.
                long_ago = time.monotonic() - STRANGER_S
                for key in [*self._selector.get_map().values()] if self._strangers else ():
                    peer = key.data
                    if isinstance(peer, _Peer) and peer.host is None and peer.heard < long_ago:
                        self._drop(peer, "it has not shown that it knows the secret")
                self._listener.time_passed()
        except Exception as error:
            self._listener.broke(error)
        finally:
            self._selector.close()
            for end in (self._listening, self._waker, self._woken, *self._strangers):
                end.close()
            for peer in self._peers.values():
                peer.connection.close()

    def _carry_out_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while not self._calls.empty():
            self._calls.get()()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listening.accept()
            if len(self._strangers) >= self._max_strangers:
                connection.close()
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer = _Peer(connection, AuthenticatedLink(self._secret, "supervisor"), time.monotonic())
            self._strangers.add(connection)
            self._selector.register(connection, selectors.EVENT_READ, peer)
            self._send(peer, peer.link.greeting)

    def _serve_peer(self, peer: _Peer, ready: int) -> None:
        try:
            # First what could not be sent before, then what has come in.
            if ready & selectors.EVENT_WRITE:
                self._send(peer, b"")
            if ready & selectors.EVENT_READ:
                data = peer.connection.recv(1 << 16)
                messages, answer = peer.link.receive(data)
                self._send(peer, answer)
                for message in messages:
                    peer.heard = time.monotonic()
                    self._take(peer, message)
                if not data:
                    self._drop(peer, "its agent has ended")
        except BlockingIOError:
            pass
        except StrangerError as error:
            self._refused.warn("a connection that is no agent's: %s", error)
            self._drop(peer, str(error))
        except OSError as error:
            self._drop(peer, f"its agent cannot be reached: {error.strerror}")

    def _send(self, peer: _Peer, data: bytes) -> None:
        peer.unsent += data
        if peer.unsent:
            with contextlib.suppress(BlockingIOError):
                del peer.unsent[: peer.connection.send(peer.unsent)]
        # What the socket did not take is sent when it is writable again.
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.unsent else 0)
        self._selector.modify(peer.connection, wanted, peer)

    def _take(self, peer: _Peer, message: Message) -> None:
        if peer.host is not None:
            self._listener.take_message(peer.host, message)
        # The first message names the host. Until then the peer has only proved that it knows the secret.
        elif message["is"] == "here":
            if not self._listener.admits(str(message["host"]), message):
                with contextlib.suppress(OSError):  # it has disconnected already
                    self._send(peer, peer.link.send({"do": "leave"}))
                return
            self._strangers.discard(peer.connection)
            peer.host = str(message["host"])
            self._peers[peer.host] = peer
            with contextlib.suppress(OSError):  # it has disconnected again
                self.addresses[plain_address(peer.connection.getpeername()[0])] = peer.host
            self._listener.agent_came(peer.host)

    def _drop(self, peer: _Peer, why: str) -> None:
        self._strangers.discard(peer.connection)
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.host is not None and self._peers.get(peer.host) is peer:
            del self._peers[peer.host]
            self._listener.agent_left(peer.host, why)
