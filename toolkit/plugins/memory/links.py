"""Files in memory sent from one rank to another: plain TCP, the file's bytes unchanged.

A process group does not fit: gloo connects each rank with every other at each start, NCCL takes nothing from host
memory, and a thread that waits inside of either cannot be ended when its peer has died. The agents do not fit either:
they must answer the supervisor each second, and do not know when a rank's file is complete.

A receiver listens on the network of the ranks. Its address, and a token that proves a sender to be a rank, are
published in the store that the ranks share. A sender begins with the token. Then it sends each file: a head, all
tensors, and the description. The receiver answers with one byte as soon as its copy is complete.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from toolkit.base import logs
from toolkit.checkpoint.manifest import IN_MEMORY
from toolkit.nodes.agent.connections import notice_death
from toolkit.plugins.memory.files import START, MemoryFile, Role
from toolkit.slurm import network

_TOKEN_BYTES = 32
_HEAD = struct.Struct("<BQI")  #: the role, the end of the tensors, the size of the description
_DONE = b"\x01"
#: Bytes received by one call: few calls, because each one waits for the interpreter lock.
_PIECE_BYTES = 1 << 24
#: Seconds in which a token must come: a peer that sends none is not a rank.
_TOKEN_S = 10.0
#: Seconds without an answer from a peer until it counts as dead.
_GONE_S = 60

log = logs.get(__name__)


#: Called with the role of a file: when it begins to come, to get its place, and when it is complete.
Place = Callable[[Role], MemoryFile]
Arrived = Callable[[Role], None]


class Receiver:
    """Receives the files that other ranks send, in a thread for each of them."""

    def __init__(self, address: str, place: Place, arrived: Arrived) -> None:
        self._place, self._arrived = place, arrived
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listening = network.listen(address)
        _start_thread(self._accept)

    @property
    def address(self) -> dict[str, Any]:
        """Return what a sender needs: host, port and token."""
        host, port = self._listening.getsockname()[:2]
        return {"host": host, "port": port, "token": self._token.hex()}

    def close(self) -> None:
        """Accept no further connections."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # close() ends the loop
            while True:
                connection, _ = self._listening.accept()
                _start_thread(partial(self._serve, connection))

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                # A peer must first prove that it is a rank.
                connection.settimeout(_TOKEN_S)
                if not hmac.compare_digest(_exactly(connection, _TOKEN_BYTES), self._token):
                    return
                connection.settimeout(None)
                notice_death(connection, _GONE_S)
                while True:
                    self._take(connection)
                    connection.sendall(_DONE)
            except EOFError:
                pass  # the sender has ended, or has nothing more to send
            except OSError as error:
                log.warning("a copy of another rank's state did not come: %s", error)

    def _take(self, connection: socket.socket) -> None:
        role, end, described_bytes = _HEAD.unpack(_exactly(connection, _HEAD.size))
        file = self._place(Role(role))
        # The old content becomes invalid here, and valid again only with the last byte.
        file.open(end)
        _fill(connection, file.tensors(end))
        file.seal(_exactly(connection, described_bytes), end)
        self._arrived(Role(role))


class Sender:
    """A connection that sends files to one rank."""

    def __init__(self, address: Mapping[str, Any]) -> None:
        """Connect to the rank whose receiver published ``address``. Raises OSError."""
        self._connection = socket.create_connection((address["host"], address["port"]), timeout=_GONE_S)
        self._connection.settimeout(None)
        notice_death(self._connection, _GONE_S)
        self._connection.sendall(bytes.fromhex(address["token"]))

    def send(self, file: MemoryFile, role: Role) -> None:
        """Send a complete file, and wait until the copy is complete. Raises OSError or EOFError."""
        extent = file.extent()
        assert extent is not None
        end, described_bytes = extent
        self._connection.sendall(_HEAD.pack(role, end, described_bytes))
        with (IN_MEMORY / file.name).open("rb") as source:
            self._connection.sendfile(source, START, end - START + described_bytes)
        _exactly(self._connection, len(_DONE))

    def close(self) -> None:
        """End the connection, and with it a call of :meth:`send` in another thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _start_thread(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name="toolkit-memory", daemon=True).start()


def _exactly(connection: socket.socket, size_bytes: int) -> bytes:
    """Return exactly ``size_bytes`` bytes. Raises EOFError where the other end has closed."""
    data = bytearray(size_bytes)
    _fill(connection, memoryview(data))
    return bytes(data)


def _fill(connection: socket.socket, place: memoryview) -> None:
    done = 0
    while done < len(place):
        got = connection.recv_into(place[done : done + _PIECE_BYTES], 0, socket.MSG_WAITALL)
        if not got:
            raise EOFError("the other rank has closed the connection")
        done += got
