"""The connection between the supervisor and an agent, without its socket: bytes in, messages out, and the reverse.

Each end sends 32 random bytes first. With both and the job's secret each derives a key for each direction, so no
message of another connection, nor one sent back to its sender, is taken for genuine. Every message is a frame: its
length (4 bytes, network order), its HMAC-SHA256 over a running number and the content (32 bytes), and the content,
a JSON object in UTF-8. Nothing is encrypted: what is secret must not be sent.

Whoever does not know the secret can send no frame that is taken, and learns nothing but that somebody listens here.
"""

from __future__ import annotations

import hmac
import json
import secrets
import struct
from typing import Any

SECRET_BYTES = 32
NONCE_BYTES = 32
TAG_BYTES = 32
#: Both ends say each ``HEARTBEAT_S`` that they live. One of which nothing was heard for ``SILENT_S`` is asked after.
HEARTBEAT_S, SILENT_S = 1.0, 3.0
#: Of the content of a frame. Before the first genuine one a stranger could make us keep this much.
FIRST_MAX_BYTES, MAX_BYTES = 1 << 12, 1 << 24
_HEAD = struct.Struct(f"!I{TAG_BYTES}s")

Message = dict[str, Any]


class StrangerError(Exception):
    """What came was not written by an end that knows the secret: the connection is to be closed."""


class Link:
    """One end of a connection; ``role`` is ``supervisor`` or ``agent``."""

    def __init__(self, secret: bytes, role: str) -> None:
        self._secret, self._role = secret, role
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._received = bytearray()
        self._keys: tuple[bytes, bytes] | None = None  #: for what we send, for what we receive
        self._sent_count = self._received_count = 0
        self._waiting: list[Message] = []

    @property
    def greeting(self) -> bytes:
        """What is to be sent as soon as the connection stands."""
        return self._nonce

    @property
    def is_genuine(self) -> bool:
        """True once the other end has shown that it knows the secret."""
        return self._received_count > 0

    def send(self, message: Message) -> bytes:
        """Return the bytes to send for ``message``; none yet, where the other end's greeting has not come."""
        if self._keys is None:
            self._waiting.append(message)
            return b""
        content = json.dumps(message).encode()
        tag = _tag(self._keys[0], self._sent_count, content)
        self._sent_count += 1
        return _HEAD.pack(len(content), tag) + content

    def receive(self, data: bytes) -> tuple[list[Message], bytes]:
        """Take what has come; return the messages that are complete, and bytes to send now. Raises StrangerError."""
        self._received += data
        answer = b""
        if self._keys is None:
            if len(self._received) < NONCE_BYTES:
                return [], b""
            self._derive_keys(bytes(self._received[:NONCE_BYTES]))
            del self._received[:NONCE_BYTES]
            answer = b"".join(map(self.send, self._waiting))
            self._waiting.clear()
        messages: list[Message] = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages, answer

    def _derive_keys(self, other: bytes) -> None:
        if hmac.compare_digest(other, self._nonce):
            raise StrangerError("our own greeting came back")
        other_role = {"supervisor": "agent", "agent": "supervisor"}[self._role]
        self._keys = (
            hmac.digest(self._secret, self._role.encode() + self._nonce + other, "sha256"),
            hmac.digest(self._secret, other_role.encode() + other + self._nonce, "sha256"),
        )

    def _next(self) -> Message | None:
        assert self._keys is not None
        if len(self._received) < _HEAD.size:
            return None
        length, tag = _HEAD.unpack_from(self._received)
        if length > (MAX_BYTES if self.is_genuine else FIRST_MAX_BYTES):
            raise StrangerError(f"a message of {length} bytes")
        end = _HEAD.size + length
        if len(self._received) < end:
            return None
        content = bytes(self._received[_HEAD.size : end])
        if not hmac.compare_digest(tag, _tag(self._keys[1], self._received_count, content)):
            raise StrangerError("a message with a wrong signature")
        self._received_count += 1
        del self._received[:end]
        message: Message = json.loads(content)
        return message


def _tag(key: bytes, number: int, content: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + content, "sha256")
