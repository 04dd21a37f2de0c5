"""How the ranks of one launch find each other's store.

* Under a supervisor or torchrun ``MASTER_ADDR`` and ``MASTER_PORT`` name a store that an agent hosts.
* Plain ``srun`` and ``mpirun`` host none and reserve no port. A port computed from the job id collides with the next
  job that computes the same. So rank 0 binds a free port and writes it into a file on the shared folder, under a name
  that only this launch has. A file left over from an older launch names a dead port, or a store without our nonce: the
  other ranks read it again until rank 0 has replaced it.
* A single rank takes a free port on loopback.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import Store, TCPStore

from toolkit.base import fsio, trust
from toolkit.base.errors import ToolkitError
from toolkit.files import records
from toolkit.files.records import COUNT, TEXT, Record
from toolkit.ranks import older_torch
from toolkit.slurm import network

LAUNCH_KEY_VARIABLE = "TOOLKIT_LAUNCH_KEY"
#: Key of the launch's random text in its store. The rendezvous file holds the same text.
NONCE_KEY = "toolkit/nonce"
#: Seconds between two reads of the rendezvous file.
RETRY_S = 0.2


#: The rendezvous file: where rank 0's store listens.
_WRITTEN = Record({"host": TEXT, "port": COUNT, "nonce": TEXT})


def open_store(
    rank: int, world_size: int, timeout: timedelta, folder: Path, own_key: Callable[[], str] | None = None
) -> Store:
    """Return a connected client of this launch's store.

    ``folder`` is shared by the ranks. It holds the rendezvous file, if one is needed, under the name that the launcher
    gives this launch, or else ``own_key()``. Raises ToolkitError when rank 0 cannot be found within ``timeout``.
    """
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return store_of_environment(rank, world_size, timeout)
    if world_size == 1:
        return _served("127.0.0.1", 1, timeout)
    key = os.environ.get(LAUNCH_KEY_VARIABLE) or (own_key() if own_key is not None else None)
    if key is None:
        raise ToolkitError(
            f"rank {rank} of {world_size}: nothing says where rank 0 is; start with `toolkit submit`, `toolkit run` "
            "under srun, torchrun or Open MPI's mpirun, set MASTER_ADDR and MASTER_PORT, or use dist.backend: mpi"
        )
    # A folder of another user could hold a forged rendezvous file.
    trust.refuse_of_others(fsio.make_dir(folder), f"rank {rank}: the folder by which the ranks find each other")
    path = folder / f"{key}.json"
    if rank == 0:
        return _host(path, world_size, timeout)
    return _join(path, rank, timeout)


def store_of_environment(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return a new client of the store at ``MASTER_ADDR:MASTER_PORT``. Rank 0 hosts it if no agent does."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(
        host,
        port,
        world_size,
        is_master=rank == 0 and not agent,
        timeout=timeout,
        wait_for_workers=not agent,
        multi_tenant=True,  # a library in this process may host its store there too: they share the server
    )


def _host(path: Path, world_size: int, timeout: timedelta) -> Store:
    nonce = secrets.token_hex(8)
    peer = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    address = network.interface_for(peer).address if peer else None  # under which the other nodes reach this one
    # Without a known address: listen on all of them, and let the others use the host name.
    store = _served(address or network.wildcard(), world_size, timeout)
    store.set(NONCE_KEY, nonce)
    fsio.write_json(path, {"host": address or socket.gethostname(), "port": store.port, "nonce": nonce})
    # The file is removed once all ranks are in, or the wait has failed.
    store.set("toolkit/joined/0", "1")
    try:
        store.wait([f"toolkit/joined/{rank}" for rank in range(world_size)], timeout)
    finally:
        path.unlink(missing_ok=True)
    return store


def _join(path: Path, rank: int, timeout: timedelta) -> Store:
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        written = records.read_or(path, _WRITTEN, None)
        if written is not None:
            with contextlib.suppress(RuntimeError, OSError, OverflowError):  # refused: the port of an older launch
                store = _connect(written, timeout)
                store.set(f"toolkit/joined/{rank}", "1")
                return store
        time.sleep(RETRY_S)
    raise ToolkitError(
        f"rank {rank}: rank 0 has not written {path} within {timeout.total_seconds():.0f} s; is the folder shared by "
        "all nodes (another one: set TOOLKIT_RUNS), and does rank 0 run?"
    )


def _connect(written: dict[str, Any], timeout: timedelta) -> Store:
    host, port = written["host"], written["port"]
    socket.create_connection((host, port), timeout=5).close()  # TCPStore itself would retry for the whole timeout
    store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
    if store.get(NONCE_KEY).decode() != written["nonce"]:
        raise OSError("another launch's store")
    return store


def _served(address: str, world_size: int, timeout: timedelta) -> TCPStore:
    """Return a store that listens on ``address`` alone. torch's own socket would listen on every address."""
    with network.listen(address) as listener:
        port = listener.getsockname()[1]
        return older_torch.serve_store(network.reachable_at(address), port, listener.detach(), timeout, world_size)
