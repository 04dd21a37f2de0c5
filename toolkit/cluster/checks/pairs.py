"""A small all-reduce by pairs of nodes, and which node is to blame where one fails.

No torch: each of a pair sends an array of doubles over TCP, both add up, and the sums are compared. Every node is
paired with its neighbour and with the node half a ring away, which is enough to tell a node that reaches nobody from
one whose partner is bad.
"""

from __future__ import annotations

import operator
import random
import socket
import struct
import threading
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: 512 KiB: large enough for a network that drops packets to show it, small enough to be over in milliseconds.
COUNT = 2**16
CONNECT_S = 5.0
EXCHANGE_S = 5.0
_CHECKSUM = struct.Struct("!I")
_BYTES = 8 * COUNT
#: In both directions together.
EXCHANGED_BYTES = 2 * _BYTES


def partners(nodes: int) -> list[tuple[int, int]]:
    """Who connects to whom, by place in the list: each node to the next one and to the one half a ring away."""
    directed = [(i, (i + stride) % nodes) for stride in (nodes // 2, 1) for i in range(nodes)]
    return sorted({frozenset(pair): pair for pair in directed if pair[0] != pair[1]}.values())


@dataclass(frozen=True)
class Exchange:
    """How it went with one peer; ``error`` is None where both sums agree."""

    peer: str
    took_s: float
    error: str | None = None


class Adder:
    """Adds up with whoever connects and knows the word; ``address`` and ``port`` are where."""

    def __init__(self, address: str, word: str) -> None:
        self._word = word.encode()
        self._numbers = array("d", (random.random() for _ in range(COUNT)))
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, 0), family=family, backlog=128)
        self.address = address
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def exchange(self, peer: str, address: str, port: int) -> Exchange:
        """With one other node, from its connection to the comparison of both sums."""
        began = time.monotonic()
        try:
            with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
                connection.settimeout(EXCHANGE_S)
                connection.sendall(self._word + self._numbers.tobytes())
                answer = _receive(connection, _BYTES + _CHECKSUM.size)
        except OSError as error:
            return Exchange(peer, time.monotonic() - began, str(error))
        (theirs,) = _CHECKSUM.unpack(answer[_BYTES:])
        agree = theirs == self._sum(answer[:_BYTES])
        return Exchange(peer, time.monotonic() - began, None if agree else "the sums differ: data arrive damaged")

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=[connection], daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(EXCHANGE_S)
            try:
                if _receive(connection, len(self._word)) == self._word:
                    checksum = self._sum(_receive(connection, _BYTES))
                    connection.sendall(self._numbers.tobytes() + _CHECKSUM.pack(checksum))
            except OSError:  # the other side tells
                return

    def _sum(self, others: bytes) -> int:
        theirs = array("d", others)
        return zlib.crc32(array("d", map(operator.add, self._numbers, theirs)).tobytes())


def _receive(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        part = connection.recv(count - len(received))
        if not part:
            raise ConnectionError(f"the connection was closed after {len(received)} of {count} bytes")
        received += part
    return bytes(received)


# --------------------------------------------------------------------------------------------------------- who is it?

Pair = tuple[str, str]


def blame(
    nodes: Sequence[str], worked: Iterable[Pair], failed: Iterable[Pair], trusted: str | None
) -> tuple[list[str], list[Pair]]:
    """The nodes that have to go so that every pair left has worked, and failed pairs of which either may be at fault.

    First those outside the largest group of nodes that reach each other (of two as large, that of ``trusted``, or else
    of the first node). Then, while one node has more of the failures than any other, that node.
    """
    group = _largest_group(nodes, worked, trusted)
    bad, failed = [node for node in nodes if node not in group], list(failed)
    while True:
        left = [pair for pair in failed if not set(pair) & set(bad)]
        worst = Counter(node for pair in left for node in pair).most_common(2)
        if not worst or worst[0][1] == worst[1][1]:
            return bad, left
        bad.append(worst[0][0])


def _largest_group(nodes: Sequence[str], worked: Iterable[Pair], trusted: str | None) -> set[str]:
    groups = [{node} for node in nodes]
    for a, b in worked:
        joined = [group for group in groups if a in group or b in group]
        groups = [*(group for group in groups if group not in joined), set().union(*joined)]
    first = trusted if trusted in nodes else next(iter(nodes), None)
    return max(groups, key=lambda group: (len(group), first in group), default=set())
