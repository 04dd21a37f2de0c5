"""Which samples a share works on in each step, as a function of the step number alone.

The order of a run is one endless sequence of positions. Step ``s`` with a global batch of ``B`` takes positions
``s * B`` to ``(s + 1) * B``, across the end of an epoch where it falls inside; position ``p`` belongs to epoch
``p // N``. So the whole state of the data is the step number, each sample comes once per epoch, and the global batch is
the same for any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from toolkit.data.permutation import BLOCK, Indices, Order
from toolkit.dist.batch import Share


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

    def __init__(self, size: int, *, global_batch_size: int, seed: int, share: Share) -> None:
        if global_batch_size < 1:
            raise ValueError(f"a global batch of {global_batch_size} samples; it needs at least one")
        self.order = Order(size, seed)
        self.global_batch_size = global_batch_size
        self.bounds = share.bounds(global_batch_size)
        longest = BLOCK // max(self.bounds[1] - self.bounds[0], 1)
        self._block_steps = max(min(longest, size // global_batch_size), 1)
        self._first, self._block = 0, np.empty((0, 0), np.int64)

    def at(self, step: int) -> Part:
        """This share's samples of global batch ``step``."""
        if step < 0:
            raise IndexError(f"step {step} is before the beginning of the run")
        if not self._first <= step < self._first + len(self._block):
            starts = np.arange(step, step + self._block_steps, dtype=np.int64) * self.global_batch_size
            self._first, self._block = step, self.order.at(starts[:, np.newaxis] + np.arange(*self.bounds))
        start = step * self.global_batch_size + self.bounds[0]
        return Part(self._block[step - self._first], start, self.global_batch_size)


class EvalSampler:
    """A contiguous range of the eval set for each share, in batches: nothing is padded, nothing counted twice.

    Every share has ``calls`` parts, those of a shorter range end with empty ones: evaluation may hold collectives, and
    a rank that called less often than the others would leave them waiting.
    """

    def __init__(self, size: int, *, batch_size: int, share: Share) -> None:
        self.batch_size = batch_size
        self.start, self.stop = share.bounds(size)
        self._ranges = [Share(index, share.count).bounds(size) for index in range(share.count)]
        self.calls = eval_calls(size, share.count, batch_size)

    def at(self, step: int) -> Part:
        """The samples of call ``step``; ``global_count`` is what all shares together look at in this call."""
        if not 0 <= step < self.calls:
            raise IndexError(f"evaluation batch {step} of {self.calls}")
        start, stop = self._cut(self.start, self.stop, step)
        together = sum(last - first for first, last in (self._cut(*bounds, step) for bounds in self._ranges))
        return Part(np.arange(start, stop, dtype=np.int64), start, together)

    def _cut(self, start: int, stop: int, call: int) -> tuple[int, int]:
        return min(start + call * self.batch_size, stop), min(start + (call + 1) * self.batch_size, stop)


def eval_calls(size: int, shares: int, batch_size: int) -> int:
    """How many batches the longest of ``shares`` ranges of ``size`` samples makes: the calls that every rank owes."""
    longest = -(-size // shares) if shares else 0
    return -(-longest // batch_size)
