"""``python -m toolkit.plugins.staging.relay``: copy packages to this node, pass them on, and keep them.

The copies are on a disk of this node, and other nodes take packages from it. The nodes form a tree. The first reads the
shared disk. Each other takes a package from the node above it while that one still receives it. Where a node above is
gone, hangs or has no such package, the next one above is asked for the rest, and at last the shared disk is read. Both
ends of a connection prove that they know the job's secret.

It reads a :class:`RelayRequest` as JSON, prints ``{"copies", "problems", "damaged", "took_s"}``, and then holds the
locks of the copies until it is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.base import logs, this_node
from toolkit.files import records
from toolkit.files.json_record import JsonRecord
from toolkit.files.records import COUNT, TEXT, Record
from toolkit.nodes.agent.link import AuthenticatedLink, StrangerError
from toolkit.plugins.staging import copying, room
from toolkit.plugins.staging.copying import CopyRequest, DamagedPackageError
from toolkit.plugins.staging.package import Package, StagingError

#: A node answers a connection within this time.
CONNECT_S = 3.0
#: A node that sends nothing for so long, for each node above the one that waits, hangs. A node further down waits
#: longer, so that it is the one below the hanging one that looks elsewhere. Nor may sending a block take that long.
STALL_S = 5.0
#: Nodes that come late are served for this long.
LINGER_S = 30.0
MOST_CONNECTIONS = 64
#: A node passes on what it has of a package in pieces of this size: each hop takes as long as one piece.
PIECE_BYTES = 1 << 18
_ASKED = Record({"key": TEXT, "position": COUNT})

log = logs.get(__name__)


@dataclass(frozen=True)
class NodeAddress(JsonRecord):
    """Where a node's agent takes connections of other nodes."""

    address: str
    port: int


@dataclass(frozen=True)
class RelayRequest(JsonRecord):
    """What to copy, and from where. ``above``: the next node first. ``is_above``: other nodes may ask this one."""

    request: CopyRequest
    above: tuple[NodeAddress, ...]
    is_above: bool
    secret: str  #: the job's, in hexadecimal
    channel: int  #: a socket, from which connections of other nodes come as file descriptors


class RelayPeer:
    """A connection to another node. What arrives was sent by a process that knows the secret."""

    def __init__(self, connection: socket.socket, secret: bytes, role: str) -> None:
        """Take an end of it, see :class:`AuthenticatedLink`. All methods raise OSError or StrangerError."""
        self._connection, self._link = connection, AuthenticatedLink(secret, role)
        self._arrived: deque[bytes] = deque()
        connection.sendall(self._link.greeting)

    def send(self, content: bytes) -> None:
        """Send ``content``, as soon as the other end has sent something."""
        self._connection.sendall(self._link.send_content(content))

    def receive(self) -> bytes:
        """Return what the other end has sent next."""
        while not self._arrived:
            data = self._connection.recv(PIECE_BYTES)
            if not data:
                raise ConnectionError("the other node has closed the connection")
            contents, answer = self._link.receive_contents(data)
            self._connection.sendall(answer)
            self._arrived += contents
        return self._arrived.popleft()


def received(package: Package, above: Sequence[NodeAddress], secret: bytes) -> Iterator[bytes]:
    """Yield the bytes of ``package`` from the nodes ``above``. The rest is read from the shared disk."""
    position = 0
    for node in above:
        try:
            with socket.create_connection((node.address, node.port), CONNECT_S) as connection:
                connection.settimeout(STALL_S * len(above))
                peer = RelayPeer(connection, secret, "taker")
                peer.send(json.dumps({"key": package.key, "position": position}).encode())
                peer.receive()  # it has the package
                while position < package.size_bytes:
                    data = peer.receive()
                    position += len(data)
                    yield data
            return
        except (OSError, StrangerError) as error:
            log.info("%s, from byte %d: not from %s: %s", package.source, position, node.address, error)
    yield from copying.from_disk(package, position)


class Spool:
    """A file without a name for what is received. It is read from its beginning while it still grows."""

    def __init__(self, blocks: Iterator[bytes], folder: Path) -> None:
        """Receive ``blocks`` in a thread. Raises OSError."""
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._grown = threading.Condition()
        self._size, self._is_over = 0, False
        self._error: Exception | None = None
        threading.Thread(target=self._fill, args=[blocks], daemon=True).start()

    def _fill(self, blocks: Iterator[bytes]) -> None:
        error: Exception | None = None
        try:
            for data in blocks:
                self._file.write(data)
                self._file.flush()
                with self._grown:
                    self._size += len(data)
                    self._grown.notify_all()
        except Exception as caught:
            error = caught
        with self._grown:
            self._error, self._is_over = error, True
            self._grown.notify_all()

    def blocks(self, position: int) -> Iterator[bytes]:
        """Yield what is in the file from ``position`` on, as it arrives. Raises what receiving it has raised."""
        while (size := self._size_above(position)) > position:
            data = os.pread(self._file.fileno(), min(PIECE_BYTES, size - position), position)
            position += len(data)
            yield data

    def _size_above(self, position: int) -> int:
        with self._grown:
            self._grown.wait_for(lambda: self._size > position or self._is_over)
            if self._error is not None and self._size <= position:
                raise self._error
            return self._size


class Relay:
    """Receives packages, and passes them on to the nodes that ask for them."""

    def __init__(self, request: RelayRequest) -> None:
        """Begin to serve connections."""
        self._request, self._secret = request, bytes.fromhex(request.secret)
        self._keys = {package.key for package in request.request.packages}
        self._spools: dict[str, Spool | None] = {}  #: None: this node does not pass it on
        self._is_known = threading.Condition()
        self._connections: set[socket.socket] = set()
        channel = socket.socket(fileno=request.channel)
        channel.set_inheritable(False)
        threading.Thread(target=self._accept, args=[channel], daemon=True).start()

    def copy(self, package: Package, folders: list[Path]) -> copying.Copy:
        """Do what :func:`.copying.copy` does. Raises the same."""
        try:
            return copying.copy(package, folders, self._receive)
        except DamagedPackageError:
            if not self._request.above:
                raise
            log.warning("%s: what another node has sent is damaged: reading the shared disk", package.source)
            self._note(package, None)
            return copying.copy(package, folders)
        finally:
            self._note(package, self._spools.get(package.key))

    def linger(self) -> None:
        """Serve nodes that come late, and return when none is served any more."""
        if any(self._spools.values()):
            time.sleep(LINGER_S)
            while self._connections:
                time.sleep(1)

    def _receive(self, package: Package, own: Path) -> Iterator[bytes]:
        blocks = received(package, self._request.above, self._secret)
        needed = copying.needed_bytes(package) + package.size_bytes
        if not self._request.is_above or room.room_bytes(own) < needed:
            return blocks
        spool = Spool(blocks, own)
        self._note(package, spool)
        return spool.blocks(0)

    def _note(self, package: Package, spool: Spool | None) -> None:
        with self._is_known:
            self._spools[package.key] = spool
            self._is_known.notify_all()

    def _accept(self, channel: socket.socket) -> None:
        while handles := socket.recv_fds(channel, 1, 1, socket.MSG_CMSG_CLOEXEC)[1]:
            connection = socket.socket(fileno=handles[0])
            if len(self._connections) < MOST_CONNECTIONS:
                self._connections.add(connection)
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, StrangerError):
                connection.settimeout(STALL_S)
                self._give(RelayPeer(connection, self._secret, "giver"))
        finally:
            self._connections.discard(connection)

    def _give(self, peer: RelayPeer) -> None:
        asked = records.fit(json.loads(peer.receive()), _ASKED)
        key = asked["key"]
        with self._is_known:
            self._is_known.wait_for(lambda: key in self._spools or key not in self._keys)
            spool = self._spools.get(key)
        if spool is not None:
            peer.send(b"")
            for data in spool.blocks(asked["position"]):
                peer.send(data)


def main() -> None:
    """Copy what the request names, then hold the copies."""
    logs.setup("copying")
    request = RelayRequest.from_json(json.load(sys.stdin))
    os.nice(request.request.nice)
    relay = Relay(request)
    folders = this_node.own_folders(request.request.stage_dir, os.environ)
    copies: dict[str, str] = {}
    problems: list[str] = []
    damaged: list[str] = []
    locks: list[int] = []
    began, is_new = time.monotonic(), False
    for package in request.request.packages:
        try:
            made = relay.copy(package, folders)
        except (StagingError, OSError) as error:
            problems.append(f"{package.source}: {error}")
            damaged += [package.key] if isinstance(error, DamagedPackageError) else []
            continue
        copies[package.source] = str(made.path)
        locks += made.locks
        is_new |= made.is_new
    took_s = time.monotonic() - began if is_new else 0.0
    print(json.dumps({"copies": copies, "problems": problems, "damaged": damaged, "took_s": took_s}), flush=True)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # its end tells the agent that the answer is complete
    relay.linger()
    if locks:
        copying.hold(locks)


if __name__ == "__main__":
    main()
