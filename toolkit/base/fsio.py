"""Durable, atomic file writes with private modes, and reads of files that somebody else may have replaced.

A file is written beside its place, flushed to disk and renamed. So a reader sees the old content or the new and never
half of it, at whatever point the writer dies. Folders are 0700 and files 0600 under any umask: a run holds sources,
logs and data that its owner did not offer to the whole cluster. Every rename of the package is in this module.

In a folder for the runs of several users anything may lie in place of a file. Opening a named pipe would wait for its
writer for ever, a device has no end, and a file of a terabyte does not fit into memory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import io
import json
import logging
import os
import re
import secrets
import shutil
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from toolkit.base.process_limits import limits

_log = logging.getLogger("toolkit.base.fsio")

DIR_MODE = 0o700
FILE_MODE = 0o600
#: Names the umask that the user's processes had before :func:`set_private_umask`.
UMASK_VARIABLE = "TOOLKIT_UMASK"
#: No file of a run has a larger figure: sums of such would be infinite.
FIGURES = 1e300


#: What a file system says that has no links.
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)


def is_there(path: Path) -> bool:
    """True if there is a file or folder of this name. Raises OSError where the disk does not say.

    ``Path.exists`` and its kind answer False then, from Python 3.14 on: a file server that is away has no files.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def make_dir(path: Path, parents: int | None = None) -> Path:
    """Create ``path`` and its missing parents, each 0700. An existing folder stays as it is.

    ``parents`` is the most that may be missing; FileNotFoundError if more are. In a run folder whose file system is
    unmounted, all would be created on the disk below, and what is written there would be lost when it is mounted again.
    """
    if path.is_dir():
        return path
    if parents != 0:
        make_dir(path.parent, None if parents is None else parents - 1)
    with contextlib.suppress(FileExistsError):  # another rank was faster
        make_new_dir(path)
    return path


def make_new_dir(path: Path) -> None:
    """Create the folder ``path``, 0700, in an existing one. Raises FileExistsError if another process was faster."""
    path.mkdir(mode=DIR_MODE)
    path.chmod(DIR_MODE)  # the umask reduces mkdir's mode


def expand(path: str | Path) -> Path:
    """Return ``path`` with ``~`` replaced by the home folder; unchanged without one, or without such a user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def entries(folder: Path, pattern: str = "*") -> list[Path]:
    """Return what is in ``folder`` in order; nothing where there is none. Raises OSError where the disk does not say.

    ``Path.glob`` finds nothing then, from Python 3.13 on.
    """
    try:
        return sorted(path for path in folder.iterdir() if fnmatch.fnmatchcase(path.name, pattern))
    except (FileNotFoundError, NotADirectoryError):
        return []


def everything_below(folder: Path) -> Iterator[Path]:
    """Yield all files and folders below ``folder`` in order; links are not followed. Raises OSError as `entries`."""
    for path in entries(folder):
        yield path
        if stat.S_ISDIR(path.lstat().st_mode):
            yield from everything_below(path)


def files_below(folder: Path, pattern: str = "*") -> Iterator[Path]:
    """Yield the files below ``folder`` in order, except hidden ones and those in hidden folders."""
    for path in sorted(folder.rglob(pattern)):
        if not any(part.startswith(".") for part in path.relative_to(folder).parts) and path.is_file():
            yield path


def size_text(count: float) -> str:
    """Return a number of bytes with three digits, in the largest fitting unit: ``1.5 GiB``."""
    units = iter(("B", "KiB", "MiB", "GiB", "TiB", "PiB"))
    unit = next(units)
    while count >= 1024 and unit != "PiB":
        count, unit = count / 1024, next(units)
    return f"{count:.3g} {unit}" if count < 999.5 else f"{count:.0f} {unit}"  # not "1e+03"


def open_private(path: Path, flags: int, mode: int = FILE_MODE) -> int:
    """Open ``path`` for writing, with ``mode`` (0600) under any umask, and return the file descriptor."""
    fd = open_regular(str(path), flags, mode)
    os.fchmod(fd, mode)
    return fd


def set_private_umask() -> None:
    """Have files that this process makes be its user's alone. Keep the user's own umask for :func:`restore_umask`."""
    os.environ[UMASK_VARIABLE] = users_umask()
    os.umask(0o077)


def users_umask() -> str:
    """Return the umask that the user's own processes have, in octal digits."""
    text = os.environ.get(UMASK_VARIABLE, "")
    if not re.fullmatch("0?[0-7]{3}", text):
        umask = os.umask(0o077)
        os.umask(umask)
        text = f"{umask:03o}"
    return text


def restore_umask() -> None:
    """Take the user's own umask again: what a script of theirs writes may be for their group."""
    os.umask(int(users_umask(), 8))


def try_lock(path: Path) -> int | None:
    """Return an open file that holds the lock ``path``. None if another process holds it.

    The lock ends when the file is closed, or with its process. A file system without locks keeps no process out.
    """
    try:
        return lock(path, fcntl.LOCK_NB)
    except BlockingIOError:
        return None


def lock(path: Path, options: int = 0) -> int:
    """Wait for the lock ``path`` and return an open file that holds it, see :func:`try_lock`."""
    fd = open_private(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | options)
    except BlockingIOError:
        os.close(fd)
        raise
    except OSError:
        pass
    return fd


def sync_dir(path: Path) -> None:
    """Flush a folder's entries. Without that a renamed file may be gone after a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot: then a server has the entries at once
            raise
    finally:
        os.close(fd)


def write_atomic(path: Path, content: bytes | str, *, durable: bool = True) -> None:
    """Replace ``path`` by ``content`` in one step.

    ``durable=False`` skips the flushes, for files that are rewritten every second and worthless after a crash.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with os.fdopen(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a write that a full disk refuses does not name its file
        raise
    if durable:
        sync_dir(path.parent)


@contextlib.contextmanager
def unchanged_on_error(*paths: Path, unless: Callable[[], bool]) -> Iterator[None]:
    """Restore ``paths`` if the block fails; a path that did not exist is removed.

    That needs no room, but on a file system without links: the disk may be full. Where ``unless`` says so they are
    another process's by now, and stay.
    """
    kept = {path: path.with_name(f".{path.name}.kept-{secrets.token_hex(4)}") for path in paths}
    try:
        for path, copy in kept.items():
            with contextlib.suppress(FileNotFoundError):
                try:
                    os.link(path, copy)  # a link suffices: every writer here replaces a file, and never changes one
                except OSError as error:
                    if error.errno not in _NO_LINKS:
                        raise
                    shutil.copy2(path, copy)
        yield
    except BaseException:
        is_ours = not unless()
        for path, copy in kept.items():
            if not is_ours:
                copy.unlink(missing_ok=True)
            elif copy.exists():
                copy.replace(path)
            else:
                path.unlink(missing_ok=True)
        raise
    for copy in kept.values():
        copy.unlink(missing_ok=True)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write ``value`` as indented JSON, by :func:`write_atomic`. NaN and infinities become null."""
    write_atomic(path, json.dumps(nonfinite_to_none(value), indent=2, allow_nan=False) + "\n", durable=durable)


def nonfinite_to_none(value: Any) -> Any:
    """Return ``value`` with None for each float beyond FIGURES. A diverged loss must not make a file unreadable."""
    if isinstance(value, float):
        return value if -FIGURES < value < FIGURES else None
    if isinstance(value, dict):
        return {key: nonfinite_to_none(item) for key, item in value.items()}
    return [nonfinite_to_none(item) for item in value] if isinstance(value, (list, tuple)) else value


def json_line(value: Any) -> bytes:
    """Return ``value`` as one line of JSON. NaN is as in :func:`write_json`."""
    return (json.dumps(nonfinite_to_none(value), allow_nan=False) + "\n").encode()


def append_json_line(path: Path, value: Any) -> None:
    """Append ``value`` as one JSON line, flushed to disk; all of it or nothing. NaN is as in :func:`write_json`.

    A last line that a crash has cut off is removed: its writing was never reported.
    """
    line = json_line(value)
    fd = open_private(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            last = os.pread(fd, size, 0).rpartition(b"\n")[2]
            try:
                json.loads(last)
                line = b"\n" + line  # only the line break is missing
            except ValueError:
                size -= len(last)
                os.ftruncate(fd, size)
        try:
            while line:  # a disk that fills up takes a part and calls it a success: the next write raises
                line = line[os.write(fd, line) :]
            os.fsync(fd)
        except OSError:
            os.ftruncate(fd, size)
            raise
    finally:
        os.close(fd)


def append_shared_line(path: Path, value: Any) -> None:
    """Append ``value`` as one JSON line to a file of many writers, in one write. Nothing in it is removed.

    A line that another writer has left unfinished is ended first: its reader skips it.
    """
    line = json_line(value)
    fd = open_private(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(fd).st_size
        is_unfinished = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        os.write(fd, b"\n" + line if is_unfinished else line)
        os.fsync(fd)
    finally:
        os.close(fd)


class PatientLines:
    """JSON lines of a file, kept in memory while the disk does not take them. A full disk must not end a training."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._unwritten = deque[Any]()

    def write(self, lines: Iterable[Any]) -> None:
        """Append ``lines``, and those that could not be written before. What fails again is kept, with a warning."""
        self._unwritten += lines
        while self._unwritten:
            try:
                append_json_line(self._path, self._unwritten[0])
            except OSError as error:
                _log.warning("%s: %d lines are not written yet: %s", self._path, len(self._unwritten), error)
                return
            self._unwritten.popleft()


def create_once(path: Path, text: str) -> bool:
    """Create ``path`` with ``text`` at one moment; False where it is there with another text.

    Of several processes one creates it. A file server may do so and lose its answer: with the same text once more it is
    True. A file system without links does not tell that file from another process's.
    """
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with os.fdopen(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
            file.write(text)
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            write_stream(path, [text.encode()])
    except FileExistsError:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            return read_text(path, errors="replace") == text
        return False
    finally:
        temporary.unlink(missing_ok=True)
    return True


def set_aside(path: Path) -> Path:
    """Rename ``path`` to a free name beside it, durably, and return that name."""
    aside = path.with_name(f"{path.name}.damaged-{secrets.token_hex(4)}")
    path.rename(aside)
    sync_dir(path.parent)
    return aside


def rename_dir(source: Path, target: Path) -> None:
    """Give a finished folder its final name, durably. ``target`` must not exist."""
    sync_dir(source)
    source.rename(target)
    sync_dir(target.parent)


@contextlib.contextmanager
def atomic_path(path: Path, *, replaces_file: bool = False) -> Iterator[Path]:
    """Yield a free name beside ``path``. The file or folder written there becomes ``path``, durably, at the end.

    Raises FileExistsError if ``path`` exists, unless ``replaces_file``. If the block fails nothing new stays. Even what
    is written for others to read is private: its owner opens it to them.
    """
    temporary = path.with_name(f".{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        if not replaces_file:
            _refuse_existing(path)
        yield temporary
        make_private_and_sync(temporary)
        # Again: the block may have taken long.
        if not replaces_file:
            _refuse_existing(path)
        temporary.rename(path)
    except BaseException:
        remove_tree(temporary) if temporary.is_dir() else temporary.unlink(missing_ok=True)
        raise
    sync_dir(path.parent)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def make_private_and_sync(path: Path) -> None:
    """Make what a library has written there private, and flush it. torch's DCP writes files with the user's umask."""
    for each in (*(everything_below(path) if path.is_dir() else ()), path):
        if each.is_dir():
            each.chmod(DIR_MODE)
            sync_dir(each)
        else:
            each.chmod(FILE_MODE)
            with each.open("rb") as file:
                os.fsync(file.fileno())


def write_stream(path: Path, chunks: Iterable[bytes | memoryview], flushed: Callable[[], None] = lambda: None) -> None:
    """Write the new file ``path`` from ``chunks`` and flush it to disk. Raises FileExistsError, even for half a file.

    ``flushed`` is called each time a piece of it is on the disk. For files inside a folder that is renamed when it is
    complete: a half-written one has no reader.
    """
    with os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as file:
        on_disk = 0
        piece_bytes = limits().written_piece_bytes
        for chunk in chunks:
            whole = memoryview(chunk)
            for start in range(0, len(whole), piece_bytes):
                file.write(whole[start : start + piece_bytes])
                if file.tell() - on_disk >= piece_bytes:
                    file.flush()
                    os.fdatasync(file.fileno())
                    on_disk = file.tell()
                    flushed()
        file.flush()
        os.fsync(file.fileno())
    flushed()


def remove_tree(path: Path) -> None:
    """Remove a folder and its content. All or some of it may be gone, or be removed by another process meanwhile."""
    while os.path.lexists(path):
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)


def remove_as(path: Path, name: Path) -> None:
    """Remove a folder under another ``name``: half removed under its own, by a kill, it would look damaged."""
    path.rename(name)
    with contextlib.suppress(OSError):  # the disk may be full, which is why the folder is removed
        sync_dir(name.parent)
    remove_tree(name)


class PatientFile:
    """A file for appending, which keeps in memory what the disk does not take.

    A full disk or a quota loses nothing and tears no record. What could not be written is written as soon as there is
    room, from the very byte where it broke off. Only what is still in memory when the process ends is lost.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = open_private(path, os.O_RDWR | os.O_CREAT)
        self._on_disk = os.fstat(self._fd).st_size
        self._pending = bytearray()
        self._failed_since: float | None = None
        self._error = ""

    @property
    def size(self) -> int:
        """Return the size in bytes, including what is still in memory."""
        return self._on_disk + len(self._pending)

    def write(self, data: bytes) -> int:
        """Append ``data`` in memory; :meth:`flush` brings it to disk."""
        self._pending += data
        return len(data)

    def truncate(self, size: int) -> None:
        """Drop everything from ``size`` on."""
        del self._pending[max(0, size - self._on_disk) :]
        if size < self._on_disk:
            os.ftruncate(self._fd, size)
            self._on_disk = size

    def flush(self) -> None:
        """Hand over to the kernel what it takes. The rest is offered again at the next flush."""
        try:
            while self._pending:
                # At its place in the file, so that a retry continues at the same byte.
                written = os.pwrite(self._fd, self._pending, self._on_disk)
                del self._pending[:written]
                self._on_disk += written
        except OSError as error:
            self._note_failure(error)
            return
        # Log the failure again with its end: a log on the same disk could not take the line before.
        if self._failed_since is not None:
            late_s = time.monotonic() - self._failed_since
            _log.warning("%s: written after %.0f s (%s); no data was lost", self._path, late_s, self._error)
            self._failed_since = None

    def sync(self) -> None:
        """Flush, down to the disk."""
        self.flush()
        try:
            os.fsync(self._fd)
        except OSError as error:
            self._note_failure(error)

    def close(self) -> None:
        """Sync and close the file. A second call changes nothing."""
        if self._fd >= 0:
            self.sync()
            if self._pending:
                _log.error("%s: still %s: the last %d bytes are lost", self._path, self._error, len(self._pending))
            os.close(self._fd)
            self._fd = -1

    def _note_failure(self, error: OSError) -> None:
        if self._failed_since is None:
            self._failed_since = time.monotonic()
            self._error = error.strerror or str(error)
            _log.error("%s: %s; kept in memory, to be retried", self._path, self._error)


#: The longest file that is read into memory, and the longest of those that grow with the run or with its model.
MOST_BYTES = 64 << 20
LONG_BYTES = 1 << 30
#: How long a file may be held by another node. An NFS server or Samba asks that node to give it up.
_HELD_S = 5.0


def open_file(path: Path) -> io.BufferedReader:
    """Open the regular file ``path`` for reading. Raises OSError, at once, for everything else that may lie there."""
    return open(path, "rb", opener=open_regular)


def open_text(path: Path, newline: str | None = None) -> TextIO:
    """Do what :func:`open_file` does, for text. Bytes that are no UTF-8 are replaced; ``newline`` is as for `open`."""
    return io.TextIOWrapper(open_file(path), encoding="utf-8", errors="replace", newline=newline)


def read_bytes(path: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content that the regular file ``path`` has now. Raises OSError, also where it is too long."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, more than the {most_bytes:,} that are read", str(path))
        return file.read(size)


def read_text(path: Path, errors: str = "strict") -> str:
    """Return what :func:`read_bytes` does, as UTF-8 text. ``errors`` is that of bytes.decode."""
    return read_bytes(path).decode(errors=errors)


def open_regular(path: str, flags: int, mode: int = 0o600) -> int:
    """Open a regular file as os.open does. Raises OSError, at once, for everything else that may lie there."""
    deadline = time.monotonic() + _HELD_S
    while True:
        try:
            fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
    status = os.fstat(fd)
    found = status.st_mode
    if stat.S_ISREG(found) or status.st_rdev == Path(os.devnull).stat().st_rdev:  # users name /dev/null for no file
        return fd
    os.close(fd)
    if stat.S_ISDIR(found):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.ENXIO, "it is a pipe or a device, not a file", path)
