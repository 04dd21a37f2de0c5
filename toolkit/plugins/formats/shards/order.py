"""A shuffled order for data that is read in blocks.

It is a function of (seed, position) and of nothing else. An epoch is one sequence: the blocks in a permuted order, the
samples of each permuted among themselves. It is cut into lanes of equal length. Every global batch takes its first
samples from the first lane, the next from the second, and so on, each lane from where it stood. So a batch mixes
samples of as many blocks as there are lanes, each lane reads its blocks one after the other, and a rank, whose share of
a batch is contiguous, reads only the lanes of its share.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from toolkit.data.permutation import SORTED_MAX, Indices, hash64, items, order

#: Keeps these hashes apart from those that other parts of the package make of the same run seed.
_INSIDE = 0x424C4F43


class BlockOrder:
    """The endless order of samples in blocks. Block b has the samples from ``starts[b]`` to ``starts[b + 1]``.

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
        goes_on = ends[number] < self._rows * self._lanes[lane + 1]
        following: list[int] = blocks[number[soonest[goes_on[soonest]]] + 1].tolist()
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
