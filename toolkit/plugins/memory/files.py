"""The files in memory that hold one rank's part of the training state, and that of a rank on another node.

A file begins with a head: a magic number, and where its description is. Tensors follow, then the description. The head
is written last, once all digests are known: a process that dies in between leaves a file that counts as empty.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from toolkit.base.errors import CheckpointError
from toolkit.checkpoint import tensors
from toolkit.checkpoint.manifest import file_name
from toolkit.checkpoint.writer import KINDS, parts_of, record_of
from toolkit.devices import page_locked
from toolkit.devices.page_locked import ALIGNMENT
from toolkit.nodes.agent import state_memory
from toolkit.ranks.state import Entry, Json, Replicated, State


@dataclass(frozen=True)
class MemorySlot:
    """The place of a rank, and the files that its node's agent holds. They are those of all ranks on the node."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    files: Sequence[str]

    @staticmethod
    def from_environment(rank: int, world_size: int, environ: Mapping[str, str]) -> MemorySlot:
        """Read torchrun's variables and the agent's."""
        local_rank, local_world_size = int(environ.get("LOCAL_RANK", 0)), int(environ.get("LOCAL_WORLD_SIZE", 1))
        files = state_memory.paths_of(environ.get(state_memory.VARIABLE, ""))
        return MemorySlot(rank, world_size, local_rank, local_world_size, files)

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


class RankFiles:
    """One rank's files: its own part and its partner's. A node's first rank also has those of the common part."""

    def __init__(self, slot: MemorySlot) -> None:
        """Open the files. Raises OSError."""
        self._slot = slot
        self.own, self.partner = DoubleBuffer(slot.own), DoubleBuffer(slot.partner)
        self.shared = DoubleBuffer(slot.files[: state_memory.FILES_A_NODE]) if slot.local_rank == 0 else None
        self.loaded: SavedStep | None = None  #: the moment that this attempt resumes from
        self.arrived: list[Role] = []  #: the parts to be loaded that have come from other nodes

    def held(self) -> list[tuple[int, int, int | None]]:
        """Return what the files of this node hold: attempt, step and part of each."""
        found = []
        for path in self._slot.files:
            with closing(MemoryFile(path)) as file:
                label = file.label()
            if label is not None and label.world_size == self._slot.world_size:
                found.append((*label.moment, label.of))
        return found

    def find(self, moment: SavedStep, of: int | None) -> MemoryFile:
        """Open the file of this node that holds that part. Raises CheckpointError where none does."""
        wanted = HeldPart(moment, self._slot.world_size, of)
        for path in self._slot.files:
            file = MemoryFile(path)
            if file.label() == wanted:
                return file
            file.close()
        raise CheckpointError(f"no file holds {'the common part' if of is None else f'the part of rank {of}'} any more")

    def protect(self, moment: SavedStep) -> None:
        """Have the files of ``moment`` overwritten last: the training resumes from them."""
        for pair in (self.own, self.partner, self.shared):
            if pair is not None:
                pair.protect(moment)

    def forget(self, moment: SavedStep) -> None:
        """Declare all parts of ``moment`` on this node invalid."""
        for path in self._slot.files:
            with closing(MemoryFile(path)) as file:
                label = file.label()
                if label is not None and label.moment == moment:
                    file.invalidate()

    def receive_file(self, role: Role) -> MemoryFile:
        """Return the file for a part that is arriving. Raises OSError where both files are needed for the load."""
        pair = self._pair(role)
        held = pair.next.label()
        if role is not Role.PARTNER and held is not None and held.moment == self.loaded:
            raise OSError("both files hold parts of the step that is being loaded")
        return pair.next

    def mark_received(self, role: Role) -> None:
        """Note that a part has arrived completely."""
        self._pair(role).turn()
        if role is not Role.PARTNER:
            self.arrived.append(role)

    def _pair(self, role: Role) -> DoubleBuffer:
        pair = {Role.PARTNER: self.partner, Role.OWN: self.own, Role.SHARED: self.shared}[role]
        assert pair is not None
        return pair


_HEAD = struct.Struct("<8sQQI")  #: magic number, start, size and crc32 of the description
_MAGIC = b"tkstate2"
#: Byte at which the tensors begin.
START = ALIGNMENT

#: When a state was copied: the attempt and the step.
SavedStep = tuple[int, int]


@dataclass(frozen=True)
class HeldPart:
    """What a complete file holds: the part of rank ``of``. ``of`` is None for what all ranks have in common."""

    moment: SavedStep
    world_size: int
    of: int | None


class Role(IntEnum):
    """What a receiver does with a file."""

    PARTNER = 0  #: keep it for the sender
    OWN = 1  #: the receiver's own part, to resume from
    SHARED = 2  #: what all ranks have in common, for all ranks of the receiver's node


class MemoryFile:
    """A file that an agent holds, opened by a rank."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        # Closed only when the last thread that sends or fills it is done: the number may be another file's by then.
        self._let_go = weakref.finalize(self, os.close, self._fd)
        self.name = str(self._fd)  #: below IN_MEMORY
        self._map: mmap.mmap | None = None
        self.is_pinned = False  #: True if copies from a GPU need not be waited for

    def close(self) -> None:
        """Close this descriptor; the agent keeps its own."""
        self._let_go()

    def allocate(self, end: int, *, at_once: bool = False, pinned: bool = False) -> None:
        """Declare the content invalid, and allocate memory for tensors up to ``end``.

        ``pinned``: page-lock it. ``at_once``: map all pages now. Otherwise writes would map them one by one, which
        costs ten times the copy. Raises OSError where there is no memory.
        """
        self.invalidate()
        if self._map is None or len(self._map) < end:
            if self._map is not None and self.is_pinned:
                page_locked.unlock(self._map)
            os.posix_fallocate(self._fd, 0, end)
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if at_once else 0)
            self._map = mmap.mmap(self._fd, end, flags=flags)
            self.is_pinned = pinned and page_locked.lock(self._map)

    def invalidate(self) -> None:
        os.pwrite(self._fd, bytes(_HEAD.size), 0)

    def bytes_at(self, start: int, size_bytes: int) -> torch.Tensor:
        """Return that part of the content, live."""
        assert self._map is not None
        return torch.frombuffer(self._map, dtype=torch.uint8, offset=start, count=size_bytes)

    def tensors(self, end: int) -> memoryview:
        """Return all tensors up to ``end``, live."""
        assert self._map is not None
        return memoryview(self._map)[START:end]

    def seal(self, described: bytes, end: int) -> None:
        """Declare the file complete, with the description ``described`` at ``end``."""
        os.pwrite(self._fd, described, end)
        head = _HEAD.pack(_MAGIC, end, len(described), zlib.crc32(described))
        os.pwrite(self._fd, head, 0)

    def description(self) -> tuple[int, bytes] | None:
        """Return the description's start and bytes; None if the file is empty or not complete."""
        head = os.pread(self._fd, _HEAD.size, 0)
        if len(head) < _HEAD.size:
            return None
        magic, start, size_bytes, crc32 = _HEAD.unpack(head)
        if magic != _MAGIC:
            return None
        described = os.pread(self._fd, size_bytes, start)
        return (start, described) if zlib.crc32(described) == crc32 else None

    def read(self) -> dict[str, Any] | None:
        """Return the description; None if the file is empty or not complete."""
        found = self.description()
        return None if found is None else json.loads(found[1])

    def label(self) -> HeldPart | None:
        """Return what the file holds; None if it is empty or not complete."""
        described = self.read()
        if described is None:
            return None
        about = described["about"]
        return HeldPart((about["attempt"], about["step"]), about["world_size"], about["of"])


class DoubleBuffer:
    """Two files, written in turn. While one is incomplete the other holds what was written before."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._files = [MemoryFile(path) for path in paths]
        self._files.sort(key=_moment)

    @property
    def next(self) -> MemoryFile:
        """Return the file to write next: one that holds nothing, or the older state."""
        return self._files[0]

    def turn(self) -> None:
        """Note that the file written last is complete: the other one is next."""
        self._files.reverse()

    def protect(self, moment: SavedStep) -> None:
        """Have the file of ``moment``, if any, overwritten last. The training resumes from it."""
        self._files.sort(key=lambda file: (_moment(file) == moment, _moment(file)))


def _moment(file: MemoryFile) -> SavedStep:
    label = file.label()
    return (0, 0) if label is None else label.moment


def split(state: State) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Return what all ranks have in common, and what this rank alone has."""
    shared: dict[str, Entry] = {name: entry for name, entry in state.items() if isinstance(entry, Replicated)}
    return shared, {name: entry for name, entry in state.items() if name not in shared}


def layout(own: Mapping[str, Entry]) -> tuple[dict[str, int], int]:
    """Return where each tensor of ``own`` begins, and where the last one ends, in bytes."""
    values = {name: entry.value for name, entry in own.items() if isinstance(entry.value, torch.Tensor)}
    return page_locked.layout(values, START)


class PartWriter:
    """A part of the state that is being written into a file."""

    def __init__(self, pair: DoubleBuffer, entries: Mapping[str, Entry], about: Mapping[str, Json], rank: int) -> None:
        self._pair, self.file, self._entries, self._rank = pair, pair.next, entries, rank
        self._starts, self._end = layout(entries)
        values = {
            name: {"kind": KINDS[type(entry)], "rank": rank, "value": entry.value}
            for name, entry in entries.items()
            if name not in self._starts
        }
        self._about = json.dumps({**about, "values": values})  # serialized now: the values may change
        self._copies: dict[str, Entry] = {}

    def allocate(self, *, pinned: bool) -> None:
        """Allocate memory for the part; see :meth:`MemoryFile.allocate`."""
        self.file.allocate(self._end, at_once=True, pinned=pinned)

    def copy(self) -> None:
        """Copy the tensors, or enqueue the copies on the GPU."""
        for name, start in self._starts.items():
            entry = self._entries[name]
            live = entry.value
            assert isinstance(live, torch.Tensor)
            tensors.check_plain(name, live)
            live = live.detach().resolve_conj().resolve_neg()
            if live.numel():
                kept = self.file.bytes_at(start, live.nbytes)
                kept.copy_(tensors.as_bytes(live.contiguous()), non_blocking=True)
                entry = dataclasses.replace(entry, value=kept.view(live.dtype).reshape(live.shape))
            self._copies[name] = entry

    def seal(self) -> None:
        """Compute the digests, and mark the file complete."""
        records: dict[str, dict[str, Json]] = {}
        for name, entry in self._copies.items():
            parts = [part for _, part in parts_of(name, entry, file_name(self._rank), self._starts[name])]
            records[name] = dataclasses.asdict(record_of(entry, parts))
        described = json.dumps(records)
        self.file.seal(f'{{"about": {self._about}, "tensors": {described}}}'.encode(), self._end)
        self._pair.turn()  # skipped on an error: the other file holds the newest state then
