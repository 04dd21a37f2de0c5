"""The store host: a small child of the supervisor that serves one attempt's TCPStore.

The supervisor has bound and listened before the ranks start and passes the listening socket down, so a rank that is
faster than this process's ``import torch`` waits in the socket's backlog instead of being refused. Every attempt gets
a fresh store: ranks that found a dead attempt's gloo addresses would be refused by them.

It speaks JSON lines on standard output (:func:`serve`), takes requests as JSON lines on standard input, and ends when
that closes, which the supervisor's death does as well.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from toolkit import open_files
from toolkit.cluster.network import listen, reachable_at
from toolkit.dist.report import RESULT_KEY, parse_report, parse_result, rank_key
from toolkit.dist.stop import propose
from toolkit.dist.stop_store import StoreTransport, in_pieces

POLL_S = 0.25
#: Rank 0's reports and the result are looked for at every poll; the other ranks', of which there may be thousands, this
#: often.
OTHERS_EVERY_S = 1.0
#: What Slurm sends to all processes of a job that is to end: the ranks need us to agree on where to stop.
SIGNALS = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
NOTHING = "null"


def serve(store: TCPStore, world_size: int, requests: int) -> None:
    """Print the ranks' reports, ``{"reports": {rank: report}}`` and ``{"result": {...}}``, until stdin closes.

    What is in their place and none of our ranks can have written is left out, and told once a key as ``{"ignored":
    key}``.

    ``requests`` is the file descriptor from which ``{"propose": kind, "by": who}`` is read.
    """
    relay = _Relay(store, world_size)
    for wanted in _requests(requests):
        if wanted:
            propose(StoreTransport(store), world_size, wanted["propose"], by=wanted["by"])
        relay.pass_on(everything=False)
    relay.pass_on(everything=True)


class _Relay:
    """Passes on what has changed in the store, in a line for each piece of it."""

    def __init__(self, store: TCPStore, world_size: int) -> None:
        self._store = store
        self._first = [rank_key(0), RESULT_KEY]
        self._others = [rank_key(rank) for rank in range(1, world_size)]
        self._ranks = {rank_key(rank): rank for rank in range(world_size)}
        self._seen: dict[str, bytes] = {}
        self._ignored: set[str] = set()
        self._next_others = 0.0
        for key in (*self._first, *self._others):
            store.compare_set(key, "", NOTHING)  # to get several keys at once would wait for a missing one

    def pass_on(self, everything: bool) -> None:
        """Say what is new of rank 0 and, when it is their time or ``everything`` is wanted, of the others."""
        keys, now = self._first, time.monotonic()
        if everything or now >= self._next_others:
            keys, self._next_others = self._first + self._others, now + OTHERS_EVERY_S
        result = None
        for piece in in_pieces((key, "") for key in keys):
            read = self._news(list(piece))
            result = read.pop(RESULT_KEY, result)
            if read:
                _say({"reports": {self._ranks[key]: report for key, report in read.items()}})
        if result is not None:  # after all reports
            _say({"result": result})

    def _news(self, keys: list[str]) -> dict[str, dict[str, Any]]:
        """What is new under these keys."""
        values = zip(keys, self._store.multi_get(keys), strict=True)
        new = {key: value for key, value in values if self._seen.get(key) != value}
        self._seen |= new
        read = {key: self._parse(key, value) for key, value in new.items() if value != NOTHING.encode()}
        for key in [key for key, value in read.items() if value is None and key not in self._ignored]:
            self._ignored.add(key)
            _say({"ignored": key})
        return {key: value for key, value in read.items() if value is not None}

    def _parse(self, key: str, value: bytes) -> dict[str, Any] | None:
        return parse_result(value) if key == RESULT_KEY else parse_report(value, self._ranks[key])


def _requests(fd: int) -> Iterator[dict[str, str]]:
    """Each request as it comes, and an empty one every ``POLL_S`` between them. Read without Python's buffer, which
    would hide lines from select."""
    text = b""
    while True:
        if not select.select([fd], [], [], POLL_S)[0]:
            yield {}
            continue
        chunk = os.read(fd, 4096)
        *lines, text = (text + chunk).split(b"\n")
        yield from map(json.loads, lines)
        if not chunk:
            return


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    """Serve the store on an inherited listening socket, or else on a free port, which the first line tells."""
    for number in SIGNALS:  # inside a container the starter's way of being deaf may be lost
        signal.signal(number, signal.SIG_IGN)
    open_files.claim_all()  # each rank has several connections, and the usual soft limit is 1,024
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int)
    parser.add_argument("--host", required=True)
    parser.add_argument("--world-size", type=int, required=True)
    args = parser.parse_args()
    # TCPStore itself would listen on every address
    listener = socket.socket(fileno=args.fd) if args.fd is not None else listen(args.host)
    port = listener.getsockname()[1]
    store = TCPStore(
        reachable_at(args.host),
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=listener.detach(),
    )
    _say({"ready": True, "port": store.port})
    serve(store, args.world_size, sys.stdin.fileno())
    os._exit(0)  # Python's own way out takes half a second with torch loaded, and a restart would wait for it


if __name__ == "__main__":
    main()
