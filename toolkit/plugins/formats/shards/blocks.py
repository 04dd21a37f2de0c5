"""The blocks of shards in memory: those in use, and those that threads read ahead."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

from toolkit.base.errors import JobFailedError
from toolkit.plugins.formats.shards.index import OpenBlock, ShardFormat, ShardIndex

#: Threads that read and decode blocks. Reads of several blocks at once keep a disk busy, and decoding frees the GIL.
READERS = 4
#: Blocks that are read ahead of their use.
AHEAD = 4
#: An open block is dropped when so many samples were read since a sample of it was.
KEPT_SAMPLES = 1024


class BlockReader:
    """The blocks of one data set that a process has in memory."""

    def __init__(self, index: ShardIndex, kind: ShardFormat, columns: tuple[str, ...]) -> None:
        self._index, self._format, self._columns = index, kind, columns
        self._samples = 0
        self.keep(0)
        self._open: dict[int, tuple[int, OpenBlock | Exception]] = {}
        self._coming: dict[int, Future[OpenBlock | Exception]] = {}
        self._asked: set[int] = set()
        self._pid = 0

    def keep(self, samples: int) -> None:
        """Keep each block until ``samples`` others were read, or a few more."""
        self._kept = max(samples, KEPT_SAMPLES)

    def read_ahead(self, needed: Sequence[int], following: Sequence[int]) -> None:
        """Begin to read the blocks ``needed`` next and the first of those ``following``. Drop others begun before.

        The kernel is asked to read the rest of those following: lanes change their blocks at nearly the same time, and
        the disk would have nothing to do between.
        """
        self._forget_parent()
        wanted = [*needed, *following[:AHEAD]]
        begun = {number: read for number, read in self._coming.items() if number in {*needed, *following}}
        for number, read in self._coming.items():
            if number not in begun:
                read.cancel()
        new = [number for number in wanted if number not in self._open and number not in begun]
        self._coming = begun | {number: self._readers.submit(self._loaded, number) for number in new}
        for number in following[AHEAD:]:
            if number not in self._asked:
                self._readers.submit(self._ask, number)
        self._asked = {*following}

    def has(self, number: int) -> bool:
        """True if a block is in use."""
        return number in self._open

    @contextmanager
    def opened(self, number: int, samples: int) -> Iterator[OpenBlock]:
        """Open a block to take ``samples`` of it. An error is an OSError that names the file and the block."""
        self._samples += samples
        try:
            yield self._block(number)
        except (MemoryError, JobFailedError):
            raise
        except Exception as error:
            file, block = self._index.block_of(number)
            code = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
            text = " ".join(str(error).split())
            path = str(self._index.root / file.name)
            raise OSError(code, f"{self._format.describe(file, block, None)}: {text}", path) from error

    def _block(self, number: int) -> OpenBlock:
        if number not in self._open:
            # Blocks that no lane reads any more have not been asked for lately.
            oldest = self._samples - self._kept
            self._open = {other: block for other, block in self._open.items() if block[0] >= oldest}
            self._forget_parent()
            read = self._coming.pop(number, None)
            self._open[number] = self._samples, self._loaded(number) if read is None else read.result()
        opened = self._open[number][1]
        self._open[number] = self._samples, opened
        if isinstance(opened, Exception):
            raise opened.with_traceback(None)  # so that each sample of a damaged block does not read it again
        return opened

    def _ask(self, number: int) -> None:
        """Ask the kernel to read a block into its page cache. Errors are left for the read."""
        file, block = self._index.block_of(number)
        path = self._index.root / file.name
        with suppress(Exception), path.open("rb", buffering=0) as opened:
            for begin, length in self._format.pieces(path, file, block, self._columns):
                os.posix_fadvise(opened.fileno(), begin, length, os.POSIX_FADV_WILLNEED)

    def _loaded(self, number: int) -> OpenBlock | Exception:
        file, block = self._index.block_of(number)
        path = self._index.root / file.name
        try:
            stat = path.stat()
            if (stat.st_size, stat.st_mtime_ns) != (file.size, file.mtime_ns):
                raise ValueError("the shard has changed since this run began; put the old one back, or start a new run")
            return self._format.open(path, file, block, self._columns)
        except MemoryError:
            raise
        except Exception as error:
            return error

    def _forget_parent(self) -> None:
        """Begin anew in a forked process. A fork has none of its parent's threads, and would wait for them for ever."""
        if self._pid != os.getpid():
            self._pid, self._coming, self._asked = os.getpid(), {}, set()
            self._readers = ThreadPoolExecutor(READERS, "shards")
