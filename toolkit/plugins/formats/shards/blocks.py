"""The blocks of shards in memory, and a shuffled order for data that is read in blocks."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import lru_cache

import numpy as np

from toolkit.base.errors import JobFailedError
from toolkit.base.process_limits import limits
from toolkit.data.permutation import SORTED_MAX, Indices, hash64, items, order
from toolkit.plugins.formats.shards.index import OpenBlock, ShardFormat, ShardIndex

#: Threads that read and decode blocks. Reads of several blocks at once keep a disk busy, and decoding frees the GIL.
READERS = 4


class BlockReader:
    """The blocks of one data set that a process has in memory."""

    def __init__(self, index: ShardIndex, kind: ShardFormat, columns: tuple[str, ...]) -> None:
        self._index, self._format, self._columns = index, kind, columns
        self._samples = 0
        self.set_retention(0)
        self._open: dict[int, tuple[int, OpenBlock | Exception]] = {}
        self._coming: dict[int, Future[OpenBlock | Exception]] = {}
        self._asked: set[int] = set()
        self._pid = 0

    def set_retention(self, samples: int) -> None:
        """Keep each block until ``samples`` others were read, or a few more."""
        self._kept = max(samples, limits().kept_samples)

    def read_ahead(self, needed: Sequence[int], following: Sequence[int]) -> None:
        """Begin to read the blocks ``needed`` next and the first of those ``following``. Drop others begun before.

        The kernel is asked to read the rest of those following: lanes change their blocks at nearly the same time, and
        the disk would have nothing to do between.
        """
        self._forget_parent()
        wanted = [*needed, *following[: limits().blocks_read_ahead]]
        begun = {number: read for number, read in self._coming.items() if number in {*needed, *following}}
        for number, read in self._coming.items():
            if number not in begun:
                read.cancel()
        new = [number for number in wanted if number not in self._open and number not in begun]
        self._coming = begun | {number: self._readers.submit(self._loaded, number) for number in new}
        for number in following[limits().blocks_read_ahead :]:
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
        """Start over in a fork. A fork has none of its parent's threads, and would wait for them for ever."""
        if self._pid != os.getpid():
            self._pid, self._coming, self._asked = os.getpid(), {}, set()
            self._readers = ThreadPoolExecutor(READERS, "shards")


#: Keeps these hashes apart from those that other parts of the package make of the same run seed.
_INSIDE = 0x424C4F43


class BlockOrder:
    """The endless order of samples in blocks. Block b has the samples from ``starts[b]`` to ``starts[b + 1]``.

    It is a function of (seed, position) and of nothing else. An epoch is one sequence: the blocks in a permuted order,
    the samples of each permuted among themselves. It is divided into lanes of equal length. Every global batch takes
    its first samples from the first lane, the next from the second, and so on, each lane from where it stood. So a
    batch mixes samples of as many blocks as there are lanes, each lane reads its blocks one after the other, and a
    rank, whose share of a batch is contiguous, reads only the lanes of its share.

    No block may be empty. The order depends on ``batch_size``, which must be the run's global batch size: other sizes
    give a right order too, but ranks then read more than their part of the blocks.
    """

    def __init__(self, starts: Indices, seed: int, *, batch_size: int, lanes: int) -> None:
        self.n = int(starts[-1])
        self._starts, self._sizes = starts, np.diff(starts)
        self._seed = seed
        # A row is what one batch takes of all lanes; an epoch has whole rows, and a rest that no lane has.
        self._row = min(batch_size, self.n)
        self._rows = self.n // self._row
        lanes = min(lanes, self._row)
        #: The first place in a row of each lane, and the end of the row.
        self._lanes = -(-np.arange(lanes + 1, dtype=np.int64) * self._row // lanes)
        self._blocks = lru_cache(maxsize=2)(self._blocks_of)  # a batch may reach over the end of an epoch
        self._inside = lru_cache(maxsize=2 * lanes + 2)(self._inside_of)

    def at(self, positions: Indices) -> Indices:
        """Return the samples at ``positions``, of any shape, counted from the beginning of the run."""
        epochs = positions // self.n
        samples = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            samples[here] = self._samples(epoch, positions[here] - epoch * self.n)
        return samples

    def following(self, start: int, count: int) -> list[int]:
        """Return the next block of each lane of a share, the soonest needed first.

        The share has positions ``start`` to ``start + count`` of a global batch. A lane's last block of an epoch has
        none after it, and neither have samples after the last whole row.
        """
        epoch, place = divmod(start, self.n)
        if not count or place + count > self._rows * self._row:
            return []
        places = np.arange(place, place + count)
        lane = self._lane_of(places % self._row)
        last = np.flatnonzero(np.append(np.diff(lane), 1))  # the share's last sample of each lane
        lane, per_row = lane[last], np.diff(last, prepend=-1)
        blocks, ends = self._blocks(epoch)
        sequence = self._in_sequence(places[last])
        number = np.searchsorted(ends, sequence, side="right")
        # A lane that gives more samples to each batch is sooner at the end of its block.
        rows_left = (ends[number] - sequence) / per_row
        soonest = np.argsort(rows_left, kind="stable")
        continues = ends[number] < self._rows * self._lanes[lane + 1]
        following: list[int] = blocks[number[soonest[continues[soonest]]] + 1].tolist()
        return following

    def _samples(self, epoch: int, places: Indices) -> Indices:
        blocks, ends = self._blocks(epoch)
        sequence = self._in_sequence(places)
        number = np.searchsorted(ends, sequence, side="right")
        block = blocks[number]
        inside = sequence - (ends[number] - self._sizes[block])
        # Block by block: each has a permutation of its own.
        samples = np.empty_like(places)
        by_block = np.argsort(block, kind="stable")
        cuts = np.flatnonzero(np.diff(block[by_block])) + 1
        for here in np.split(by_block, cuts):
            if here.size:
                one = int(block[here[0]])
                rows = inside[here]
                size = int(self._sizes[one])
                if size <= SORTED_MAX:
                    permuted = self._inside(epoch, one)[rows]
                else:
                    permuted = items(size, hash64(_INSIDE, self._seed, one), epoch, rows)
                samples[here] = self._starts[one] + permuted
        return samples

    def _in_sequence(self, places: Indices) -> Indices:
        """Return which samples of the epoch's sequence stand at ``places`` of the epoch."""
        row, slot = np.divmod(places, self._row)
        lane = self._lane_of(slot)
        first, width = self._lanes[lane], np.diff(self._lanes)[lane]
        sequence = self._rows * first + row * width + (slot - first)
        # The samples after the last whole row stand where they are.
        return np.where(row < self._rows, sequence, places)

    def _lane_of(self, slots: Indices) -> Indices:
        lanes: Indices = np.searchsorted(self._lanes, slots, side="right") - 1
        return lanes

    def _blocks_of(self, epoch: int) -> tuple[Indices, Indices]:
        """Return the blocks in this epoch's order, and where each ends in the sequence."""
        blocks = order(len(self._sizes), self._seed, epoch, 0, len(self._sizes))
        return blocks, np.cumsum(self._sizes[blocks])

    def _inside_of(self, epoch: int, block: int) -> Indices:
        size = int(self._sizes[block])
        return order(size, hash64(_INSIDE, self._seed, block), epoch, 0, size)
