"""``python -m toolkit.plugins.staging.archive``: make one file of an environment or a folder.

A process that imports torch opens thousands of files. On a shared disk each node waits for each of them. So nodes read
one package as a whole. It is made once, in a folder next to the runs, and is named by its content: when a file of
the source changes there is another package. A file is its own package.

It reads a :class:`PackRequest` as JSON, and prints a line for each source: ``{"package"}`` or ``{"problem"}``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import sys
import tarfile
import time
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import IO

from toolkit.base import fsio, this_node, trust
from toolkit.base.errors import RequestError
from toolkit.devices.kinds import GPU_FILES, GPU_FOLDERS
from toolkit.files.records import FileRecord, JsonRecord

#: A package that no job has used for this long is removed; of one source all but the newest after a day.
UNUSED_S, REPLACED_S = 30 * 86_400.0, 86_400.0
BLOCK_BYTES = 1 << 20
#: The part of a disk that packages and copies leave free for others, and of available memory that copies may take.
LEFT_FREE, MEMORY_SHARE = 0.05, 0.5
#: Large files that an environment's copy only links to. Nothing reads them, or, on nodes without GPUs, nearly nothing.
LARGE_BYTES = 16 << 20
UNREAD_SUFFIXES = (".a", ".bc")
#: Folders of a base environment of conda that hold other environments and downloads.
LINKED_FOLDERS = ("pkgs", "envs")


class StagingError(RequestError):
    """What cannot be staged, and why; the run continues without."""


@dataclass(frozen=True)
class Archive(FileRecord):
    """One file, and what it becomes on a node."""

    source: str  #: what it is a copy of
    key: str  #: its name: another one whenever the source changes
    file: str
    size_bytes: int  #: of the file, as ``crc``
    crc: int
    is_archive: bool
    files: int  #: in what it becomes
    bytes: int
    program: str | None = None  #: of an environment: its Python, relative to the source
    mtime_ns: int = 0  #: of a file that is its own package


@dataclass(frozen=True)
class ArchiveSource(JsonRecord):
    """A path to be packed. ``program``: see :class:`Archive`."""

    path: str
    program: str | None = None


@dataclass(frozen=True)
class PackRequest(JsonRecord):
    """What to pack. A source with more than ``most_bytes`` is refused."""

    cache: str
    sources: tuple[ArchiveSource, ...]
    has_gpus: bool = False
    most_bytes: int | None = None
    nice: int = 0


@dataclass(frozen=True)
class PackAnswer(JsonRecord):
    """A line that the packer prints for a source: its package, or why it cannot be copied."""

    source: str
    package: Archive | None = None
    problem: str | None = None


@dataclass(frozen=True)
class _PackageEntry:
    """A file, folder or link of the source."""

    name: str  #: relative to it
    kind: bytes  #: as in a tar file
    mode: int = 0o700
    size: int = 0
    mtime_ns: int = 0
    target: str = ""  #: of a link


def pack(source: ArchiveSource, request: PackRequest) -> Archive:
    """Return the package of ``source``. It is made if there is none. Raises RequestError, OSError."""
    cache, path = Path(request.cache), Path(source.path)
    entries = _entries(source, request)
    total = sum(entry.size for entry in entries)
    if request.most_bytes is not None and total > request.most_bytes:
        raise StagingError(
            f"{path} has {fsio.size_text(total)}: a node would take longer to copy that than its imports wait for "
            "the shared disk"
        )
    key = _key(source, entries)
    fsio.make_dir(cache, parents=1)
    refuse_cache_of_others(cache)
    record = cache / f"{key}.json"
    file = cache / f"{key}.tar" if path.is_dir() else path
    known = Archive.read_or_none(record)
    size_bytes = file.stat().st_size if file.exists() else None
    # A record that names another file would have that read on the nodes, and removed by discard().
    if known is None or known.file != str(file) or known.size_bytes != size_bytes:
        known = _make(source, request, entries, key, file)
        fsio.write_json(record, known.to_json())
    os.utime(record)  # its last use
    _remove_unused(cache, known)
    return known


def _remove_unused(cache: Path, used: Archive) -> None:
    """Remove packages that no job uses any more, and what a killed packer has left."""
    now = time.time()
    for path in cache.iterdir():
        with contextlib.suppress(OSError):
            age_s = now - path.stat().st_mtime
            if age_s <= REPLACED_S:
                continue
            if ".tmp-" in path.name:
                path.unlink()
            elif path.suffix == ".json" and path.stem != used.key:
                other = Archive.read_or_none(path)
                if other is not None and (age_s > UNUSED_S or other.source == used.source):
                    path.unlink()
                    path.with_suffix(".tar").unlink(missing_ok=True)


def room_bytes(folder: Path) -> int:
    """Return how many bytes packages or copies may take in ``folder``."""
    status = os.statvfs(folder)
    room = int(status.f_bavail * status.f_frsize - LEFT_FREE * status.f_blocks * status.f_frsize)
    if this_node.file_system(folder) in ("tmpfs", "ramfs"):
        room = min(room, int(MEMORY_SHARE * this_node.available_memory_bytes()))
    return max(0, room)


def refuse_cache_of_others(cache: Path) -> None:
    """Raise RequestError if another user may change what is in ``cache``. Nodes run programs from there."""
    trust.refuse_untrusted(cache, "copies for the nodes")


def discard(package: Archive) -> None:
    """Remove a package that has turned out damaged. The next start makes another one."""
    with contextlib.suppress(OSError):
        if package.is_archive:
            Path(package.file).with_suffix(".json").unlink(missing_ok=True)
            Path(package.file).unlink(missing_ok=True)


def _key(source: ArchiveSource, entries: list[_PackageEntry]) -> str:
    text = "\n".join(str(entry) for entry in entries)
    return hashlib.sha256(f"{source.path}\n{text}".encode(errors="surrogateescape")).hexdigest()[:32]


# ---------------------------------------------------------------------------------------------------------- the source


def _entries(source: ArchiveSource, request: PackRequest) -> list[_PackageEntry]:
    """Return what is in the source, which may be a file, in a fixed order."""
    path, is_environment = Path(source.path), source.program is not None
    if not path.is_dir():
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise StagingError(f"{path} is neither a file nor a folder")
        return [_PackageEntry(path.name, tarfile.REGTYPE, status.st_mode, status.st_size, status.st_mtime_ns)]
    entries = list(_walk(str(path), "", LINKED_FOLDERS if is_environment else ()))
    for number, entry in enumerate(entries if is_environment else ()):
        if _is_linked(entry, request.has_gpus):
            entries[number] = _PackageEntry(entry.name, tarfile.SYMTYPE, target=str(path / entry.name))
    return entries


def _walk(folder: str, prefix: str, left_out: Collection[str]) -> Iterator[_PackageEntry]:
    """Yield what is in ``folder``. Of the folders whose names are in ``left_out`` only themselves."""
    for found in sorted(os.scandir(folder), key=lambda found: found.name):
        name, status = prefix + found.name, found.stat(follow_symlinks=False)
        if found.is_symlink():
            yield _PackageEntry(name, tarfile.SYMTYPE, target=_link_target(Path(found.path), name))
        elif found.is_dir():
            yield _PackageEntry(name, tarfile.DIRTYPE)
            if name not in left_out:
                yield from _walk(found.path, f"{name}/", left_out)
        elif found.is_file():
            yield _PackageEntry(name, tarfile.REGTYPE, status.st_mode, status.st_size, status.st_mtime_ns)


def _link_target(link: Path, name: str) -> str:
    """Return the target of a link. A relative one outside the source becomes absolute: the copy lies elsewhere."""
    target, depth = link.readlink(), name.count("/")
    for part in target.parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return str(link.absolute().parent / target)
    return str(target)


def _is_linked(entry: _PackageEntry, has_gpus: bool) -> bool:
    if entry.kind == tarfile.DIRTYPE:
        return entry.name in LINKED_FOLDERS
    if entry.size < LARGE_BYTES:
        return False
    path = PurePath(entry.name)
    is_for_gpus = any(part in GPU_FOLDERS for part in path.parts) or path.name.startswith(GPU_FILES)
    return path.suffix in UNREAD_SUFFIXES or (is_for_gpus and not has_gpus)


# --------------------------------------------------------------------------------------------------------- the package


class SummedFile:
    """A file whose bytes are counted and summed up while they pass."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size_bytes = self.crc = 0

    def read(self, size: int) -> bytes:
        """Return at most ``size`` bytes; none at the end."""
        data = self._file.read(size)
        self._add(data)
        return data

    def write(self, data: bytes) -> int:
        self._add(data)
        self._file.write(data)
        return len(data)

    def _add(self, data: bytes) -> None:
        self.crc = zlib.crc32(data, self.crc)
        self.size_bytes += len(data)


def _make(source: ArchiveSource, request: PackRequest, entries: list[_PackageEntry], key: str, file: Path) -> Archive:
    path = Path(source.path)
    is_archive = file != path
    if is_archive:
        # Another job may be making the same package. The name is that of the content: the later one replaces it.
        with fsio.atomic_path(file, replaces_file=True) as temporary:
            summed = _write_archive(path, entries, temporary)
            _refuse_changed(source, request, key)
    else:
        # A file is read once for its sum, by which nodes know that their copy is whole.
        with path.open("rb", buffering=0) as whole:
            summed = SummedFile(whole)
            while summed.read(BLOCK_BYTES):
                pass
        _refuse_changed(source, request, key)
    files = [entry for entry in entries if entry.kind != tarfile.DIRTYPE]
    return Archive(
        source=source.path,
        key=key,
        file=str(file),
        size_bytes=summed.size_bytes,
        crc=summed.crc,
        is_archive=is_archive,
        files=len(files),
        bytes=sum(entry.size for entry in files),
        program=source.program,
        mtime_ns=0 if is_archive else entries[0].mtime_ns,
    )


def _refuse_changed(source: ArchiveSource, request: PackRequest, key: str) -> None:
    """Raise StagingError if the source has another key now. The package would have only a part of the change."""
    if _key(source, _entries(source, request)) != key:
        raise StagingError(f"{source.path} was changed while it was packed")


def _write_archive(path: Path, entries: list[_PackageEntry], file: Path) -> SummedFile:
    needed, free = sum(entry.size for entry in entries), room_bytes(file.parent)
    if needed > free:
        raise StagingError(
            f"a package of {path} needs {fsio.size_text(needed)}, and {file.parent} has {fsio.size_text(free)}"
        )
    with os.fdopen(fsio.open_private(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as opened:
        summed = SummedFile(opened)
        with tarfile.open(fileobj=summed, mode="w|", bufsize=BLOCK_BYTES) as tar:  # type: ignore[call-overload]
            for entry in entries:
                _add(tar, path, entry)
    return summed


def _add(tar: tarfile.TarFile, path: Path, entry: _PackageEntry) -> None:
    info = tarfile.TarInfo(entry.name)
    info.type, info.mode, info.linkname = entry.kind, stat.S_IMODE(entry.mode), entry.target
    info.mtime = entry.mtime_ns // 10**9  # by whole seconds and the size Python knows whether a .pyc is valid
    if entry.kind != tarfile.REGTYPE:
        tar.addfile(info)
        return
    info.size = entry.size
    with (path / entry.name).open("rb") as content:
        try:
            tar.addfile(info, content)
        except OSError as error:
            raise error if error.errno else StagingError(f"{path / entry.name} became shorter") from error


def main() -> None:
    request = PackRequest.from_json(json.load(sys.stdin))
    os.nice(request.nice)
    for source in request.sources:
        try:
            answer = PackAnswer(source.path, package=pack(source, request))
        except RequestError as error:
            answer = PackAnswer(source.path, problem=str(error))
        except OSError as error:
            answer = PackAnswer(source.path, problem=f"{error.filename or source.path}: {error.strerror or error}")
        print(json.dumps(answer.to_json()), flush=True)


if __name__ == "__main__":
    main()
