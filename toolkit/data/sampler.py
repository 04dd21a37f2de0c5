"""Which samples a share works on in each step, as a function of the step number alone.

The order of a run is one endless sequence of positions. Step ``s`` with a global batch of ``B`` takes positions
``s * B`` to ``(s + 1) * B``, across the end of an epoch where it falls inside; position ``p`` belongs to epoch
``p // N``. So the whole state of the data is the step number, each sample comes once per epoch, and the global batch is
the same for any number of ranks.

How many of a batch's positions each share takes may change from one step to a later one; which they are together does
not. With a ``split`` the positions stay, but each share fills its own from its own part of the data set (see split.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

from toolkit.data.permutation import BLOCK, GivenOrder, Indices, Order
from toolkit.data.split import PartOrder
from toolkit.dist.batch import Share

#: As far back steps may be asked for again: those that workers have in hand lie behind one cut at the most.
KEPT_CUTS = 4


@dataclass(frozen=True)
class Part:
    """What one share loads in one step: sample ``indices`` (n,), standing at ``positions`` start, start + 1, ..."""

    indices: Indices
    start: int
    global_count: int

    def positions(self) -> Indices:
        """Where the samples stand in the order of the run, (n,) int64."""
        return np.arange(self.start, self.start + self.indices.size, dtype=np.int64)


class Sampler(Protocol):
    """A sequence of parts of which any may be asked for."""

    def at(self, step: int) -> Part:
        """The part of step ``step``; ``IndexError`` behind the last."""


class TrainSampler:
    """The endless shuffled order, cut into global batches and those into shares.

    A share's samples are generated for many steps at once, and none of another share's: what an index costs does not
    grow with the number of shares. A block reaches no further than an epoch, so it touches two at most.
    """

    def __init__(
        self,
        size: int,
        *,
        global_batch_size: int,
        seed: int,
        share: Share,
        split: str = "global",
        order: GivenOrder | None = None,
    ) -> None:
        """``order``: the job's own, instead of a permutation for each epoch."""
        if global_batch_size < 1:
            raise ValueError(f"a global batch of {global_batch_size} samples; it needs at least one")
        self.order = order or Order(size, seed)
        self.global_batch_size = global_batch_size
        self._part = None if split == "global" or not share.count else PartOrder(size, seed, share, split)
        self._share = share
        #: From which step on this share has which bounds in the global batch.
        self._cuts = [(0, share.bounds(global_batch_size))]
        self._first, self._block = 0, np.empty((0, 0), np.int64)

    def at(self, step: int) -> Part:
        """This share's samples of global batch ``step``."""
        if step < 0:
            raise IndexError(f"step {step} is before the beginning of the run")
        if not self._first <= step < self._first + len(self._block):
            self._first, self._block = step, self._generated(step)
        start = step * self.global_batch_size + self._cut_of(step)[0][0]
        return Part(self._block[step - self._first], start, self.global_batch_size)

    def cut(self, step: int, counts: Sequence[int]) -> None:
        """From ``step`` on each share i takes ``counts[i]`` samples of the global batch; steps before it stay."""
        assert self._part is None, "where a share stands in its own part follows from the step only if it never changes"
        assert len(counts) == self._share.count
        assert sum(counts) == self.global_batch_size
        ends = [0, *accumulate(counts)]
        bounds = ends[self._share.index], ends[self._share.index + 1]
        self._cuts = [*(cut for cut in self._cuts[-KEPT_CUTS:] if cut[0] < step), (step, bounds)]
        self._block = self._block[: max(step - self._first, 0)]

    def _cut_of(self, step: int) -> tuple[tuple[int, int], float]:
        """This share's bounds in ``step``, and the first step of the next ones."""
        until = [first for first, _ in self._cuts[1:]] + [math.inf]
        return next((bounds, end) for (_, bounds), end in zip(self._cuts, until, strict=True) if step < end)

    def _generated(self, step: int) -> Indices:
        """The samples (steps, n) of this share in ``step`` and some that follow it."""
        (start, stop), until = self._cut_of(step)
        count = stop - start
        most = max(min(BLOCK // max(count, 1), self.order.n // self.global_batch_size), 1)
        steps = np.arange(step, int(min(step + most, until)), dtype=np.int64)[:, np.newaxis]
        if self._part is not None:
            return self._part.at(steps * count + np.arange(count))
        return self.order.at(steps * self.global_batch_size + np.arange(start, stop))


class EvalSampler:
    """A contiguous range of the eval set for each share, in batches: nothing is padded, nothing counted twice.

    Every share has ``calls`` parts, those of a shorter range end with empty ones: evaluation may hold collectives, and
    a rank that called less often than the others would leave them waiting.
    """

    def __init__(self, size: int, *, batch_size: int, share: Share) -> None:
        self.batch_size = batch_size
        self.start, self.stop = share.bounds(size)
        self._shortest, self._longer = divmod(size, max(share.count, 1))
        self._count = share.count
        self.calls = eval_calls(size, share.count, batch_size)

    def at(self, step: int) -> Part:
        """The samples of call ``step``; ``global_count`` is what all shares together look at in this call."""
        if not 0 <= step < self.calls:
            raise IndexError(f"evaluation batch {step} of {self.calls}")
        start = self.start + min(step * self.batch_size, self.stop - self.start)
        own = self._part_of(self.stop - self.start, step)
        longer, shorter = self._part_of(self._shortest + 1, step), self._part_of(self._shortest, step)
        together = self._longer * longer + (self._count - self._longer) * shorter
        return Part(np.arange(start, start + own, dtype=np.int64), start, together)

    def _part_of(self, size: int, call: int) -> int:
        """How many of a range of ``size`` samples are looked at in call ``call``."""
        return min(max(size - call * self.batch_size, 0), self.batch_size)


def eval_calls(size: int, shares: int, batch_size: int) -> int:
    """How many batches the longest of ``shares`` ranges of ``size`` samples makes: the calls that every rank owes."""
    longest = -(-size // shares) if shares else 0
    return -(-longest // batch_size)
