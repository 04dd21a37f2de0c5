"""How the ranks agree at a start on a state in memory and load it.

The ranks report to rank 0 what their nodes hold. It picks the newest step of which all parts exist, and has parts sent
to the nodes that lack them: a spare holds nothing, and ranks may be on other nodes than before.

Files are sent over plain TCP. A process group does not fit: gloo connects each rank with every other at each start,
NCCL takes nothing from host memory, and a thread that waits inside of either cannot be ended when its peer has died.
The agents do not fit either: they must answer the supervisor each second. A receiver's address, and a token that proves
a sender to be a rank, are published in the store that the ranks share. A sender begins with the token. It sends each
file as a head, all tensors, and the description; the receiver answers with one byte as soon as its copy is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from toolkit.base import logs
from toolkit.base.errors import CheckpointError, listing
from toolkit.checkpoint.exchange import Exchange, KeyValueStore, describe, failures_told
from toolkit.checkpoint.manifest import (
    IN_MEMORY,
    CorruptCheckpointError,
    Manifest,
    Name,
    TensorRecord,
    ValueRecord,
    check_size,
)
from toolkit.checkpoint.reader import Loaded, fill_state
from toolkit.files.records import JsonRecord, decode
from toolkit.nodes.agent.wire_protocol import enable_keepalive
from toolkit.plugins.memory.files import START, MemoryFile, MemorySlot, RankFiles, Role, SavedStep
from toolkit.ranks.state import State
from toolkit.slurm import network

KEY = "checkpoint.memory_every_steps"
#: Seconds that the ranks wait for each other at a start.
_TIMEOUT_S = 600.0
#: Seconds between two checks of a rank that waits for a part.
_LOOK_S = 0.02

T = TypeVar("T")
log = logs.get(__name__)


class MemoryLoad:
    """One rank's side of the load at an attempt's start."""

    def __init__(self, slot: MemorySlot, files: RankFiles, attempt: int, kv: KeyValueStore | None) -> None:
        self._slot, self._files, self._attempt, self._kv = slot, files, attempt, kv
        self._talk = Exchange(
            kv, rank=slot.rank, world_size=slot.world_size, topic=f"memory/{attempt}", number=1, timeout_s=_TIMEOUT_S
        )
        self.is_usable = False  #: True if all ranks have files
        self.partner_address: Mapping[str, Any] | None = None  #: where the partner receives, if there is one

    def publish(self, address: Mapping[str, Any]) -> None:
        """Tell the other ranks where this one receives files, before any is asked to send."""
        assert self._kv is not None
        self._kv.set(self._key(self._slot.rank), json.dumps(address))

    def load(self, places: State | Callable[[Manifest], State], newer_than: int) -> Loaded | None:
        """Fill ``places`` on all ranks, or return None or raise on all; see :meth:`~.copies.Memory.load`."""
        rank, world_size = self._slot.rank, self._slot.world_size
        with nullcontext() if rank else failures_told(self._talk, "no state was loaded from memory"):
            agreed = self._agree(newer_than)
            # All ranks learn the same plan, so they take the same branches below.
            if agreed.has_partners and self._kv is not None:
                self.partner_address = self._address_of((rank + self._slot.local_world_size) % world_size)
            self.is_usable = not agreed.without
            if agreed.without and not rank and self._slot.files:
                log.warning("%s is not used: no files for rank %s", KEY, listing([*map(str, agreed.without)], 8))
            if agreed.moment is None:
                return None
            self._files.loaded = moment = agreed.moment
            if agreed.transfers and self._together(partial(self._transfer, moment, agreed)) is None:
                return None
            loaded = self._together(partial(self._fill, places, moment))
        if loaded is None:
            self._files.forget(moment)
            raise CorruptCheckpointError("the state in the nodes' memory cannot be loaded, and a part of it has been")
        if rank == 0:
            log.info("resuming from memory, where step %d is", moment[1])
        return loaded

    def _key(self, rank: int) -> str:
        return f"memory/{self._attempt}/receiver/{rank}"

    def _address_of(self, rank: int) -> Mapping[str, Any]:
        assert self._kv is not None  # there is another node
        address: Mapping[str, Any] = json.loads(self._kv.get(self._key(rank)))
        return address

    def _agree(self, newer_than: int) -> RestorePlan:
        slot = self._slot
        held = self._files.held() if slot.local_rank == 0 else []
        own = MemoryReport(slot.rank - slot.local_rank, slot.local_world_size, bool(slot.files), held)
        if slot.rank:
            self._talk.report(dataclasses.asdict(own))
            return RestorePlan.from_json(self._talk.listen())
        # Rank 0 alone makes the plan, and all ranks follow it.
        others = {rank: MemoryReport(**report) for rank, report in self._talk.gather().items()}
        agreed = plan_restore({0: own, **others}, newer_than)
        self._talk.tell(agreed.to_json())
        return agreed

    def _together(self, action: Callable[[], T]) -> T | None:
        """Return what ``action`` returns here; None on all ranks if it fails on one. Then a checkpoint is left."""
        result, problems = None, []
        try:
            result = action()
        except Exception as error:
            problems.append(f"rank {self._slot.rank}: {describe(error)}")
        # Every rank reports; rank 0 decides and tells all.
        if self._slot.rank:
            self._talk.report({"problems": problems})
            return result if self._talk.listen()["done"] else None
        problems += [problem for report in self._talk.gather().values() for problem in report["problems"]]
        self._talk.tell({"done": not problems})
        if problems:
            log.warning("the state in memory is not used: %s", "; ".join(problems))
        return None if problems else result

    def _transfer(self, moment: SavedStep, agreed: RestorePlan) -> bool:
        """Send and receive this rank's part of the transfers."""
        assert self._kv is not None  # there is another node
        rank, failed = self._slot.rank, f"memory/{self._attempt}/failed"
        # Send first; what other ranks send arrives in the receiver's threads meanwhile.
        try:
            for transfer in agreed.transfers:
                if transfer.source == rank:
                    with (
                        closing(self._files.find(moment, transfer.of)) as file,
                        closing(Sender(self._address_of(transfer.target))) as sender,
                    ):
                        sender.send(file, Role.SHARED if transfer.of is None else Role.OWN)
        except Exception:
            self._kv.set(failed, "1")  # waiting ranks learn of the failure before their timeout
            raise
        expected = sum(transfer.target == rank for transfer in agreed.transfers)
        deadline = time.monotonic() + _TIMEOUT_S
        # Wait for the parts that come to this rank, unless another rank has failed.
        while len(self._files.arrived) < expected:
            if self._kv.check([failed]) or time.monotonic() > deadline:
                raise CheckpointError("a part did not arrive from another node")
            time.sleep(_LOOK_S)
        if expected:
            log.info("%d parts of the state in memory came from other nodes", expected)
        return True

    def _fill(self, places: State | Callable[[Manifest], State], moment: SavedStep) -> Loaded:
        """Fill ``places`` from this node's files, and verify every byte."""
        slot = self._slot
        found: dict[str, TensorRecord] = {}
        values: dict[str, ValueRecord] = {}
        with closing(self._files.find(moment, None)) as shared, closing(self._files.find(moment, slot.rank)) as own:
            for file in (shared, own):
                described = file.read()
                assert described is not None
                meta: Mapping[str, Any] = described["about"]["meta"]
                for name, record in decode(dict[Name, TensorRecord], described["tensors"]).items():
                    check_size(record)
                    parts = tuple(dataclasses.replace(part, file=file.name) for part in record.parts)
                    found[name] = dataclasses.replace(record, parts=parts)
                values |= decode(dict[Name, ValueRecord], described["about"]["values"])
            # Both parts are described like one checkpoint, so that the reader of checkpoints fills the state.
            manifest = Manifest(moment[1], slot.world_size, {}, meta, {}, found, values)
            loaded = fill_state(places, manifest, IN_MEMORY, slot.rank, slot.world_size)
        # The next write must not go to the files that hold what was loaded.
        self._files.protect(moment)
        return loaded


@dataclass(frozen=True)
class Transfer(JsonRecord):
    """Rank ``source``, whose node holds the part of rank ``of`` (None: the common part), sends it to ``target``."""

    source: int
    target: int
    of: int | None


@dataclass(frozen=True)
class RestorePlan(JsonRecord):
    """What rank 0 tells all ranks at a start."""

    moment: SavedStep | None = None  #: None: nothing is loaded from memory
    without: tuple[int, ...] = ()  #: ranks that have no files: then no rank keeps anything
    transfers: tuple[Transfer, ...] = ()
    has_partners: bool = False  #: all nodes have the same number of ranks, and there are at least two nodes


@dataclass(frozen=True)
class MemoryReport:
    """What a rank reports at a start."""

    node: int  #: the first rank of its node
    local_world_size: int
    has_files: bool = True
    held: Sequence[tuple[int, int, int | None]] = ()  #: attempt, step and part; from its node's first rank only


def plan_restore(reports: Mapping[int, MemoryReport], newer_than: int) -> RestorePlan:
    """Pick the newest moment above step ``newer_than`` with all parts held, and who sends which part."""
    without = [rank for rank, report in sorted(reports.items()) if not report.has_files]
    if without:
        return RestorePlan(without=tuple(without))
    nodes = {rank: report for rank, report in reports.items() if rank == report.node}
    sizes = {report.local_world_size for report in reports.values()}
    has_partners = len(nodes) > 1 and len(sizes) == 1
    # Which nodes hold each part of each moment.
    holders: dict[tuple[SavedStep, int | None], list[int]] = {}
    for node, report in sorted(nodes.items()):
        for attempt, step, of in report.held:
            holders.setdefault(((attempt, step), of), []).append(node)
    # A state is usable only with the common part and every rank's own.
    parts = [None, *sorted(reports)]
    whole = []
    for moment in {moment for moment, _ in holders}:
        if moment[1] > newer_than and all((moment, of) in holders for of in parts):
            whole.append(moment)
    if not whole:
        return RestorePlan(has_partners=has_partners)
    moment = max(whole)
    transfers = []
    # The common part goes to each node that lacks it, from first rank to first rank.
    for number, node in enumerate(sorted(nodes)):
        sources = holders[moment, None]
        if node not in sources:  # the holders take turns as senders
            transfers.append(Transfer(sources[number % len(sources)], node, None))
    # Each rank's own part goes to the rank if its node lacks it, from a rank on the node that holds it.
    for rank, report in sorted(reports.items()):
        sources = holders[moment, rank]
        if report.node not in sources:
            node = sources[0]
            place = (rank - report.node) % nodes[node].local_world_size  # of the rank with the same place on that node
            transfers.append(Transfer(node + place, rank, rank))
    return RestorePlan(moment, (), tuple(transfers), has_partners)


_TOKEN_BYTES = 32
_HEAD = struct.Struct("<BQI")  #: the role, the end of the tensors, the size of the description
_DONE = b"\x01"
#: Bytes received by one call: few calls, because each one waits for the interpreter lock.
_PIECE_BYTES = 1 << 24
#: Seconds in which a token must come: a peer that sends none is not a rank.
_TOKEN_S = 10.0
#: Seconds without an answer from a peer until it counts as dead.
_GONE_S = 60


class Receiver:
    """Receives the files that other ranks send, in a thread for each of them.

    ``place`` is called with the role of a file that begins to come, and ``arrived`` when it is complete.
    """

    def __init__(self, address: str, place: Callable[[Role], MemoryFile], arrived: Callable[[Role], None]) -> None:
        self._place, self._arrived = place, arrived
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._listening = network.listen(address)
        _start_thread(self._accept)

    @property
    def address(self) -> dict[str, Any]:
        """Return what a sender needs: host, port and token."""
        host, port = self._listening.getsockname()[:2]
        return {"host": host, "port": port, "token": self._token.hex()}

    def close(self) -> None:
        """Accept no further connections."""
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # close() ends the loop
            while True:
                connection, _ = self._listening.accept()
                _start_thread(partial(self._serve, connection))

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                # A peer must first prove that it is a rank.
                connection.settimeout(_TOKEN_S)
                if not hmac.compare_digest(_exactly(connection, _TOKEN_BYTES), self._token):
                    return
                connection.settimeout(None)
                enable_keepalive(connection, _GONE_S)
                while True:
                    self._take(connection)
                    connection.sendall(_DONE)
            except EOFError:
                pass  # the sender has ended, or has nothing more to send
            except OSError as error:
                log.warning("a copy of another rank's state did not arrive: %s", error)

    def _take(self, connection: socket.socket) -> None:
        role, end, described_bytes = _HEAD.unpack(_exactly(connection, _HEAD.size))
        file = self._place(Role(role))
        # The old content becomes invalid here, and valid again only with the last byte.
        file.allocate(end)
        _fill(connection, file.tensors(end))
        file.seal(_exactly(connection, described_bytes), end)
        self._arrived(Role(role))


class Sender:
    """A connection that sends files to one rank."""

    def __init__(self, address: Mapping[str, Any]) -> None:
        """Connect to the rank whose receiver published ``address``. Raises OSError."""
        self._connection = socket.create_connection((address["host"], address["port"]), timeout=_GONE_S)
        self._connection.settimeout(None)
        enable_keepalive(self._connection, _GONE_S)
        self._connection.sendall(bytes.fromhex(address["token"]))

    def send(self, file: MemoryFile, role: Role) -> None:
        """Send a complete file, and wait until the copy is complete. Raises OSError or EOFError."""
        found = file.description()
        assert found is not None
        end, described = found
        self._connection.sendall(_HEAD.pack(role, end, len(described)))
        with (IN_MEMORY / file.name).open("rb") as source:
            self._connection.sendfile(source, START, end - START + len(described))
        _exactly(self._connection, len(_DONE))

    def close(self) -> None:
        """End the connection, and with it a call of :meth:`send` in another thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _start_thread(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name="toolkit-memory", daemon=True).start()


def _exactly(connection: socket.socket, size_bytes: int) -> bytes:
    """Return exactly ``size_bytes`` bytes. Raises EOFError where the other end has closed."""
    data = bytearray(size_bytes)
    _fill(connection, memoryview(data))
    return bytes(data)


def _fill(connection: socket.socket, place: memoryview) -> None:
    done = 0
    while done < len(place):
        got = connection.recv_into(place[done : done + _PIECE_BYTES], 0, socket.MSG_WAITALL)
        if not got:
            raise EOFError("the other rank has closed the connection")
        done += got
