"""One file in memory: a part of a training state, complete or invalid.

A part is what one rank alone has, or what all ranks have in common. The file begins with a head: a magic number, and
where its description is. Tensors follow, then the description. The head is written last, once the digests of all
tensors are known: a process that dies in between leaves a file that counts as empty.
"""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.checkpoint import page_locked
from toolkit.checkpoint.manifest import TensorRecord
from toolkit.checkpoint.page_locked import ALIGNMENT

_HEAD = struct.Struct("<8sQQI")  #: magic number, start, size and crc32 of the description
_MAGIC = b"tkstate2"
#: Byte at which the tensors begin.
START = ALIGNMENT

#: When a state was copied: the attempt and the step.
Moment = tuple[int, int]


@dataclass(frozen=True)
class Label:
    """What a complete file holds: the part of rank ``of``. ``of`` is None for what all ranks have in common."""

    moment: Moment
    world_size: int
    of: int | None


class MemoryFile:
    """A file that an agent holds, opened by a rank."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        # Closed only when the last thread that sends or fills it is done: the number may be another file's by then.
        self._let_go = weakref.finalize(self, os.close, self._fd)
        self.name = str(self._fd)
        self._map: mmap.mmap | None = None
        self.is_pinned = False  #: True if copies from a GPU need not be waited for

    def close(self) -> None:
        """Close this descriptor; the agent keeps its own."""
        self._let_go()

    # ------------------------------------------------------------------------------------------------------- writing

    def open(self, end: int, *, at_once: bool = False, pinned: bool = False) -> None:
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
        """Declare the content invalid."""
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

    # ------------------------------------------------------------------------------------------------------- reading

    def extent(self) -> tuple[int, int] | None:
        """Return the description's start and size; None if the file is empty or not complete."""
        found = self._description()
        return None if found is None else (found[0], len(found[1]))

    def _description(self) -> tuple[int, bytes] | None:
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
        found = self._description()
        return None if found is None else json.loads(found[1])

    def label(self) -> Label | None:
        """Return what the file holds; None if it is empty or not complete."""
        described = self.read()
        if described is None:
            return None
        about = described["about"]
        return Label((about["attempt"], about["step"]), about["world_size"], about["of"])

    def placed(self, record: TensorRecord) -> TensorRecord:
        """Return ``record`` with the name under which this process finds the file."""
        parts = (dataclasses.replace(part, file=self.name) for part in record.parts)
        return dataclasses.replace(record, parts=tuple(parts))


class Pair:
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

    def keep(self, moment: Moment) -> None:
        """Have the file of ``moment``, if any, overwritten last. The training resumes from it."""
        self._files.sort(key=lambda file: (_moment(file) == moment, _moment(file)))


def _moment(file: MemoryFile) -> Moment:
    label = file.label()
    return (0, 0) if label is None else label.moment
