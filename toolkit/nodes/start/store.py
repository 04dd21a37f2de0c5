"""What the supervisor knows of the store host: its port, its end, and how many ranks it can serve."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass

from toolkit.base import logs, open_files
from toolkit.base.errors import RequestError

#: A rank's connections to the store: the process group's and, with NCCL, a clone of it; the gate's watcher; requests;
#: saves; and in a user's loop the thread that tells other ranks where this one is.
CONNECTIONS_A_RANK = 6
#: The files that the store host has open beside its connections.
OTHER_FILES = 64

log = logs.get(__name__)


@dataclass(frozen=True)
class StoreHostEnded:
    """The store host ended by itself, which it must not."""

    exit_code: int
    out_of_memory: bool = False


def port_in(line: str) -> int | None:
    """Return the port that a store host has printed. None for a library's output, which goes into the log."""
    try:
        return int(json.loads(line)["port"])
    except (ValueError, TypeError, KeyError):
        log.warning("the store host says: %s", line.rstrip())
        return None


def refuse_too_many_ranks(world_size: int) -> None:
    """Raise RequestError for more ranks than a store host on this node can serve.

    Each connection of a rank is an open file of the store host.
    """
    needed, limit = CONNECTIONS_A_RANK * world_size + OTHER_FILES, open_files.hard_limit()
    if needed > limit:
        raise RequestError(
            f"{world_size} ranks need {needed} open files on {socket.gethostname()}, where their store is "
            f"({CONNECTIONS_A_RANK} connections each), and its hard limit is {limit}: raise it (`ulimit -Hn`; "
            f"LimitNOFILE of slurmd), or run at most {(limit - OTHER_FILES) // CONNECTIONS_A_RANK} ranks"
        )
