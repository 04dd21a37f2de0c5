"""Disks that fill up: one of ours that takes a given number of bytes, and the kernel's own refusal."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


class SmallDisk:
    """Stands for ``os.pwrite``: takes ``room`` more bytes, of one call a part if need be, and then says ENOSPC.

    ``room`` of None is as much as anybody wants.
    """

    def __init__(self, room: int | None = None) -> None:
        self.room = room
        self._pwrite = os.pwrite

    def __call__(self, fd: int, data: bytes | bytearray, offset: int) -> int:
        taken = len(data) if self.room is None else min(self.room, len(data))
        if data and not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.room is not None:
            self.room -= taken
        return self._pwrite(fd, bytes(data[:taken]), offset)


@contextmanager
def no_file_longer_than(size: int) -> Iterator[None]:
    """Linux writes up to ``size``, a part of the data if need be, and then says EFBIG. It is so for the whole process:
    write nothing else meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
