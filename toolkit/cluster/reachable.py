"""Whether a node is there at all, asked of its slurmd: long before Slurm itself gives it up (SlurmdTimeout, 300 s)."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

#: A node under load accepts a connection all the same: the kernel does that.
TIMEOUT_S = 3.0
DEFAULT_SLURMD_PORT = 6818
#: Threads that wait for silent nodes.
AT_ONCE = 32


def unreachable(hosts: Iterable[str], port: int, *, here: str, timeout_s: float = TIMEOUT_S) -> set[str]:
    """Those of ``hosts`` on which nothing accepts a connection on ``port``; none if our own node, ``here``, is among
    them, for then it is the port that is wrong.

    Slurm's own daemons talk to each other on slurmd's port, so no site's firewall closes it. Blocks for ``timeout_s``
    at the most, or a multiple of it for more than ``AT_ONCE`` hosts.
    """
    names = [here, *hosts]
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        there = pool.map(lambda host: answers(host, port, timeout_s), names)
        missing = {host for host, is_there in zip(names, there, strict=True) if not is_there}
    return set() if here in missing else missing


def answers(host: str, port: int, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether ``host`` accepts a connection on ``port``."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False
