"""The protocol between two processes of a job: bytes in, messages out, and the reverse. The caller has the socket.

Each end sends 32 random bytes first. From both and the job's secret each derives a key for each direction, so no
message of another connection, nor one sent back to its sender, is accepted. Every message is a frame: its length (4
bytes, network order), its HMAC-SHA256 over a running number and the content (32 bytes), and the content, JSON in UTF-8,
see :mod:`.messages`. Nothing is encrypted: secrets must not be sent. A peer without the secret learns only that a
process listens here.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import secrets
import socket
import struct
from pathlib import Path

from toolkit.files.records import SchemaError
from toolkit.nodes.agent import messages
from toolkit.nodes.agent.messages import Message

SECRET_BYTES = 32
NONCE_BYTES = 32
TAG_BYTES = 32
#: Both ends send a heartbeat every ``HEARTBEAT_S``. An end that has sent nothing for ``SILENT_S`` is checked.
HEARTBEAT_S, SILENT_S = 1.0, 3.0
#: The most bytes of a frame's content. Before the first genuine one a stranger could make this end keep that much.
FIRST_MAX_BYTES, MAX_BYTES = 1 << 12, 1 << 24
_HEAD = struct.Struct(f"!I{TAG_BYTES}s")
#: The other end's role, by the role of one end.
_OTHER_ROLE = {"supervisor": "agent", "agent": "supervisor"}


class AuthenticationError(Exception):
    """The data was not written by an end that knows the secret. The connection is to be closed."""


class AuthenticatedConnection:
    """One end of a connection; ``role`` is ``supervisor`` or ``agent``."""

    def __init__(self, secret: bytes, role: str) -> None:
        self._secret, self._role = secret, role
        self.greeting = secrets.token_bytes(NONCE_BYTES)  #: to be sent as soon as the connection stands
        self._received = bytearray()
        self._keys: tuple[bytes, bytes] | None = None  #: for sending, for receiving
        self._sent_count = self._received_count = 0
        self._waiting: list[Message] = []

    @property
    def is_genuine(self) -> bool:
        """True once the other end has proved that it knows the secret."""
        return self._received_count > 0

    def send(self, message: Message) -> bytes:
        """Return the bytes to send now; none before the other end's greeting: :meth:`receive` returns them then."""
        if self._keys is None:
            self._waiting.append(message)
            return b""
        content = messages.encoded(message)
        tag = _tag(self._keys[0], self._sent_count, content)
        self._sent_count += 1
        return _HEAD.pack(len(content), tag) + content

    def receive(self, data: bytes) -> tuple[list[Message], bytes]:
        """Take received data; return the messages that are complete, and bytes to send now. Raises StrangerError."""
        self._received += data
        answer = b""
        # The greeting comes first; it makes the keys, and so the messages that wait for them can go.
        if self._keys is None:
            if len(self._received) < NONCE_BYTES:
                return [], b""
            other = bytes(self._received[:NONCE_BYTES])
            if hmac.compare_digest(other, self.greeting):
                raise AuthenticationError("our own greeting came back")
            other_role = _OTHER_ROLE[self._role]
            self._keys = (
                hmac.digest(self._secret, self._role.encode() + self.greeting + other, "sha256"),
                hmac.digest(self._secret, other_role.encode() + other + self.greeting, "sha256"),
            )
            del self._received[:NONCE_BYTES]
            answer = b"".join(map(self.send, self._waiting))
            self._waiting.clear()
        received: list[Message] = []
        while (content := self._next()) is not None:
            try:
                received.append(messages.decoded(content))
            except SchemaError as error:  # the other end is of another version of the toolkit
                raise AuthenticationError(str(error)) from None
        return received, answer

    def _next(self) -> bytes | None:
        assert self._keys is not None
        if len(self._received) < _HEAD.size:
            return None
        # The length is checked before the content is awaited: a stranger could fill the memory.
        length, tag = _HEAD.unpack_from(self._received)
        if length > (MAX_BYTES if self.is_genuine else FIRST_MAX_BYTES):
            raise AuthenticationError(f"a message of {length} bytes")
        end = _HEAD.size + length
        if len(self._received) < end:
            return None
        # The running number in the tag rejects frames that are repeated or out of order.
        content = bytes(memoryview(self._received)[_HEAD.size : end])
        if not hmac.compare_digest(tag, _tag(self._keys[1], self._received_count, content)):
            raise AuthenticationError("a message with a wrong signature")
        self._received_count += 1
        del self._received[:end]
        return content


def _tag(key: bytes, number: int, content: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + content, "sha256")


#: From include/net/tcp_states.h.
_SYN_SENT = "02"


def unanswered(net: Path = Path("/proc/net")) -> set[str]:
    """Return the addresses from which this node's TCP connections have had no first answer for a second or longer."""
    addresses = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # a kernel without IPv6
            for line in (net / name).read_text().splitlines()[1:]:
                fields = line.split()  # 2: remote address and port; 3: state; 6: how often the kernel has tried again
                # A request that was sent again has waited for a second or longer.
                if fields[3] == _SYN_SENT and int(fields[6], 16) > 0:
                    # The kernel writes an address as hexadecimal 32-bit words in its own byte order.
                    text = fields[2].partition(":")[0]
                    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
                    addresses.add(str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))))
    return addresses


def enable_keepalive(connection: socket.socket, within_s: int) -> None:
    """Have a TCP connection fail when its other end has not answered for ``within_s``. A dead node closes none."""
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, within_s * 1000),  # also bounds the keepalives, see tcp(7)
    ):
        connection.setsockopt(level, option, value)
