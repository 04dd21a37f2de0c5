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

from toolkit.base import this_node
from toolkit.base.process_limits import limits

#: A node under load accepts a connection all the same: the kernel does that.
TIMEOUT_S = 3.0
#: A host that does not answer is asked again after this time: a single packet may be lost. More hosts, less often.
AGAIN_S, HOSTS_AGAIN = 0.1, 32
DEFAULT_SLURMD_PORT = 6818
#: Threads that look names up, and the seconds that all look-ups together may take.
LOOK_UPS = 32
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
    with this_node.raised_open_files():
        # Ask in waves of as many connections as there are free descriptors.
        while questions:
            in_use = len(list(Path("/proc/self/fd").iterdir()))
            at_once = max(1, this_node.max_open_files() - in_use - KEPT_FREE)
            wave, questions = questions[:at_once], questions[at_once:]
            heard, unheard = _ask(wave, timeout_s)
            there |= heard
            silent |= unheard
    return silent - there if here in there else set()


def _look_up(names: Iterable[str], port: int) -> dict[str, list[tuple[socket.AddressFamily, Any]]]:
    """Return the addresses of each name, none for one that does not exist. Leave out what no name server answers."""
    from concurrent.futures import ThreadPoolExecutor, wait  # a listing need not load them

    pool = ThreadPoolExecutor(LOOK_UPS)
    futures = {name: pool.submit(_addresses, name, port) for name in names}
    # After limits().look_up_s a look-up that hangs is left behind: its name counts as not asked.
    wait(futures.values(), limits().look_up_s)
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
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        return [(family, address) for family, _, _, _, address in found]
    except socket.gaierror as error:
        return [] if error.errno in (socket.EAI_NONAME, socket.EAI_NODATA) else None
    except UnicodeError:  # a name from a damaged file: no host has such a name
        return []


def _ask(questions: Sequence[Question], timeout_s: float) -> tuple[set[str], set[str]]:
    """Return the hosts that accept a connection, and those that refuse it or do not answer.

    A host that could not be asked is in neither set.
    """
    there, asked, waiting = set[str](), set[str](), dict[str, set[Question]]()
    for question in questions:
        waiting.setdefault(question[0], set()).add(question)

    def note(question: Question, error: int) -> None:
        host = question[0]
        if error not in _OURS:
            asked.add(host)
        if error == 0:
            there.add(host)
            waiting.pop(host, None)
        elif error == errno.ECONNREFUSED and host in waiting:
            waiting[host].discard(question)
            if not waiting[host]:
                del waiting[host]

    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        now = next_round = time.monotonic()
        deadline, every_s = now + timeout_s, AGAIN_S * max(1.0, len(questions) / HOSTS_AGAIN)
        while waiting and now < deadline:
            if now >= next_round:
                next_round = now + every_s
                # Start all connections without waiting for any.
                for question in [question for open_ones in waiting.values() for question in open_ones]:
                    host, family, address = question
                    kind = socket.SOCK_STREAM | socket.SOCK_NONBLOCK
                    try:
                        connection = stack.enter_context(socket.socket(family, kind))
                        error = connection.connect_ex(address)
                    except OSError as failure:  # no descriptor is left, or this machine has no such family
                        error = errno.EMFILE if failure.errno is None else failure.errno
                    if error == errno.EINPROGRESS:
                        asked.add(host)
                        selector.register(connection, selectors.EVENT_WRITE, question)
                    else:
                        note(question, error)
            for key, _ in selector.select(max(0.0, min(next_round, deadline) - time.monotonic())):
                selector.unregister(key.fileobj)
                assert isinstance(key.fileobj, socket.socket)
                note(key.data, key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))
            now = time.monotonic()
    return there, asked - there
