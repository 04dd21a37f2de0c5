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
import sys
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from toolkit.dist.report import RESULT_KEY, rank_key
from toolkit.dist.stop import propose
from toolkit.dist.stop_store import StoreTransport

POLL_S = 0.25


def serve(store: TCPStore, world_size: int, requests: int) -> None:
    """Print the ranks' reports, ``{"rank": r, "report": {...}}`` and ``{"result": {...}}``, until stdin closes.

    ``requests`` is the file descriptor from which ``{"propose": kind, "by": who}`` is read.
    """
    keys = {rank_key(rank): rank for rank in range(world_size)}
    seen: dict[str, bytes] = {}
    for wanted in _requests(requests):
        if wanted:
            propose(StoreTransport(store), world_size, wanted["propose"], by=wanted["by"])
        for key in (*keys, RESULT_KEY):
            _relay(store, key, keys.get(key), seen)


def _requests(fd: int) -> Iterator[dict[str, str]]:
    """Each request as it comes, an empty one every ``POLL_S`` between them, and a last empty one after the end: the
    ranks' last words arrive just before it. Read without Python's buffer, which would hide lines from select."""
    text = b""
    while True:
        if not select.select([fd], [], [], POLL_S)[0]:
            yield {}
            continue
        chunk = os.read(fd, 4096)
        *lines, text = (text + chunk).split(b"\n")
        yield from map(json.loads, lines)
        if not chunk:
            yield {}
            return


def _relay(store: TCPStore, key: str, rank: int | None, seen: dict[str, bytes]) -> None:
    if not store.check([key]):  # a get would wait for the key
        return
    value = store.get(key)
    if seen.get(key) != value:
        seen[key] = value
        content = json.loads(value)
        _say({"result": content} if rank is None else {"rank": rank, "report": content})


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    """Serve the store on an inherited listening socket."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--world-size", type=int, required=True)
    args = parser.parse_args()
    store = TCPStore(
        "localhost",
        args.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=30),
        master_listen_fd=args.fd,
    )
    _say({"ready": True})
    serve(store, args.world_size, sys.stdin.fileno())


if __name__ == "__main__":
    main()
