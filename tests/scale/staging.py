"""Imports from a shared disk, and from the nodes' copies of an environment.

The calls to the shared disk are those of a real process, which imports from a real environment and from a real copy of
it. The work of unpacking is real, and so is that of passing a package on from one node to the next over the loopback.
The real code decides for each node from which node it takes the package. The file server and the network are simulated:
the server answers one call after the other, and each call also takes its time on the way.
"""

from __future__ import annotations

import heapq
import json
import os
import socket
import subprocess
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import copytree
from threading import Thread
from unittest.mock import patch

from tests.scale import Curve
from toolkit.plugins.staging import copying, package, relay
from toolkit.plugins.staging.copying import CopyRequest
from toolkit.plugins.staging.package import Package, PackageSource, PackRequest
from toolkit.plugins.staging.relay import PIECE_BYTES, NodeAddress, Relay, RelayPeer, RelayRequest, Spool
from toolkit.plugins.staging.supervisor_side import FAN_OUT, CopyOrder

#: Of the file server: calls and bytes a second; and the seconds that a call takes without others.
CALLS_A_SECOND, BYTES_A_SECOND, CALL_S = 30_000, 2e9, 0.0005
READ_BYTES = 1 << 20
#: Of each node's connection to the network: bytes a second out, and the seconds to another node.
NODE_BYTES_A_SECOND, HOP_S = 3.1e9, 0.0001
PACKAGES = ("numpy", "numpy.libs", "yaml", "omegaconf")
#: Prints each path that the import system asks for, and each file that is opened.
PROGRAM = """
import _frozen_importlib_external as machinery, json, sys, time
paths, stat = [], machinery._path_stat
machinery._path_stat = lambda path: paths.append(path) or stat(path)
sys.addaudithook(lambda event, args: paths.append(str(args[0])) if event in ("open", "os.listdir") else None)
import numpy, numpy.random, numpy.fft, yaml
print(json.dumps([paths, time.process_time()]))
"""


@dataclass(frozen=True)
class Import:
    """One process's import: the bytes of each call to the shared disk, and CPU seconds."""

    calls: Sequence[int]
    cpu_s: float


@dataclass(frozen=True)
class Work:
    """CPU seconds of a node for a whole package."""

    unpack_s: float
    take_s: float  #: from another node, into its spool
    give_s: float  #: to another node


@cache
def real_imports() -> tuple[Import, Import, Package, Work]:
    """Import from an environment and from its copy. Return both, the package, and the work for a copy."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prefix, node = folder / "shared/venv", folder / "node"
        venv.create(prefix, symlinks=True, with_pip=False)
        site = next(prefix.glob("lib/*/site-packages"))
        for each in PACKAGES:
            installed = Path(sysconfig.get_path("purelib")) / each
            if installed.is_dir():
                copytree(installed, site / each)
        node.mkdir()
        made = package.pack(PackageSource(str(prefix), "bin/python"), PackRequest(str(folder / "shared/cache"), ()))
        began = time.thread_time()
        copy = copying.copy(made, [node])
        unpack_s = time.thread_time() - began
        # The locks keep a copy from being evicted while a run uses it; nothing evicts here.
        for lock in copy.locks:
            os.close(lock)
        imports = [_import(python / "bin/python", folder / "shared") for python in (prefix, copy.path)]
        work = Work(unpack_s, *_passed_on(made, node))
    return imports[0], imports[1], made, work


def _passed_on(made: Package, node: Path) -> tuple[float, float]:
    """Pass a package on from one node to another. Return the CPU seconds of taker and giver."""
    listening, secret, took = socket.create_server(("127.0.0.1", 0)), b"s" * 32, dict[str, float]()
    here = NodeAddress("127.0.0.1", listening.getsockname()[1])

    def give() -> None:
        with listening, listening.accept()[0] as connection:
            peer = RelayPeer(connection, secret, "giver")
            peer.receive()
            peer.send(b"")
            began = time.thread_time()
            for data in spool.blocks(0):
                peer.send(data)
            took["give"] = time.thread_time() - began

    def taken() -> Iterator[bytes]:
        began = time.thread_time()
        yield from relay.received(made, [here], secret)
        took["take"] = time.thread_time() - began  # with what the spool has done between

    spool = Spool(copying.from_disk(made), node)
    assert sum(map(len, spool.blocks(0))) == made.size_bytes
    giver = Thread(target=give)
    giver.start()
    assert sum(map(len, Spool(taken(), node).blocks(0))) == made.size_bytes
    giver.join()
    return took["take"], took["give"]


def _import(python: Path, shared: Path) -> Import:
    command = [str(python), "-c", PROGRAM]
    subprocess.run(command, check=True, capture_output=True, env={})  # the files are in memory from here on
    told = subprocess.run(command, check=True, capture_output=True, text=True, env={}).stdout
    paths, cpu_s = json.loads(told)
    asked = [Path(path) for path in paths if Path(path).is_relative_to(shared)]
    return Import([path.stat().st_size if path.is_file() else 0 for path in asked], cpu_s)


def served(nodes: int, calls: Sequence[int]) -> float:
    """Return the seconds until all of ``nodes`` have all answers. Each makes one call after the other."""
    free_at = last = 0.0
    waiting = [(0.0, node, 0) for node in range(nodes)]
    while waiting:
        asked_at, node, call = heapq.heappop(waiting)
        if call == len(calls):
            last = max(last, asked_at)
            continue
        free_at = max(free_at, asked_at) + 1 / CALLS_A_SECOND + calls[call] / BYTES_A_SECOND
        heapq.heappush(waiting, (free_at + CALL_S, node, call + 1))
    return last


@dataclass
class Tree:
    """Nodes that have each taken a package. ``above`` is the node from which each has taken it."""

    above: list[int | None]
    disk_reads: int


def real_tree(nodes: int) -> Tree:
    """Have each node take a small package, by the real code. A thread stands for each node's process."""
    order, listening = CopyOrder({}), [socket.create_server(("127.0.0.1", 0)) for _ in range(nodes)]
    numbers = {each.getsockname()[1]: number for number, each in enumerate(listening)}
    above, reads, from_disk = list[int | None](), list[str](), copying.from_disk
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(nodes) as pool, ExitStack() as stack:
        folder = Path(name)
        (folder / "data").write_bytes(os.urandom(3 * READ_BYTES // 2))
        made = package.pack(PackageSource(str(folder / "data")), PackRequest(str(folder / "cache"), ()))

        def counted(package: Package, position: int = 0) -> Iterator[bytes]:
            reads.append(package.key)
            return from_disk(package, position)

        def connect(number: int, channel: socket.socket) -> None:
            with suppress(OSError):  # it is closed at the end
                while True:
                    connection, _ = listening[number].accept()
                    with connection:
                        socket.send_fds(channel, [b"c"], [connection.fileno()])

        def copied(number: int, node: Relay) -> bytes:
            disk = folder / str(number)
            disk.mkdir()
            return node.copy(made, [disk]).path.read_bytes()

        stack.enter_context(patch.object(copying, "from_disk", counted))
        relays = []
        for number in range(nodes):
            places = order.place(NodeAddress("127.0.0.1", listening[number].getsockname()[1]).to_json())
            above.append(numbers[places[0]["port"]] if places else None)
            ours, channel = socket.socketpair()
            stack.callback(ours.close)
            addresses = tuple(map(NodeAddress.from_json, places))
            is_above = len(order.places) * FAN_OUT - 1 < nodes
            relays.append(Relay(RelayRequest(CopyRequest((made,)), addresses, is_above, "73" * 32, channel.detach())))
            Thread(target=connect, args=[number, ours], daemon=True).start()
        assert {*pool.map(copied, range(nodes), relays)} == {(folder / "data").read_bytes()}
        for each in listening:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
    return Tree(above, len(reads))


def spread(tree: Tree, made: Package, work: Work) -> tuple[float, float]:
    """Return the seconds until all nodes have the package, and until all have unpacked it."""
    nodes, pieces = range(len(tree.above)), made.size_bytes // PIECE_BYTES + 1
    below = {above: [node for node in nodes if tree.above[node] == above] for above in nodes}
    # When each node has the piece, has given it, may use the network again, has taken it, and has unpacked it.
    there, given, is_free, taken, unpacked = ([0.0] * len(nodes) for _ in range(5))
    for piece in range(pieces):
        there[0] = _served_one(piece * PIECE_BYTES // READ_BYTES + 1)
        for above in nodes:
            for node in below[above]:
                given[node] = max(given[node], there[above]) + work.give_s / pieces
                is_free[above] = max(is_free[above], given[node]) + PIECE_BYTES / NODE_BYTES_A_SECOND
                taken[node] = max(taken[node], is_free[above] + HOP_S) + work.take_s / pieces
                there[node] = taken[node]
        for node in nodes:
            unpacked[node] = max(unpacked[node], there[node]) + work.unpack_s / pieces
    return max(there), max(unpacked)


@cache
def _served_one(reads: int) -> float:
    return served(1, [READ_BYTES] * reads)


def start(nodes: int) -> Mapping[str, float]:
    shared, own, made, work = real_imports()
    tree = real_tree(nodes)
    there_s, copied_s = spread(tree, made, work)
    import_s = served(nodes, own.calls) + own.cpu_s
    # The cost of a copy on one node, to which the whole run's is compared.
    one_s = spread(Tree([None], 1), made, work)[1] + import_s
    reads_s = served(nodes, [READ_BYTES] * (made.size_bytes // READ_BYTES + 1))
    return {
        "calls a node": len(shared.calls),
        "import s": round(served(nodes, shared.calls) + shared.cpu_s, 2),
        "calls with a copy": len(own.calls),
        "import s with a copy": round(import_s, 2),
        "nodes that read the disk": tree.disk_reads,
        "package there s": round(there_s, 2),
        "copied and imported s": round(copied_s + import_s, 2),
        "of one node's": round((copied_s + import_s) / one_s, 2),
        "if each reads the disk": round((max(reads_s, work.unpack_s) + import_s) / one_s, 2),
    }


CURVES = [Curve("imports from a shared disk", "nodes", (1, 8, 64, 256), start)]
