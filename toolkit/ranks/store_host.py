"""The store host: a small process that serves one attempt's TCPStore.

Every attempt gets a fresh store: in an old one ranks would find a dead attempt's gloo addresses and be refused there.
The agent of the batch host starts the store host. For ranks that srun starts the supervisor does, with a socket that
listens already: a rank that is faster than ``import torch`` here waits in its backlog.

The store host prints its port as a JSON line on standard output and takes requests as JSON lines on standard input
(:func:`serve`). It ends when standard input closes, which its starter's death causes as well.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from datetime import timedelta
from typing import IO

from torch.distributed import TCPStore

from toolkit.base import this_node
from toolkit.nodes.agent.die_with_parent import ignore_signals
from toolkit.ranks import older_torch
from toolkit.ranks.agreement import propose
from toolkit.ranks.agreement.torch_store import StoreTransport
from toolkit.slurm.network import listen, reachable_at


def serve(store: TCPStore, world_size: int, requests: IO[str]) -> None:
    """Serve ``requests``, lines of ``{"propose": kind, "by": who}``, until they end."""
    for line in requests:
        if line.endswith("\n"):  # else our starter has died in the middle of the line
            wanted = json.loads(line)
            propose(StoreTransport(store), world_size, wanted["propose"], by=wanted["by"])


def main() -> None:
    """Serve the store on an inherited listening socket, or else on a free port. The first line names the port."""
    ignore_signals()  # the ranks need us to agree where to stop; a container may lose which signals are ignored
    this_node.raise_open_files()  # each rank has several connections, and the usual soft limit is 1,024
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int)
    parser.add_argument("--host", required=True)
    parser.add_argument("--world-size", type=int, required=True)
    args = parser.parse_args()
    # TCPStore itself would listen on every address.
    listener = socket.socket(fileno=args.fd) if args.fd is not None else listen(args.host)
    port = listener.getsockname()[1]
    store = older_torch.serve_store(reachable_at(args.host), port, listener.detach(), timedelta(seconds=30))
    print(json.dumps({"port": store.port}), flush=True)
    serve(store, args.world_size, sys.stdin)
    os._exit(0)  # Python's own exit takes half a second with torch loaded, and a restart would wait for it


if __name__ == "__main__":
    main()
