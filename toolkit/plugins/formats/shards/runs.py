"""Files whose samples lie end to end and can be found by offset.

A block is a run of samples of a few megabytes.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.data.fingerprint import crc
from toolkit.data.permutation import Indices
from toolkit.plugins.formats.shards.index import Schema, ShardFile

#: A block has the samples that begin within so many bytes. The order depends on it: it must not change.
BLOCK_BYTES = 4 << 20
#: Pieces of a file that its digest covers, evenly spaced, and the bytes of each.
PIECES, PIECE_BYTES = 16, 4096
#: Most buffers that are kept to be used again.
BUFFERS = 8


class RunsFormat:
    """The shared methods of formats of such files; see :class:`~toolkit.plugins.formats.shards.index.ShardFormat`."""

    sample = "sample"  #: what a reader calls one

    def __init__(self) -> None:
        #: Of blocks that were dropped. In new memory the page faults take as long as the read.
        self._buffers: deque[NDArray[np.uint8]] = deque(maxlen=BUFFERS)

    def schema(self, file: ShardFile) -> Schema:
        """Return the columns, which no folder adds to."""
        return file.scan.schema

    def prepare(self, root: Path, files: Sequence[ShardFile]) -> None:
        """Do nothing: each file says all of itself."""

    def describe(self, file: ShardFile, block: int, number: int | None) -> str:
        """Return the name of a block, or of its sample ``number``, for messages. Samples count within the file."""
        first, stop = samples_of(file, block)
        return f"{self.sample}s {first} to {stop - 1}" if number is None else f"{self.sample} {first + number}"

    def span(self, file: ShardFile, block: int) -> tuple[int, int]:
        """Return where a block begins and ends in its file."""
        first, stop = samples_of(file, block)
        begins = file.scan.details["begins"]
        return int(begins[first]), int(begins[stop])

    def pieces(self, path: Path, file: ShardFile, block: int, columns: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return the offset and length of the block. The columns of a sample lie together."""
        begin, end = self.span(file, block)
        return [(begin, end - begin)]

    def read(self, owner: object, path: Path, begin: int, end: int) -> memoryview:
        """Return the bytes from ``begin`` to ``end``, valid while ``owner`` lives. Raises ValueError as ``read``."""
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = np.empty(0, np.uint8)
        if len(buffer) < end - begin:
            buffer = np.empty(end - begin, np.uint8)
        weakref.finalize(owner, self._buffers.append, buffer)
        content = buffer.data[: end - begin]
        _read_into(content, path, begin)
        return content


def rows_of(begins: Indices) -> Indices:
    """Return the number of samples in each block.

    The samples begin at ``begins`` (n + 1,), of which the last is the end of all.
    """
    counts: Indices = np.unique((begins[:-1] - begins[:1]) // BLOCK_BYTES, return_counts=True)[1]
    return counts.astype(np.int64)


def digest_of(path: Path, *more: bytes) -> str:
    """Return a digest of pieces of the file's content, its end included, and of ``more``."""
    pieces = []
    with path.open("rb") as file:
        last = max(file.seek(0, 2) - PIECE_BYTES, 0)
        for number in range(PIECES):
            file.seek(last * number // (PIECES - 1))
            pieces.append(file.read(PIECE_BYTES))
    return crc([*pieces, *more])


def read(path: Path, begin: int, end: int) -> bytes:
    """Return the bytes from ``begin`` to ``end``. Raises ValueError if the file is shorter."""
    content = bytearray(end - begin)
    _read_into(memoryview(content), path, begin)
    return bytes(content)


def _read_into(content: memoryview, path: Path, begin: int) -> None:
    done = 0
    with path.open("rb", buffering=0) as file:
        # All of it is asked of the disk at once, and no more than it.
        os.posix_fadvise(file.fileno(), begin, len(content), os.POSIX_FADV_WILLNEED)
        # A read may return less than it was asked for.
        while done < len(content) and (size := os.preadv(file.fileno(), [content[done:]], begin + done)):
            done += size
    if done < len(content):
        raise ValueError(f"it ends at byte {begin + done}, and {begin + len(content)} are needed")


class RunBlock(ABC):
    """A run of samples in memory, where the scan has found the offsets ``begins``."""

    def __init__(self, kind: RunsFormat, path: Path, file: ShardFile, block: int, columns: tuple[str, ...]) -> None:
        self.first, self.stop = samples_of(file, block)
        self.base, end = kind.span(file, block)
        self.content = kind.read(self, path, self.base, end)
        self.file, self.columns = file, columns

    @abstractmethod
    def row(self, number: int) -> dict[str, Any]:
        """See :class:`~toolkit.plugins.formats.shards.index.OpenBlock`."""

    def rows(self, numbers: Indices) -> dict[str, Any]:
        rows = [self.row(number) for number in numbers.tolist()]
        return {name: [row[name] for row in rows] for name in self.columns}


def samples_of(file: ShardFile, block: int) -> tuple[int, int]:
    """Return the first sample of a block and the one after its last. Both are counted within the file."""
    return int(file.firsts[block]), int(file.firsts[block + 1])
