"""The store host: a small child of the supervisor that serves one attempt's TCPStore.

The supervisor has bound and listened before the ranks start and passes the listening socket down, so a rank that is
faster than this process's ``import torch`` waits in the socket's backlog instead of being refused. Every attempt gets
a fresh store: ranks that found a dead attempt's gloo addresses would be refused by them.

It speaks JSON lines on standard output (:func:`serve`) and ends when its standard input closes, which the supervisor's
death does as well.
"""

from __future__ import annotations

import argparse
import json
import select
import sys
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from toolkit.dist.report import RESULT_KEY, rank_key

POLL_S = 0.25


def serve(store: TCPStore, world_size: int) -> None:
    """Print the ranks' reports, ``{"rank": r, "report": {...}}`` and ``{"result": {...}}``, until stdin closes."""
    keys = {rank_key(rank): rank for rank in range(world_size)}
    seen: dict[str, bytes] = {}
    closing = False
    while not closing:
        closing = bool(select.select([sys.stdin], [], [], POLL_S)[0]) and not sys.stdin.readline()
        for key in (*keys, RESULT_KEY):  # once more after closing: the last words arrive just before the end
            _relay(store, key, keys.get(key), seen)


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
    serve(store, args.world_size)


if __name__ == "__main__":
    main()
