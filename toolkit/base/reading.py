"""Opens files that somebody else may have replaced: of a run, of a checkpoint, of a cache.

In a folder for the runs of several users anything may lie at such a place. Opening a named pipe would wait for its
writer for ever, a device has no end, and a file of a terabyte does not fit into memory.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import time
from pathlib import Path
from typing import TextIO

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
    raise OSError(errno.ENXIO, "it is a pipe or a device, and no file", path)
