"""The index of a folder of shards: the files, and each block's number of samples.

It is made file by file, from the files' footers or headers, and kept in the user's cache folder. A file whose size or
time of change differs from the index is scanned again.
"""

from __future__ import annotations

import io
import json
import os
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from toolkit.base import fsio, logs
from toolkit.base.errors import ConfigError, DataMissingError, listing
from toolkit.base.trust import cache_dir
from toolkit.data.fingerprint import crc
from toolkit.data.permutation import Indices

#: Changes with the meaning of what a cached index holds.
VERSION = 1

#: The columns of a file, each with its type; a type that begins with REFUSED says why the column cannot be read.
Schema = tuple[tuple[str, str], ...]
REFUSED = "!"

log = logs.get(__name__)


@dataclass(frozen=True)
class Scan:
    """The content of a file by its footer or headers: columns, samples, and digest.

    ``rows`` are the samples of each block. ``details`` are arrays that its format needs to read samples, of one kind
    each over all files.
    """

    schema: Schema
    rows: Indices
    digest: str
    details: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardFile:
    """A file of the data set; ``name`` is its path below the root, with slashes."""

    name: str
    size: int
    mtime_ns: int
    scan: Scan

    @cached_property
    def firsts(self) -> Indices:
        """The first sample of each block, counted within the file, and the number of samples."""
        return np.concatenate([[0], np.cumsum(self.scan.rows)]).astype(np.int64)


class OpenBlock(Protocol):
    """The samples of one block, in memory. Samples are counted from the block's first."""

    def row(self, number: int) -> dict[str, Any]:
        """Return one sample: tensors, texts, bytes or other objects by column."""

    def rows(self, numbers: Indices) -> dict[str, Any]:
        """Return samples by column: an array (n, ...), or a list of what :meth:`row` gives."""


class ShardFormat(Protocol):
    """A kind of file that holds samples. A new one implements this and is found by its suffix."""

    name: str
    suffix: str

    def scan(self, path: Path) -> Scan:
        """Return the content by the file's footer or headers. Raises any error for a damaged file."""

    def schema(self, file: ShardFile) -> Schema:
        """Return the columns of ``file``, including those that its folders give."""

    def prepare(self, root: Path, files: Sequence[ShardFile]) -> None:
        """Learn and check what follows from all files together. Called once, before any block is opened."""

    def open(self, path: Path, file: ShardFile, block: int, columns: tuple[str, ...]) -> OpenBlock:
        """Read a block. Raises any error for one that is damaged."""

    def pieces(self, path: Path, file: ShardFile, block: int, columns: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return the offset and length of each part of the file that :meth:`open` reads."""

    def describe(self, file: ShardFile, block: int, number: int | None) -> str:
        """Return the name of a block for messages, such as ``row group 3``. With ``number``: of that sample in it."""


class ShardIndex:
    """The files of a data set, and its blocks. Blocks without samples are left out."""

    def __init__(self, root: Path, files: list[ShardFile]) -> None:
        self.root = root
        self.files = files
        rows = np.concatenate([file.scan.rows for file in files])
        held = np.flatnonzero(rows)
        counts = [len(file.scan.rows) for file in files]
        self._file = np.repeat(np.arange(len(files)), counts)[held]
        self._block = np.concatenate([np.arange(count) for count in counts])[held]
        self.starts: Indices = np.concatenate([[0], np.cumsum(rows[held])]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def block_of(self, number: int) -> tuple[ShardFile, int]:
        """Return the file that has block ``number``, and which of the file's blocks it is."""
        return self.files[self._file[number]], int(self._block[number])

    def blocks_at(self, indices: Indices) -> Indices:
        """Return the block of each sample."""
        blocks: Indices = np.searchsorted(self.starts, indices, side="right") - 1
        return blocks

    def place_of(self, index: int) -> tuple[int, int]:
        """Return the block that has sample ``index``, and which of its samples it is."""
        block = int(self.blocks_at(np.array(index)))
        return block, index - int(self.starts[block])

    def digest(self) -> str:
        """Return a digest of the files' names, sizes and scans, wherever the folder is."""
        return crc([f"{file.name}\0{file.size}\0{file.scan.digest}\0".encode() for file in self.files])


def index_of(root: Path, kind: ShardFormat) -> ShardIndex:
    """Return the index of the files of ``kind`` below ``root``.

    Files that have not changed are taken from the cache. Raises DataMissingError where there are no files or no
    samples, ConfigError for a damaged file.
    """
    names = list(shard_names(root, kind.suffix))
    if not names:
        raise DataMissingError(f"{root}: there are no {kind.suffix} files in it; shards are looked for in all folders")
    folder, cached = cache_dir(), None
    if folder is not None:
        key = f"{root.absolute()}\0{kind.name}".encode()
        cached = folder / "shards" / f"{root.name or 'root'}-{crc([key])}{crc([key, b'again'])}.npz"
    known = _load(cached)
    # A file of the size and time in the cache is not opened.
    files, empty = [], []
    for name in names:
        stat = (root / name).stat()
        # A writer that had nothing to write, as many partitioned ones do.
        if not stat.st_size:
            empty.append(name or str(root))
            continue
        old = known.get(name)
        if old is None or (old.size, old.mtime_ns) != (stat.st_size, stat.st_mtime_ns):
            files.append(ShardFile(name, stat.st_size, stat.st_mtime_ns, _scan(root / name, kind)))
        else:
            files.append(old)
    changed = [file.name for file in files if known.get(file.name) is not file]
    # At the first index every file is new: there is nothing to warn of.
    if known and (changed or len(known) > len(files)):
        gone = sorted(set(known) - set(names))
        log.warning(
            "%s: shards have changed since the last index. New or changed: %s. Gone: %s",
            *(root, listing(changed) or "none", listing(gone) or "none"),
        )
    if changed or len(known) > len(files):
        _save(cached, files)
    return _checked(root, files, empty)


def _checked(root: Path, files: list[ShardFile], empty: Sequence[str]) -> ShardIndex:
    """Return the index of ``files``. ``empty`` are those without a byte."""
    without = [file.name for file in files if not file.scan.rows.sum()]
    empty = [*empty, *without]
    if len(without) == len(files):
        raise DataMissingError(f"{root}: its shards hold no samples: {listing(empty)}")
    if empty:
        log.warning("%s: shards without samples: %s", root, listing(empty))
    # Partitions (``column=value``) that hold none of the files are no error, but rarely meant.
    names = [file.name for file in files]
    inhabited = {str(parent) for name in names for parent in Path(name).parents}
    found = []
    for folder, folders, _ in os.walk(root):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        found += [str((Path(folder) / name).relative_to(root)) for name in folders if "=" in name]
    for folder in sorted(set(found) - inhabited):
        log.warning("%s: the partition %s is empty", root, folder)
    return ShardIndex(root, files)


def shard_names(root: Path, suffix: str = "") -> Iterator[str]:
    """Yield the files below ``root`` in order, also below links. As in Spark, ``.x`` and ``_x`` are not data."""
    # A root that is a file has the empty name below itself.
    if root.is_file():
        yield ""
        return
    if not root.is_dir():
        raise DataMissingError(f"{root}: there is no such folder")
    found = []
    for folder, folders, files in os.walk(root, followlinks=True):
        # Spark and Hadoop write below this folder, and remove it when their job has ended well.
        if "_temporary" in folders:
            raise ConfigError(
                f"{Path(folder) / '_temporary'}: what wrote these shards has not finished, or died; wait for it, or "
                "write them again"
            )
        folders[:] = [name for name in folders if not _is_hidden(name)]
        place = Path(folder).relative_to(root)
        found += [(place / name).as_posix() for name in files if name.endswith(suffix) and not _is_hidden(name)]
    yield from sorted(found)


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _scan(path: Path, kind: ShardFormat) -> Scan:
    try:
        return kind.scan(path)
    except MemoryError:
        raise
    except Exception as error:  # each library has errors of its own for a damaged file
        raise ConfigError(
            f"{path}: its samples cannot be counted: {error}. Write this shard again, or move it out of the folder"
        ) from error


# ------------------------------------------------------------------------------------------------------------ the cache


def _save(path: Path | None, files: list[ShardFile]) -> None:
    """Write the index. A cache that cannot be written costs the next start a scan, and nothing else."""
    if path is None:
        return
    schemas = sorted({file.scan.schema for file in files})
    lines = [[file.name, file.size, file.mtime_ns, file.scan.digest, schemas.index(file.scan.schema)] for file in files]
    head = {"version": VERSION, "schemas": schemas, "files": lines}
    # One array a key: those of all files end to end, with their lengths, by which they are divided again.
    arrays = {"rows": [file.scan.rows for file in files]}
    for key in files[0].scan.details:
        arrays[f"details/{key}"] = [file.scan.details[key] for file in files]
    packed: dict[str, NDArray[Any]] = {"head": np.frombuffer(json.dumps(head).encode(), np.uint8)}
    for key, parts in arrays.items():
        packed[key] = np.concatenate(parts)
        packed[f"lengths/{key}"] = np.array([len(part) for part in parts])
    content = io.BytesIO()
    np.savez(content, **packed)  # type: ignore[arg-type]  # its last parameter is no array
    try:
        fsio.make_dir(path.parent)
        fsio.write_atomic(path, content.getvalue(), durable=False)
    except OSError as error:
        log.warning("%s: the index of the shards is not kept: %s", path, error)


def _load(path: Path | None) -> dict[str, ShardFile]:
    """Return the files of a saved index by name. There are none if it is missing, damaged or of another version."""
    if path is None or not path.exists():
        return {}
    try:
        with np.load(io.BytesIO(path.read_bytes())) as packed:
            head = json.loads(packed["head"].tobytes())
            if head["version"] != VERSION:
                return {}
            arrays = {
                key: np.split(packed[key], np.cumsum(packed[f"lengths/{key}"])[:-1])
                for key in packed.files
                if key.startswith(("rows", "details/"))
            }
        schemas = [tuple((str(name), str(kind)) for name, kind in schema) for schema in head["schemas"]]
        known = {}
        for number, (name, size, mtime_ns, digest, schema) in enumerate(head["files"]):
            details = {key.removeprefix("details/"): parts[number] for key, parts in arrays.items() if key != "rows"}
            known[name] = ShardFile(
                name, size, mtime_ns, Scan(schemas[schema], arrays["rows"][number], digest, details)
            )
        return known
    except Exception as error:  # zipfile, numpy and json each have errors of their own for a damaged file
        log.warning("%s: this index of shards is damaged and is rebuilt: %s", path, error)
        return {}


#: A block has the samples that begin within this many bytes. The order depends on it: it must not change.
BLOCK_BYTES = 4 << 20
#: Pieces of a file that its digest covers, evenly spaced, and the bytes of each.
PIECES, PIECE_BYTES = 16, 4096
#: Buffers that are kept for later blocks.
BUFFERS = 8


class ContiguousFormat:
    """What formats share whose blocks are runs of bytes; see :class:`ShardFormat`."""

    def __init__(self) -> None:
        #: Of blocks that were dropped. In new memory the page faults take as long as the read.
        self._buffers: deque[NDArray[np.uint8]] = deque(maxlen=BUFFERS)

    def schema(self, file: ShardFile) -> Schema:
        return file.scan.schema

    def prepare(self, root: Path, files: Sequence[ShardFile]) -> None:
        """Do nothing: each file says all of itself."""

    def byte_range(self, file: ShardFile, block: int) -> tuple[int, int]:
        """Return where a block begins and ends in its file."""
        raise NotImplementedError

    def pieces(self, path: Path, file: ShardFile, block: int, columns: tuple[str, ...]) -> list[tuple[int, int]]:
        begin, end = self.byte_range(file, block)
        return [(begin, end - begin)]

    def read(self, owner: object, path: Path, begin: int, end: int) -> memoryview:
        """Return bytes ``begin`` to ``end``, valid while ``owner`` lives. Raises ValueError if the file is shorter."""
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = np.empty(0, np.uint8)
        if len(buffer) < end - begin:
            buffer = np.empty(end - begin, np.uint8)
        weakref.finalize(owner, self._buffers.append, buffer)
        content, done = buffer.data[: end - begin], 0
        with path.open("rb", buffering=0) as file:
            # All of it is asked of the disk at once, and no more than it.
            os.posix_fadvise(file.fileno(), begin, len(content), os.POSIX_FADV_WILLNEED)
            # A read may return less than it was asked for.
            while done < len(content) and (size := os.preadv(file.fileno(), [content[done:]], begin + done)):
                done += size
        if done < len(content):
            raise ValueError(f"it ends at byte {begin + done}, and {end} are needed")
        return content


def digest_of(path: Path, *more: bytes) -> str:
    """Return a digest of pieces of the file's content, its end included, and of ``more``."""
    pieces = []
    with path.open("rb") as file:
        last = max(file.seek(0, 2) - PIECE_BYTES, 0)
        for number in range(PIECES):
            file.seek(last * number // (PIECES - 1))
            pieces.append(file.read(PIECE_BYTES))
    return crc([*pieces, *more])


def sample_range(file: ShardFile, block: int) -> tuple[int, int]:
    """Return the first sample of a block and the one after its last. Both are counted within the file."""
    return int(file.firsts[block]), int(file.firsts[block + 1])
