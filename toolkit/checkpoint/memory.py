"""Copies of the training state in the memory of the ranks' nodes, for a restart inside the job.

A state has two kinds of parts: what all ranks have in common, and what each rank alone has. The first rank of each node
copies the common part into files that its node's agent holds (toolkit.agent.state_memory), and each rank its own part.
Then each rank sends its own part to its partner while the training goes on. The partner is the rank with the same place
on the next node. So one node may be lost, and every part of the newest step still exists.

Each part has two files, written in turn. The ranks meet between :meth:`Memory.wait` and :meth:`Memory.write`: before
any rank overwrites the older state, the newer one is complete on all ranks and all partners.

At the next start the ranks report to rank 0 what their nodes hold. It picks the newest step of which all parts exist,
and has parts sent to the nodes that lack them: a spare holds nothing, and ranks may be on other nodes than before.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from toolkit import logs
from toolkit.agent import state_memory
from toolkit.checkpoint import tensors
from toolkit.checkpoint.exchange import Exchange, KeyValue, describe, failures_told
from toolkit.checkpoint.manifest import (
    IN_MEMORY,
    Manifest,
    TensorPart,
    TensorRecord,
    ValueRecord,
    file_name,
    parse_tensor,
    parse_value,
)
from toolkit.checkpoint.memory_file import ALIGNMENT, START, Label, MemoryFile, Moment, Pair
from toolkit.checkpoint.memory_links import Receiver, Role, Sender
from toolkit.checkpoint.memory_plan import MemoryReport, RestorePlan, Transfer, plan_restore
from toolkit.checkpoint.reader import Loaded, fill_state
from toolkit.checkpoint.writer import KINDS
from toolkit.errors import CheckpointError, ToolkitError, listing
from toolkit.ranks.state import Entry, Json, Replicated, Sharded, State
from toolkit.slurm import network

KEY = "checkpoint.memory_every_steps"
#: Seconds that the ranks wait for each other at a start.
_TIMEOUT_S = 600.0
#: Seconds between two checks of a rank that waits for a part.
_LOOK_S = 0.02

T = TypeVar("T")
log = logs.get(__name__)


@dataclass(frozen=True)
class Seat:
    """The place of a rank, and the files that its node's agent holds for all ranks there."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    files: Sequence[str]

    @staticmethod
    def of_environment(rank: int, world_size: int, environ: Mapping[str, str]) -> Seat:
        """Read torchrun's variables and the agent's."""
        local_rank, local_world_size = int(environ.get("LOCAL_RANK", 0)), int(environ.get("LOCAL_WORLD_SIZE", 1))
        files = state_memory.paths_of(environ.get(state_memory.VARIABLE, ""))
        return Seat(rank, world_size, local_rank, local_world_size, files)

    @property
    def node(self) -> int:
        """Return the first rank of this node."""
        return self.rank - self.local_rank

    @property
    def shared(self) -> Sequence[str]:
        """Return the files for what all ranks have in common."""
        return self.files[: state_memory.FILES_A_NODE]

    @property
    def own(self) -> Sequence[str]:
        """Return the two files for this rank's own part."""
        start = state_memory.FILES_A_NODE + state_memory.FILES_A_RANK * self.local_rank
        return self.files[start : start + 2]

    @property
    def partner(self) -> Sequence[str]:
        """Return the two files for the part of a rank on another node."""
        start = state_memory.FILES_A_NODE + state_memory.FILES_A_RANK * self.local_rank
        return self.files[start + 2 : start + 4]


class Memory:
    """One rank's copies of the state: its own part, its partner's, and for a node's first rank the common part."""

    def __init__(self, seat: Seat, attempt: int, address: str | None = None) -> None:
        """Open the rank's files. Raises OSError.

        ``address`` is this node's on the ranks' network; None where all ranks are on one node.
        """
        self._seat, self._attempt, self._address = seat, attempt, address
        self.is_usable = bool(seat.files)  #: after :meth:`load`: True if all ranks have files
        self._own, self._partner = Pair(seat.own), Pair(seat.partner)
        self._shared = Pair(seat.shared) if seat.local_rank == 0 else None
        self._receiver: Receiver | None = None
        self._arrived: list[Role] = []  #: the parts to be loaded that have come
        self._loaded: Moment | None = None  #: the moment that this attempt resumes from
        self._partner_told: Mapping[str, Any] | None = None
        self._sender: Sender | None = None
        self._completing: threading.Thread | None = None
        self._is_sealed = threading.Event()  #: set when the last state written is complete on this node
        self._is_closing = False
        self.background_s = 0.0  #: seconds until the last copy was complete, here and on the partner

    @staticmethod
    def of_this_rank(rank: int, world_size: int, attempt: int, environ: Mapping[str, str]) -> Memory:
        """Open the files that the agent holds for this rank. Without files, log a warning: then no rank uses any."""
        seat = Seat.of_environment(rank, world_size, environ)
        try:
            if seat.files:
                one_node = seat.local_world_size == world_size
                peer = environ.get("MASTER_ADDR", "127.0.0.1")
                return Memory(seat, attempt, None if one_node else network.rank_address(environ, peer))
            why = "no agent of the toolkit has started this rank"
        except (OSError, ToolkitError) as error:
            why = str(error)
        log.warning("%s is not used: %s", KEY, why)
        return Memory(dataclasses.replace(seat, files=()), attempt)

    # ------------------------------------------------------------------------------------------------------- writing

    def wait(self) -> float:
        """Wait until the last state written is complete, here and on the partner. Return the seconds."""
        started = time.monotonic()
        if self._completing is not None:
            self._completing.join()
        return time.monotonic() - started

    def shortage(self, state: State) -> str | None:
        """Return why copies of ``state`` do not fit into the node's memory, or None. Log their size if they fit."""
        (_, shared), (_, own) = (_layout(part) for part in _split(state))
        # Two files for each part, and two more for the partner's where there is a partner.
        copies = 4 if self._partner_told is not None else 2
        ranks = self._seat.local_world_size
        held = sum(_held_bytes(path) for path in self._seat.files)
        needed, free = 2 * shared + copies * own * ranks - held, _free_bytes()
        if needed <= free:
            sizes = f"2 x {shared / 1e6:.1f} MB a node, {copies} x {own / 1e6:.1f} MB a rank"
            log.info("the state is kept in memory, too: %s", sizes)
            return None
        return (
            f"{KEY}: the copies of the state of {ranks} ranks take {needed / 1e9:.1f} GB more of this node's memory "
            f"(2 x {shared / 1e9:.1f} and {ranks} x {copies} x {own / 1e9:.1f}), and {free / 1e9:.1f} GB are free: "
            "raise cluster.mem_gb, or set it to null"
        )

    def write(self, step: int, state: State, meta: Mapping[str, Json]) -> float:
        """Copy ``state`` as it is after ``step`` steps. Return the seconds that allocating memory took besides.

        Call it when all ranks have returned from :meth:`wait`. A thread computes the digests and makes the partner's
        copy while the training goes on.
        """
        shared, own = _split(state)
        is_on_gpu = any(isinstance(entry.value, torch.Tensor) and entry.value.is_cuda for entry in state.values())
        about: dict[str, Json] = {
            "attempt": self._attempt,
            "step": step,
            "world_size": self._seat.world_size,
            "meta": dict(meta),
        }
        parts = [_PartWriter(self._own, own, {**about, "of": self._seat.rank}, self._seat.rank)]
        # This rank's own part stays the last: the partner gets a copy of it.
        if self._shared is not None:
            parts.insert(0, _PartWriter(self._shared, shared, {**about, "of": None}, self._seat.rank))
        # Allocating is timed apart: it happens only where a file must grow, and would make the copy look slow.
        started = time.monotonic()
        for part in parts:
            part.open(pinned=is_on_gpu)
        opened_s = time.monotonic() - started
        for part in parts:
            part.copy()
        # Copies from a GPU are only enqueued here; the thread waits for them.
        wait_for_gpu = _event() if is_on_gpu else None
        started = time.monotonic()
        self._is_sealed.clear()

        def complete() -> None:
            try:
                if wait_for_gpu is not None:
                    wait_for_gpu()
                for part in parts:
                    part.seal()
            finally:
                # :meth:`close` waits for this only: the partner may have died.
                self._is_sealed.set()
            self._send_to_partner(parts[-1].file, step)
            self.background_s = time.monotonic() - started

        self._completing = threading.Thread(target=complete, name=f"memory-{step}", daemon=True)
        self._completing.start()
        return opened_s

    def _send_to_partner(self, file: MemoryFile, step: int) -> None:
        if self._partner_told is None or self._is_closing:
            return
        try:
            if self._sender is None:
                self._sender = Sender(self._partner_told)
            self._sender.send(file, Role.PARTNER)
        except (OSError, EOFError) as error:
            # Lose the partner's copy, not the training.
            if not self._is_closing:
                log.warning("from step %d on another node has no copy of this rank's state: %s", step, error)
            self._partner_told = None

    def close(self) -> None:
        """Wait until the last state written is complete here. Do not wait for the partner, which may have died."""
        self._is_closing = True
        if self._completing is not None:
            self._is_sealed.wait()
        if self._sender is not None:
            self._sender.close()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None  # it refers to this object: neither would be freed

    # ------------------------------------------------------------------------------------------------------- reading

    def load(
        self, places: State | Callable[[Manifest], State], kv: KeyValue | None, newer_than: int | None
    ) -> Loaded | None:
        """Fill ``places`` with the newest state that the ranks' nodes hold, if its step is above ``newer_than``.

        Every rank calls it once, before it writes, and all return a state, or all None. None may mean that a rank found
        its copy damaged: what was filled by then must be filled again from a checkpoint. Only rank 0's ``newer_than``
        counts.
        """
        rank, world_size = self._seat.rank, self._seat.world_size
        topic = f"memory/{self._attempt}"
        talk = Exchange(kv, rank=rank, world_size=world_size, topic=topic, number=1, timeout_s=_TIMEOUT_S)
        # Publish where others can send to, before anyone is asked to send.
        if self._address is not None and kv is not None:
            self._receiver = Receiver(self._address, self._place, self._take)
            kv.set(self._key(rank), json.dumps(self._receiver.told))
        with nullcontext() if rank else failures_told(talk, "no state was loaded from memory"):
            agreed = self._agree(talk, newer_than or 0)
            # All ranks learn the same plan, so they take the same branches below.
            if agreed.has_partners and kv is not None:
                self._partner_told = self._told(kv, (rank + self._seat.local_world_size) % world_size)
            self.is_usable = not agreed.without
            if agreed.without and not rank and self._seat.files:
                log.warning("%s is not used: no files for rank %s", KEY, listing([*map(str, agreed.without)], 8))
            if agreed.moment is None:
                return None
            self._loaded = moment = agreed.moment
            transfer = partial(self._transfer, moment, agreed, kv)
            if agreed.transfers and self._together(talk, transfer) is None:
                return None
            loaded = self._together(talk, partial(self._fill, places, moment))
        if loaded is not None and rank == 0:
            log.info("resuming from memory, where step %d is", moment[1])
        return loaded

    def _key(self, rank: int) -> str:
        return f"memory/{self._attempt}/receiver/{rank}"

    def _told(self, kv: KeyValue, rank: int) -> Mapping[str, Any]:
        told: Mapping[str, Any] = json.loads(kv.get(self._key(rank)))
        return told

    def _agree(self, talk: Exchange, newer_than: int) -> RestorePlan:
        seat = self._seat
        held = self._held() if seat.local_rank == 0 else []
        own = MemoryReport(seat.node, seat.local_world_size, bool(seat.files), held)
        if seat.rank:
            talk.report(dataclasses.asdict(own))
            return RestorePlan.of_json(talk.listen())
        # Rank 0 alone makes the plan, and all ranks follow it.
        agreed = plan_restore(
            {0: own, **{rank: MemoryReport(**told) for rank, told in talk.gather().items()}}, newer_than
        )
        talk.tell(dataclasses.asdict(agreed))
        return agreed

    def _held(self) -> list[tuple[int, int, int | None]]:
        """Return what the files of this node hold: attempt, step and part of each."""
        labels = [label for path in self._seat.files if (label := _label(path)) is not None]
        return [(*label.moment, label.of) for label in labels if label.world_size == self._seat.world_size]

    def _together(self, talk: Exchange, action: Callable[[], T]) -> T | None:
        """Return what ``action`` returns here; None on all ranks if it fails on one. Then a checkpoint is left."""
        result, problems = None, []
        try:
            result = action()
        except Exception as error:
            problems.append(f"rank {self._seat.rank}: {describe(error)}")
        # Every rank reports; rank 0 decides and tells all.
        if self._seat.rank:
            talk.report({"problems": problems})
            return result if talk.listen()["done"] else None
        problems += [problem for report in talk.gather().values() for problem in report["problems"]]
        talk.tell({"done": not problems})
        if problems:
            log.warning("the state in memory is not used: %s", "; ".join(problems))
        return None if problems else result

    def _transfer(self, moment: Moment, agreed: RestorePlan, kv: KeyValue | None) -> bool:
        """Send and receive this rank's part of the transfers."""
        assert kv is not None  # there is another node
        rank, failed = self._seat.rank, f"memory/{self._attempt}/failed"
        # Send first; what other ranks send arrives in the receiver's threads meanwhile.
        try:
            for transfer in agreed.transfers:
                if transfer.source == rank:
                    self._send(moment, transfer, kv)
        except Exception:
            kv.set(failed, "1")  # waiting ranks learn of the failure before their timeout
            raise
        expected, deadline = (
            sum(transfer.target == rank for transfer in agreed.transfers),
            time.monotonic() + _TIMEOUT_S,
        )
        # Wait for the parts that come to this rank, unless another rank has failed.
        while len(self._arrived) < expected:
            if kv.check([failed]) or time.monotonic() > deadline:
                raise CheckpointError("a part did not come from another node")
            time.sleep(_LOOK_S)
        if expected:
            log.info("%d parts of the state in memory came from other nodes", expected)
        return True

    def _send(self, moment: Moment, transfer: Transfer, kv: KeyValue) -> None:
        role = Role.SHARED if transfer.of is None else Role.OWN
        with (
            closing(self._find(moment, transfer.of)) as file,
            closing(Sender(self._told(kv, transfer.target))) as sender,
        ):
            sender.send(file, role)

    def _place(self, role: Role) -> MemoryFile:
        """Return the file for a part that is arriving. Raises OSError where both files are needed for the load."""
        pair = {Role.PARTNER: self._partner, Role.OWN: self._own, Role.SHARED: self._shared}[role]
        assert pair is not None
        held = pair.next.label()
        if role is not Role.PARTNER and held is not None and held.moment == self._loaded:
            raise OSError("both files hold parts of the step that is being loaded")
        return pair.next

    def _take(self, role: Role) -> None:
        """Note that a part has arrived completely."""
        pair = {Role.PARTNER: self._partner, Role.OWN: self._own, Role.SHARED: self._shared}[role]
        assert pair is not None
        pair.turn()
        if role is not Role.PARTNER:
            self._arrived.append(role)

    def _find(self, moment: Moment, of: int | None) -> MemoryFile:
        """Open the file of this node that holds that part. Raises CheckpointError where none does."""
        wanted = Label(moment, self._seat.world_size, of)
        for path in self._seat.files:
            file = MemoryFile(path)
            if file.label() == wanted:
                return file
            file.close()
        raise CheckpointError(f"no file holds {'the common part' if of is None else f'the part of rank {of}'} any more")

    def _fill(self, places: State | Callable[[Manifest], State], moment: Moment) -> Loaded:
        """Fill ``places`` from this node's files, and verify every byte."""
        seat = self._seat
        found: dict[str, TensorRecord] = {}
        values: dict[str, ValueRecord] = {}
        with closing(self._find(moment, None)) as shared, closing(self._find(moment, seat.rank)) as own:
            for file in (shared, own):
                described = file.read()
                assert described is not None
                meta: Mapping[str, Any] = described["about"]["meta"]
                found |= {name: file.placed(parse_tensor(fields)) for name, fields in described["tensors"].items()}
                values |= {name: parse_value(fields) for name, fields in described["about"]["values"].items()}
            # Both parts are described like one checkpoint, so that the reader of checkpoints fills the state.
            manifest = Manifest(moment[1], seat.world_size, {}, meta, {}, found, values)
            loaded = fill_state(places, manifest, IN_MEMORY, seat.rank, seat.world_size)
        # The next write must not go to the files that hold what was loaded.
        self._own.keep(Label(moment, seat.world_size, seat.rank))
        if self._shared is not None:
            self._shared.keep(Label(moment, seat.world_size, None))
        return loaded


class _PartWriter:
    """A part of the state that is being written into a file."""

    def __init__(self, pair: Pair, entries: Mapping[str, Entry], about: Mapping[str, Json], rank: int) -> None:
        self._pair, self.file, self._entries, self._rank = pair, pair.next, entries, rank
        self._starts, self._end = _layout(entries)
        values = {
            name: {"kind": KINDS[type(entry)], "rank": rank, "value": entry.value}
            for name, entry in entries.items()
            if name not in self._starts
        }
        self._about = json.dumps({**about, "values": values})  # serialized now: the values may change
        self._copies: dict[str, Entry] = {}

    def open(self, *, pinned: bool) -> None:
        """Allocate memory for the part; see :meth:`MemoryFile.open`."""
        self.file.open(self._end, at_once=True, pinned=pinned)

    def copy(self) -> None:
        """Copy the tensors, or enqueue the copies on the GPU."""
        self._copies = {name: _copy(name, self._entries[name], self.file, at) for name, at in self._starts.items()}

    def seal(self) -> None:
        """Compute the digests, and mark the file complete."""
        records = {name: _record(name, entry, self._rank, self._starts[name]) for name, entry in self._copies.items()}
        described = json.dumps({name: dataclasses.asdict(record) for name, record in records.items()})
        self.file.seal(f'{{"about": {self._about}, "tensors": {described}}}'.encode(), self._end)
        self._pair.turn()  # skipped on an error: the other file holds the newest state then


def _label(path: str) -> Label | None:
    with closing(MemoryFile(path)) as file:
        return file.label()


def _held_bytes(path: str) -> int:
    return 512 * Path(path).stat().st_blocks


def _split(state: State) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Return what all ranks have in common, and what this rank alone has."""
    shared: dict[str, Entry] = {name: entry for name, entry in state.items() if isinstance(entry, Replicated)}
    return shared, {name: entry for name, entry in state.items() if name not in shared}


def _event() -> Callable[[], None]:
    """Return a callable that waits until the GPU has done the work enqueued so far."""
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    wait: Callable[[], None] = done.synchronize
    return wait


def _layout(own: Mapping[str, Entry]) -> tuple[dict[str, int], int]:
    """Return where each tensor of ``own`` begins, and where the last one ends, in bytes."""
    starts: dict[str, int] = {}
    end = START
    for name, entry in own.items():
        if isinstance(entry.value, torch.Tensor):
            starts[name] = end
            size_bytes = entry.value.numel() * entry.value.element_size()
            end += -(-size_bytes // ALIGNMENT) * ALIGNMENT
    return starts, end


def _copy(name: str, entry: Entry, file: MemoryFile, start: int) -> Entry:
    """Return ``entry`` with a copy of its tensor in ``file``."""
    live = entry.value
    assert isinstance(live, torch.Tensor)
    tensors.check_plain(name, live)
    live = live.detach().resolve_conj().resolve_neg()
    if not live.numel():
        return entry
    kept = file.bytes_at(start, live.numel() * live.element_size())
    kept.copy_(live.contiguous().reshape(-1).view(torch.uint8), non_blocking=True)
    return dataclasses.replace(entry, value=kept.view(live.dtype).reshape(live.shape))


def _record(name: str, entry: Entry, rank: int, start: int) -> TensorRecord:
    """Describe the copy that begins at ``start``."""
    value = entry.value
    assert isinstance(value, torch.Tensor)
    shape = tuple(value.shape)
    whole, pieces = shape, [(value, (0,) * len(shape))]
    if isinstance(entry, Sharded):
        whole, pieces = entry.global_shape, [*entry.pieces()]
    parts = []
    for piece, offsets in pieces:
        data = tensors.to_bytes(name, piece)
        parts.append(TensorPart(file_name(rank), start, len(data), offsets, tuple(piece.shape), zlib.crc32(data)))
        start += len(data)
    return TensorRecord(KINDS[type(entry)], tensors.dtype_name(value), whole, tuple(parts))


def _free_bytes(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory that this process may still take: the machine's, or a control group's (version 2)."""
    found = [
        1024 * int(line.split()[1])
        for line in (proc / "meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    ]
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
        own = next((line[4:] for line in lines if line.startswith("0::/")), "")
        # A limit of any group above counts, too.
        for group in (groups / own, *(groups / own).parents):
            if (group / "memory.max").exists() and (limit := (group / "memory.max").read_text().strip()) != "max":
                found.append(int(limit) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):  # version 1, or a container that hides it
        pass
    return min(found, default=1 << 62)
