"""Asks a node's slurmd whether the node is alive, long before Slurm gives it up.

Slurm itself waits for SlurmdTimeout, 300 s by default.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from toolkit.base import open_files

#: A node under load accepts a connection all the same: the kernel does that.
TIMEOUT_S = 3.0
DEFAULT_SLURMD_PORT = 6818
#: Threads that look names up, and the seconds that all look-ups together may take.
LOOK_UPS, LOOK_UP_S = 32, 10.0
#: Descriptors left to the rest of the process.
KEPT_FREE = 64
#: Errors of this machine: the question never left it, so they say nothing about the other node.
_OURS = frozenset(
    {
        *(errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN, errno.EADDRNOTAVAIL),
        *(errno.EACCES, errno.EPERM, errno.ENETUNREACH, errno.ENETDOWN, errno.EAFNOSUPPORT),
    }
)


Question = tuple[str, socket.AddressFamily, Any]  #: a host and one of its addresses


def unreachable(hosts: Iterable[str], port: int, *, here: str, timeout_s: float = TIMEOUT_S) -> set[str]:
    """Return those of ``hosts`` on which nothing accepts a connection on ``port``.

    A host that could not be asked is not among them. The result is empty if our own node, ``here``, does not answer:
    then the port is wrong. Slurm's own daemons talk to each other on slurmd's port, so no site's firewall closes it.
    All hosts are asked at once, as far as the limit of open files allows. Blocks for ``timeout_s`` plus the time that
    the look-ups of the names take.
    """
    questions: list[Question] = []
    there, silent = set[str](), set[str]()
    for host, addresses in _look_up(dict.fromkeys([here, *hosts]), port).items():
        questions += [(host, *address) for address in addresses]
        if not addresses:
            silent.add(host)
    with open_files.all_claimed():
        # Ask in waves of as many connections as there are free descriptors.
        while questions:
            in_use = len(list(Path("/proc/self/fd").iterdir()))
            at_once = max(1, open_files.hard_limit() - in_use - KEPT_FREE)
            wave, questions = questions[:at_once], questions[at_once:]
            heard, unheard = _ask(wave, timeout_s)
            there |= heard
            silent |= unheard
    return silent - there if here in there else set()


def answers(host: str, port: int, timeout_s: float = TIMEOUT_S) -> bool:
    """True if ``host`` accepts a connection on ``port``."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def _look_up(names: Iterable[str], port: int) -> dict[str, list[tuple[socket.AddressFamily, Any]]]:
    """Return the addresses of each name, none for a name that does not exist.

    A name is left out if no name server answers.
    """
    from concurrent.futures import ThreadPoolExecutor, wait  # a listing need not load them

    pool = ThreadPoolExecutor(LOOK_UPS)
    futures = {name: pool.submit(_addresses, name, port) for name in names}
    # After LOOK_UP_S a look-up that hangs is left behind: its name counts as not asked.
    wait(futures.values(), LOOK_UP_S)
    pool.shutdown(wait=False, cancel_futures=True)
    looked_up = {}
    for name, future in futures.items():
        if not future.done() or future.cancelled():
            continue
        addresses = future.result()
        if addresses is not None:
            looked_up[name] = addresses
    return looked_up


def _addresses(name: str, port: int) -> list[tuple[socket.AddressFamily, Any]] | None:
    try:
        return [
            (family, address) for family, _, _, _, address in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        ]
    except socket.gaierror as error:
        return [] if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA) else None
    except UnicodeError:  # a name from a damaged file: no host has such a name
        return []


def _ask(questions: Sequence[Question], timeout_s: float) -> tuple[set[str], set[str]]:
    """Return the hosts that accept a connection, and those that do not.

    The latter refuse it or do not answer. A host that could not be asked is in neither set.
    """
    there, silent = set[str](), set[str]()

    def note(host: str, error: int | None) -> None:
        if error == 0:
            there.add(host)
        elif error not in _OURS:
            silent.add(host)

    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        # Start all connections without waiting for any.
        for host, family, address in questions:
            try:
                connection = stack.enter_context(socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK))
                error: int | None = connection.connect_ex(address)
            except OSError as failure:  # no descriptor is left, or this machine has no such family
                error = errno.EMFILE if failure.errno is None else failure.errno
            if error == errno.EINPROGRESS:
                selector.register(connection, selectors.EVENT_WRITE, host)
            else:
                note(host, error)
        # Collect the outcomes until the deadline; what is still open then is silent.
        deadline = time.monotonic() + timeout_s
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                selector.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                note(key.data, key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
        silent |= {key.data for key in selector.get_map().values()}
    return there, silent
