"""Disks that fill up. One takes a given number of bytes, and the kernel itself refuses at the other."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


class SmallDisk:
    """Stands for ``os.pwrite``: takes ``room`` more bytes, and then says ENOSPC.

    The call that fills it may write a part of its data. With ``room`` None it is never full.
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
    """Let Linux write no file beyond ``size`` bytes: then it says EFBIG.

    The write that reaches ``size`` may take a part of its data. The limit is for the whole process: write nothing else
    meanwhile.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
