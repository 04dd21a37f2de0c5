"""Checks of the limits of this node's processes, and of its name service."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Callable

from toolkit.health import Finding, ok

#: TCPStore looks up its peers' addresses, and each rank waits for that.
LOOK_UP_WARNING_S = 1.0
#: A rank keeps open its files, its sockets to its peers and its pipes to its data loaders' workers.
BAD_FILES, WARNING_FILES = 256, 1024
#: InfiniBand locks the memory that it sends from and receives into.
LOCKED_BYTES = 64 * 2**20


def check_look_up(address: str, look_up: Callable[[str], object] = socket.gethostbyaddr) -> Finding:
    """Measure how long the name service takes for our own address. That it knows no name is harmless."""
    began = time.monotonic()
    with contextlib.suppress(OSError):
        look_up(address)
    took_s = time.monotonic() - began
    if took_s < LOOK_UP_WARNING_S:
        return ok("look-up", f"{took_s:.2f} s")
    return slow_look_up(f"took {took_s:.1f} s", f"{took_s:.1f} s")


def slow_look_up(how_long: str, figure: str) -> Finding:
    """Return a warning, not an error: ranks start late, but they start."""
    text = (
        f"the reverse look-up of the node's own address {how_long}, and every rank waits for it when it opens the "
        "process group: add the nodes to /etc/hosts, or have the name server in /etc/resolv.conf looked at"
    )
    return Finding("look-up", "warning", figure, text)


def check_open_files(limit: int | None = None) -> Finding:
    """Check the soft limit on open files, which is what the ranks have."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    figure = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
    if limit == resource.RLIM_INFINITY or limit >= WARNING_FILES:
        return ok("open files", figure)
    text = f"a process may open {limit} files only: raise `ulimit -n` to {WARNING_FILES} or more (cluster.setup)"
    return Finding("open files", "bad" if limit < BAD_FILES else "warning", figure, text)


def check_locked_memory(gpus: int, limit: int | None = None) -> Finding:
    """Check the limit on locked memory of a node with InfiniBand.

    With GPUs NCCL does not start without it; ranks without GPUs do not use it.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    figure = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit // 1024} KiB"
    if limit == resource.RLIM_INFINITY or limit >= LOCKED_BYTES:
        return ok("memlock", figure)
    text = (
        f"a process may lock {figure} of memory only, and InfiniBand needs much more: have slurmd's LimitMEMLOCK set "
        "to infinity, and do not lower `ulimit -l` in your profile"
    )
    return Finding("memlock", "bad" if gpus else "warning", figure, text)
