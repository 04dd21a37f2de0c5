"""Tar files as WebDataset writes them.

Members in a row whose names differ only in the ending are a sample. The ending, from the first dot of the file's name
on, is the column, and its value the member's bytes. ``__key__`` is the name without the ending.
"""

from __future__ import annotations

import contextlib
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.data.permutation import Indices
from toolkit.plugins.formats.shards import index
from toolkit.plugins.formats.shards.index import REFUSED, Scan, Schema, ShardFile

KEY = "__key__"
_NAME = re.compile(r"^((?:.*/)?[^./][^./]*)\.([^/]+)$")


class TarFormat(index.ContiguousFormat):
    name = "tar"
    suffix = ".tar"

    def scan(self, path: Path) -> Scan:
        """Read the headers of all members, and skip what is between them."""
        samples: list[tuple[str, int]] = []  # key, and the offset of the first header
        kinds: list[str] = []
        places: list[tuple[int, int, int]] = []  # sample, begin and size of the member's data
        for member in _members(path):
            match = _NAME.match(member.name.removeprefix("./"))
            if match is None or match[1].startswith("__"):  # no ending, or a note such as __meta__.json
                continue
            key, kind = match.groups()
            if not samples or samples[-1][0] != key:
                samples.append((key, member.offset))
            places.append((len(samples) - 1, member.offset_data, member.size))
            kinds.append(kind)
        members = np.array(places, np.int64).reshape(-1, 3)
        end = int(members[-1, 1:].sum()) if len(members) else 0
        begins = np.array([*(begin for _, begin in samples), end], np.int64)
        keys = np.array([key.encode() for key, _ in samples], np.bytes_)
        names = np.array([kind.encode() for kind in kinds], np.bytes_)
        details = {
            "begins": begins,
            "keys": keys,
            "kinds": names,
            "members": members,
            "firsts": np.searchsorted(members[:, 0], np.arange(len(samples) + 1)),
        }
        digest = index.digest_of(path, keys.tobytes(), names.tobytes(), members.tobytes())
        rows = np.unique((begins[:-1] - begins[:1]) // index.BLOCK_BYTES, return_counts=True)[1].astype(np.int64)
        return Scan(_schema([key for key, _ in samples], names, members[:, 0]), rows, digest, details)

    def byte_range(self, file: ShardFile, block: int) -> tuple[int, int]:
        first, stop = index.sample_range(file, block)
        begins = file.scan.details["begins"]
        return int(begins[first]), int(begins[stop])

    def open(self, path: Path, file: ShardFile, block: int, columns: tuple[str, ...]) -> TarBlock:
        return TarBlock(self, path, file, block, columns)

    def describe(self, file: ShardFile, block: int, number: int | None) -> str:
        first, stop = index.sample_range(file, block)
        keys = file.scan.details["keys"]
        if number is None:
            return f"members {keys[first].decode()} to {keys[stop - 1].decode()}"
        return f"member {keys[first + number].decode()}"


def _members(path: Path) -> list[tarfile.TarInfo]:
    """Return the files in a tar. Raises ValueError, with the last good member, where it is damaged or cut off.

    tarfile ends quietly at a broken header, and where a file has been cut off between two members.
    """
    members: list[tarfile.TarInfo] = []
    with tarfile.open(path, "r:") as archive:
        with contextlib.suppress(tarfile.TarError):  # what is wrong follows from where it stopped
            for member in archive:
                if not (member.isfile() or member.isdir()):
                    raise ValueError(f"member {member.name} is a link or device; put files into it")
                if member.issparse():
                    raise ValueError(f"member {member.name} is stored as a sparse file; pack it without tar's -S")
                members.append(member)
        end = archive.offset
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(end)
        tail = file.read(tarfile.BLOCKSIZE)
    if members and members[-1].offset_data + members[-1].size > size:
        raise ValueError(f"it is truncated within member {members[-1].name}")
    # An archive ends with blocks of zeros.
    if len(tail) < tarfile.BLOCKSIZE or tail.strip(b"\0"):
        place = f"after member {members[-1].name}" if members else "at its beginning"
        raise ValueError(f"{place}: the next header is broken, or the file is truncated")
    return [member for member in members if member.isfile()]


def _schema(keys: list[str], kinds: Any, owners: Indices) -> Schema:
    """Return the endings as columns. One that a sample lacks, or has twice, is refused when it is asked for."""
    found = [(KEY, "str")]
    for kind in np.unique(kinds):
        counts = np.bincount(owners[kinds == kind], minlength=len(keys))
        wrong = np.flatnonzero(counts != 1)
        name = kind.decode()
        if wrong.size:
            how = "lacks it" if counts[wrong[0]] == 0 else "has it twice"
            found.append((name, f"{REFUSED}sample {keys[wrong[0]]} {how}"))
        else:
            found.append((name, "bytes"))
    return tuple(found)


class TarBlock:
    """A run of samples of a tar, in memory."""

    def __init__(self, kind: TarFormat, path: Path, file: ShardFile, block: int, columns: tuple[str, ...]) -> None:
        begin, end = kind.byte_range(file, block)
        self._content, self._columns = kind.read(self, path, begin, end), columns
        first, stop = index.sample_range(file, block)
        details = file.scan.details
        self._keys = details["keys"][first:stop]
        inside = slice(*details["firsts"][[first, stop]].tolist())
        kinds, members = details["kinds"][inside], details["members"][inside, 1:]
        members = np.stack([members[:, 0] - begin, members[:, 0] - begin + members[:, 1]], 1)
        # Every sample has one member of each column: the schema has refused others.
        self._members = {name: members[kinds == name.encode()] for name in columns if name != KEY}

    def row(self, number: int) -> dict[str, Any]:
        return {name: values[0] for name, values in self.rows(np.array([number])).items()}

    def rows(self, numbers: Indices) -> dict[str, Any]:
        found: dict[str, Any] = {KEY: [key.decode() for key in self._keys[numbers].tolist()]}
        for name, members in self._members.items():
            found[name] = [self._content[begin:end].tobytes() for begin, end in members[numbers].tolist()]
        return {name: found[name] for name in self._columns}
