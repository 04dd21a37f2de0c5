"""The manifest of a checkpoint, format version 2: the folder's content and its digests.

A checkpoint folder holds one `rank-00000.safetensors` per rank that wrote (a header, and tensors one after the other),
perhaps a folder of files that a library wrote, and `manifest.json`:

    {"format": 2, "crc32": "89abcdef", "manifest":
    { "step": 200, "world_size": 4, ..., "tensors": {...}, "values": {...}, "files": {...}, "headers": [...] }
    }

The first line stays the same in every later version. Its crc32 covers the version and the text below it, so each byte
of the folder is under a digest. A manifest is untrusted data: names that lead outside the folder are refused, and every
range is checked against the file's real size before memory is allocated for it. A library's file is a tensor of bytes,
named `file/<path>`, that fills the whole file. Tensors are found by the manifest, not by the header of their file.

A later version increases `FORMAT`, and `decode` must still read every version before it: it turns the fields of an
older one into those of `Manifest` before `_parse`. A checkpoint of each version is kept with the tests. Its bytes are
never generated again, and it must load bit for bit. In format 1 a rank's file was `rank-00000.bin`, without a header.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from toolkit.base import fsio
from toolkit.base.errors import CheckpointError
from toolkit.files import records
from toolkit.files.records import Scalar, one_of

FORMAT = 2
NAME = "manifest.json"
#: Prefix of the names of tensors that are a library's files. The library reads them itself.
FILES = "file/"
_HEAD = re.compile(rb'\{"format": (\d+), "crc32": "([0-9a-f]{8})", "manifest":\n')
_TAIL = b"\n}\n"
_FILE_NAME = re.compile(r"rank-\d{5,}\.(bin|safetensors)|(?!\.{1,2}/)[^/\0]+(/(?!\.{1,2}(/|$))[^/\0]+)+")
#: torch's names, with the bits of an element: bool, int4, bfloat16, float8_e4m3fn, bits2x4, ...
_DTYPE = re.compile(r"bool|(?:bfloat|float|b?complex|q?u?int|bits)([1-8]|16|32|64|128)(?:_e\w+|x\d)?")
Kind: TypeAlias = Annotated[str, one_of("replicated", "per_rank", "sharded")]
FileName: TypeAlias = Annotated[
    str,
    Scalar(
        "of the form rank-00000.safetensors",
        lambda name: isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None,
    ),
]
#: Any text, and any JSON, as it is.
Name: TypeAlias = Annotated[str, Scalar("a name", lambda name: isinstance(name, str))]
AsItIs: TypeAlias = Annotated[Any, Scalar("JSON", lambda value: True)]
_CHUNK_BYTES = 1 << 24


class CorruptCheckpointError(CheckpointError):
    """An error for files that are not what was written. An older checkpoint may still be good."""


#: The folder of parts in memory. Their file names are numbers of this process's descriptors.
IN_MEMORY = Path("/proc/self/fd")


@dataclass(frozen=True)
class TensorPart:
    """A rectangle of a tensor, in C order in `file`. Its bytes are `[start, start + size_bytes)`."""

    file: FileName
    start: int
    size_bytes: int
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    crc32: int


@dataclass(frozen=True)
class TensorRecord:
    """One tensor: kind, dtype, global shape and the parts that cover it. `dtype` is torch's name without `torch.`."""

    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]


@dataclass(frozen=True)
class ValueRecord:
    """A value that is not a tensor; `rank` is the rank that wrote it."""

    kind: Kind
    rank: int
    value: AsItIs


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint except the tensors' bytes."""

    step: int
    world_size: int
    versions: Mapping[str, str]
    meta: Mapping[str, AsItIs]
    files: Mapping[FileName, int]  # name to size in bytes
    tensors: Mapping[Name, TensorRecord]
    values: Mapping[Name, ValueRecord]
    headers: tuple[TensorPart, ...] = ()  # of the ranks' files: the bytes before the tensors

    def parts(self) -> Iterator[tuple[str, TensorPart]]:
        """Yield every range of bytes in the files, with the name of what it holds."""
        for header in self.headers:
            yield "its header", header
        for name, record in self.tensors.items():
            for part in record.parts:
                yield name, part

    def encode(self) -> bytes:
        """Return the content of the manifest's file. Raises CheckpointError for a value that is not JSON."""
        try:
            body = json.dumps(self, default=_fields)  # dataclasses.asdict copies, and an indent takes the slow encoder
        except (TypeError, ValueError) as error:
            name = next((name for name, record in self.values.items() if not _is_json(record)), "the meta data")
            raise CheckpointError(
                f"only JSON is stored next to tensors, and {name} is not: {error}; "
                "hand over a tensor or plain numbers, strings, lists and mappings"
            ) from error
        return _frame(FORMAT, body.encode())


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a record of this file. Raises TypeError for others: a tensor would become ``{}``."""
    if not isinstance(value, (Manifest, TensorRecord, TensorPart, ValueRecord)):
        raise TypeError(f"there is an object of type {type(value).__qualname__} in it")
    return vars(value)


def _is_json(record: ValueRecord) -> bool:
    try:
        json.dumps(record, default=_fields)
    except (TypeError, ValueError):
        return False
    return True


def _frame(version: int, body: bytes) -> bytes:
    crc32 = zlib.crc32(body, zlib.crc32(b"%d\n" % version))
    return b'{"format": %d, "crc32": "%08x", "manifest":\n%b' % (version, crc32, body) + _TAIL


def decode(raw: bytes, where: Path) -> Manifest:
    """Read a file's content. Raises CorruptCheckpointError for a wrong byte, CheckpointError for a newer format."""
    head = _HEAD.match(raw)
    version = int(head[1]) if head else 0
    body = raw[head.end() : -len(_TAIL)] if head else b""
    # Building the file again from its parts compares the crc32 and every byte around the body.
    if raw != _frame(version, body):
        raise CorruptCheckpointError(f"{where} is damaged: its content does not match its own crc32")
    # Only after the crc32: a damaged version number must not look like a newer format.
    if version > FORMAT:
        raise CheckpointError(
            f"{where} has format {version} and this toolkit reads up to format {FORMAT}; "
            "update the toolkit, or resume with the version that wrote it"
        )
    try:
        fields = json.loads(body)
        if version == 1:
            fields["headers"] = []
        return _parse(fields)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise CorruptCheckpointError(f"{where} is not a manifest of format {version}: {error!r}") from error


def _parse(fields: Any) -> Manifest:
    """Return the manifest, with every number and name checked. :func:`decode` names what it may raise."""
    meta = fields["meta"]
    # Commands read the metrics and the identity of the run.
    for number in (meta.get("metrics") or {}).values():
        if number is not None and (isinstance(number, bool) or not isinstance(number, (int, float))):
            raise ValueError(f"the metric {number!r} is not a number")
    dict((meta.get("identity") or {}).items())
    manifest = records.decode(Manifest, fields)
    for record in manifest.tensors.values():
        check_size(record)
    # Parts must lie end to end in their files and cover their tensors: so no byte is outside a digest.
    ends = dict.fromkeys(manifest.files, 0)
    parts = [part for _, part in manifest.parts()]
    # The next part of a file must begin where the one before ended.
    for part in sorted(parts, key=lambda part: (part.file, part.start, part.size_bytes)):
        if ends[part.file] != part.start:
            raise ValueError(f"{part.file} has a gap or an overlap at byte {part.start}")
        ends[part.file] += part.size_bytes
    if ends != dict(manifest.files):
        raise ValueError(f"files of {dict(manifest.files)} bytes hold tensors of {ends} bytes")
    for name, record in manifest.tensors.items():
        check_cover(name, record)
        if len(record.parts) > 1 and record.kind != "sharded":
            raise ValueError(f"{name} is {record.kind} and in {len(record.parts)} parts")
    both = manifest.tensors.keys() & manifest.values.keys()
    strangers = [name for name, value in manifest.values.items() if value.rank >= manifest.world_size]
    if both or strangers:
        raise ValueError(f"{[*sorted(both), *strangers]}: both a tensor and a value, or of a rank that did not exist")
    return manifest


def check_size(tensor: TensorRecord) -> None:
    """Raise ValueError for a part that does not have the bytes of its shape, and for an unknown dtype."""
    match = _DTYPE.fullmatch(tensor.dtype)  # by its name, for readers without torch
    if match is None:
        raise ValueError(f"{tensor.dtype!r} is not a dtype of torch")
    width = max(1, int(match[1] or 8) // 8)  # elements of fewer than 8 bits have a byte each
    for part in tensor.parts:
        if part.size_bytes != math.prod(part.shape) * width:
            raise ValueError(f"{part.size_bytes} bytes are not the size of {part.shape} of {tensor.dtype}")


def file_name(rank: int) -> str:
    """Return the name of the file that `rank` writes."""
    return f"rank-{rank:05d}.safetensors"


def library_files(folder: Path) -> dict[str, TensorRecord]:
    """Return the records of the files that a library wrote into folders of `folder`. Flush them to disk."""
    found: dict[str, TensorRecord] = {}
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    # Folders only: the files next to them are the ranks'.
    for below in (path for path in sorted(folder.iterdir()) if stat.S_ISDIR(path.stat().st_mode)):
        fsio.make_private_and_sync(below)
        for path in fsio.everything_below(below):
            if path.is_symlink():
                raise CheckpointError(f"{path} is a link: what it leads to would not be in the checkpoint")
            if stat.S_ISREG((status := path.stat()).st_mode):
                name, size = str(path.relative_to(folder)), status.st_size
                with fsio.open_file(path) as file:
                    part = TensorPart(name, 0, size, (0,), (size,), _crc_of(file, size, buffer))
                found[FILES + name] = TensorRecord("replicated", "uint8", (size,), (part,))
    return found


def check_cover(name: str, record: TensorRecord) -> None:
    """Raise ValueError unless the parts are disjoint rectangles that fill the tensor."""
    for part in record.parts:
        if not len(part.offsets) == len(part.shape) == len(record.shape):
            raise ValueError(f"{name}: part {part.shape} at {part.offsets} of {record.shape}: dimensions differ")
        spans = zip(part.offsets, part.shape, record.shape, strict=True)
        if any(offset + size > whole for offset, size, whole in spans):
            raise ValueError(f"{name}: part {part.shape} at {part.offsets} stands outside {record.shape}")
    # Parts inside the tensor that add up to its size and share no element leave no gap.
    filled = sum(math.prod(part.shape) for part in record.parts)
    if not record.parts or filled != math.prod(record.shape) or _meet(record.parts):
        raise ValueError(f"{name}: {len(record.parts)} parts of {filled} elements do not make up {record.shape}")


def _meet(parts: tuple[TensorPart, ...]) -> bool:
    """True if two of the rectangles share an element.

    Only neighbors along the dimension with the most cuts can meet, so the time grows with the number of parts, not with
    its square.
    """
    solid = [part for part in parts if math.prod(part.shape)]
    if not solid or not solid[0].shape:
        # A tensor without dimensions has one element: two parts of it always meet.
        return len(solid) > 1
    cuts = [len(set(along)) for along in zip(*(part.offsets for part in solid), strict=True)]
    axis = cuts.index(max(cuts))
    solid.sort(key=lambda part: part.offsets[axis])
    for index, p in enumerate(solid):
        for other in range(index + 1, len(solid)):
            q = solid[other]
            # The parts are sorted: no later one can reach back to p.
            if q.offsets[axis] >= p.offsets[axis] + p.shape[axis]:
                break
            if all(a < b + n and b < a + m for a, m, b, n in zip(p.offsets, p.shape, q.offsets, q.shape, strict=True)):
                return True
    return False


def read(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in `folder`. Raises CheckpointError as `decode` does, or if unreadable."""
    path = folder / NAME
    with unreadable_is_corrupt(path):
        return decode(fsio.read_bytes(path, fsio.LONG_BYTES), path)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise CorruptCheckpointError unless every file is there with the size that the manifest gives."""
    for name, size_bytes in manifest.files.items():
        with unreadable_is_corrupt(folder / name):
            found = (folder / name).lstat().st_size
        if found != size_bytes:
            raise CorruptCheckpointError(f"{folder / name} has {found} bytes instead of {size_bytes}")


def check_parts(folder: Path, parts: Iterable[tuple[str, TensorPart]]) -> None:
    """Read every byte of parts, each with its name. Raises CorruptCheckpointError for the first with wrong bytes."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    for name, part in parts:
        with unreadable_is_corrupt(folder / part.file), open_part(folder, part) as file:
            found = _crc_of(file, part.size_bytes, buffer)
        check_crc(folder, name, part, found)


def _crc_of(file: FileIO | BufferedReader, size_bytes: int, buffer: memoryview) -> int:
    crc = 0
    while size_bytes and (got := file.readinto(buffer[:size_bytes])):
        crc = zlib.crc32(buffer[:got], crc)
        size_bytes -= got
    return crc


def check_crc(folder: Path, name: str, part: TensorPart, found: int) -> None:
    """Raise CorruptCheckpointError unless the crc32 found is that of the part."""
    if found != part.crc32:
        raise CorruptCheckpointError(
            f"{folder / part.file} is damaged: {name} (bytes {part.start} to {part.start + part.size_bytes}) "
            f"has crc32 {found:08x} instead of {part.crc32:08x}"
        )


@contextmanager
def open_part(folder: Path, part: TensorPart) -> Iterator[FileIO]:
    """Yield the part's file, positioned at its first byte. Refuse a symbolic link: it could lead outside the folder."""
    # The entries of /proc/self/fd are links, and this process itself has opened their files.
    no_link = 0 if folder == IN_MEMORY else os.O_NOFOLLOW
    fd = fsio.open_regular(str(folder / part.file), os.O_RDONLY | no_link)
    with os.fdopen(fd, "rb", buffering=0) as file:
        file.seek(part.start)
        yield file


@contextmanager
def unreadable_is_corrupt(path: Path) -> Iterator[None]:
    """Turn an OSError into a CorruptCheckpointError. For a reader a missing file is as bad as a damaged one."""
    try:
        yield
    except OSError as error:
        raise CorruptCheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
