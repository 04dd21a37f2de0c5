"""TCP connections whose other end does not answer."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from pathlib import Path

#: From include/net/tcp_states.h.
_SYN_SENT = "02"


def unanswered(net: Path = Path("/proc/net")) -> set[str]:
    """Return the addresses from which this node's TCP connections get no first answer.

    The connections have waited for a second or longer. By the columns of ``/proc/net/tcp``: remote address and port,
    state, and how often the kernel has tried again.
    """
    addresses = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):  # a kernel without IPv6
            for line in (net / name).read_text().splitlines()[1:]:
                fields = line.split()
                # A request that was sent again has waited for a second or longer.
                if fields[3] == _SYN_SENT and int(fields[6], 16) > 0:
                    # The kernel writes an address as hexadecimal 32-bit words in its own byte order.
                    text = fields[2].partition(":")[0]
                    words = [int(text[start : start + 8], 16) for start in range(0, len(text), 8)]
                    addresses.add(str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))))
    return addresses


def notice_death(connection: socket.socket, within_s: int) -> None:
    """Have a TCP connection fail when its other end has not answered for ``within_s``.

    Small messages are sent at once. A node that dies closes no connection.
    """
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, within_s * 1000),  # also bounds the keepalives, see tcp(7)
    ):
        connection.setsockopt(level, option, value)
