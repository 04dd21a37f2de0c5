"""Files whose samples lie end to end and can be found by offset: a block is a run of samples of a few megabytes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.fingerprint import crc
from toolkit.data.permutation import Indices
from toolkit.data.shards.index import Schema, ShardFile

#: A block has the samples that begin within so many bytes. The order depends on it: it must not change.
BLOCK_BYTES = 4 << 20
#: Pieces of a file that its digest covers, evenly spaced, and the bytes of each.
PIECES, PIECE_BYTES = 16, 4096


class RunsFormat:
    """What formats of such files share, see :class:`~toolkit.data.shards.index.ShardFormat`."""

    sample = "sample"  #: what a reader calls one

    def schema(self, file: ShardFile) -> Schema:
        """Return the columns, which no folder adds to."""
        return file.scan.schema

    def prepare(self, root: Path, files: Sequence[ShardFile]) -> None:
        """Do nothing: each file says all of itself."""

    def describe(self, file: ShardFile, block: int, number: int | None) -> str:
        """Return the numbers of a block's samples, or of sample ``number`` of it, within the file."""
        first, stop = samples_of(file, block)
        return f"{self.sample}s {first} to {stop - 1}" if number is None else f"{self.sample} {first + number}"


def rows_of(begins: Indices) -> Indices:
    """Return the samples of each block, of samples that begin at ``begins`` (n + 1,); the last is the end of all."""
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
    with path.open("rb", buffering=0) as file:
        content = os.pread(file.fileno(), end - begin, begin)
        # A read may return less than it was asked for.
        while len(content) < end - begin and (part := os.pread(file.fileno(), end - begin, begin + len(content))):
            content += part[: end - begin - len(content)]
    if len(content) < end - begin:
        raise ValueError(f"it ends at byte {begin + len(content)}, and {end} are needed")
    return content


def content_of(path: Path, file: ShardFile, block: int) -> tuple[int, bytes]:
    """Return a block's first sample and its bytes, where the scan has found the offsets ``begins``."""
    first, stop = samples_of(file, block)
    begins = file.scan.details["begins"]
    return first, read(path, int(begins[first]), int(begins[stop]))


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return samples by column."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def samples_of(file: ShardFile, block: int) -> tuple[int, int]:
    """Return the first sample of a block, counted within the file, and the one after its last."""
    return int(file.firsts[block]), int(file.firsts[block + 1])
