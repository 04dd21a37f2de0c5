"""Which samples a share works on in each step, by the step number alone.

The order of a run is one endless sequence of positions. Step ``s`` with a global batch of ``B`` takes positions ``s *
B`` to ``(s + 1) * B``, also across the end of an epoch. Position ``p`` belongs to epoch ``p // N``. So the step number
is the whole state of the data, each sample comes once per epoch, and the global batch is the same for any number of
ranks. How many of a batch's positions each share takes may change at a later step.

With a ``partition`` each share fills its positions from its own part of the data (:class:`PartOrder`), kept for
the whole run: for data on the nodes' own disks, and for parts that must stay separate. ``blocks``: share i has the
samples ``Share(i, count).bounds(size)``. ``hash``: a sample's part follows from its index alone (:func:`share_of`), so
it stays where it is when the data set grows; the size n of a part differs by about its square root. A share goes
through its part in passes, each with its own order. Samples of a smaller part come more often.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np

from toolkit.base.errors import ConfigError
from toolkit.base.process_limits import limits
from toolkit.data.permutation import BLOCK, Indices, ShuffledOrder, hash64, mix_array
from toolkit.ranks.batch import Share
from toolkit.ranks.state import Json

#: Number of past changes of the bounds that are kept: workers hold steps from before one change at most.
KEPT_CUTS = 4


@dataclass(frozen=True)
class BatchPart:
    """The samples of one share in one step. Sample ``indices`` (n,) are at positions start, start + 1, ..."""

    indices: Indices
    start: int
    global_count: int

    def positions(self) -> Indices:
        """Return the samples' places in the order of the run, (n,) int64."""
        return np.arange(self.start, self.start + self.indices.size, dtype=np.int64)


class Sampler(Protocol):
    """A sequence of parts, in which any step may be asked for."""

    def at(self, step: int) -> BatchPart:
        """Return the part of step ``step``. Raises IndexError after the last."""


class Order(Protocol):
    """The endless order of a training run."""

    n: int  #: samples in an epoch

    def at(self, positions: Indices) -> Indices:
        """Return the samples at ``positions``, of any shape, counted from the beginning of the run."""


class TrainSampler:
    """The endless shuffled order, cut into global batches and those into shares.

    A share's samples are generated for many steps at once, and no other share's are. A block is never longer than an
    epoch, so it touches at most two.
    """

    def __init__(
        self,
        size: int,
        *,
        global_batch_size: int,
        seed: int,
        share: Share,
        partition: str = "global",
        order: Order | None = None,
        repeats: int = 1,
    ) -> None:
        """Set the sampler up. ``order`` is the job's or the data set's own, instead of a permutation for each epoch.

        ``repeats``: see :class:`~.permutation.ShuffledOrder`.
        """
        if global_batch_size < 1:
            raise ValueError(f"a global batch of {global_batch_size} samples; it needs at least one")
        self.order: Order = order or ShuffledOrder(size, seed, repeats=repeats, batch=global_batch_size)
        self.global_batch_size = global_batch_size
        self._part = None if partition == "global" or not share.count else PartOrder(size, seed, share, partition)
        self._share = share
        #: From which step on this share has which bounds in the global batch.
        self._cuts = [(0, share.bounds(global_batch_size))]
        self._first, self._block = 0, np.empty((0, 0), np.int64)

    def at(self, step: int) -> BatchPart:
        """Return this share's samples of global batch ``step``."""
        if step < 0:
            raise IndexError(f"step {step} is before the beginning of the run")
        (start, stop), until = self._cut_of(step)
        if not self._first <= step < self._first + len(self._block):
            # Generate at most a block, an epoch, and the steps up to the next change of the bounds.
            most = min(BLOCK // max(stop - start, 1), self.order.n // self.global_batch_size)
            last = min(step + max(most, 1), until)
            steps = np.arange(step, int(last), dtype=np.int64)[:, np.newaxis]
            if self._part is not None:
                self._block = self._part.at(steps * (stop - start) + np.arange(stop - start))
            else:
                self._block = self.order.at(steps * self.global_batch_size + np.arange(start, stop))
            self._first = step
        first = step * self.global_batch_size + start
        return BatchPart(self._block[step - self._first], first, self.global_batch_size)

    def rebalance(self, step: int, counts: Sequence[int]) -> None:
        """Give each share i ``counts[i]`` samples of the global batch from ``step`` on. Earlier steps do not change."""
        assert self._part is None, "where a share stands in its own part follows from the step only if it never changes"
        assert len(counts) == self._share.count
        assert sum(counts) == self.global_batch_size
        ends = [0, *accumulate(counts)]
        bounds = ends[self._share.index], ends[self._share.index + 1]
        # Earlier bounds are kept: workers may ask for earlier steps again.
        earlier = [cut for cut in self._cuts[-KEPT_CUTS:] if cut[0] < step]
        self._cuts = [*earlier, (step, bounds)]
        # The samples generated from `step` on have the old bounds.
        self._block = self._block[: max(step - self._first, 0)]

    def _cut_of(self, step: int) -> tuple[tuple[int, int], float]:
        """Return this share's bounds in ``step``, and the step at which the next bounds begin."""
        until = math.inf
        # From the last cut backwards, to one that begins at or before the step. The first one has what is before it.
        for first, bounds in reversed(self._cuts[1:]):
            if first <= step:
                return bounds, until
            until = first
        return self._cuts[0][1], until


class EvalSampler:
    """A contiguous range of the eval set for each share, in batches.

    Nothing is padded, and nothing is counted twice. Every share has ``calls`` parts, and shorter ranges end with empty
    ones. Evaluation may contain collectives, and a rank that made fewer calls than the others would leave them waiting.
    """

    def __init__(self, size: int, *, batch_size: int, share: Share) -> None:
        self.batch_size = batch_size
        self.start, self.stop = share.bounds(size)
        self._shortest, self._longer = divmod(size, max(share.count, 1))
        self._count = share.count
        self.calls = eval_calls(size, share.count, batch_size)

    def at(self, step: int) -> BatchPart:
        """Return the samples of call ``step``. ``global_count`` is the number of samples of all shares in this call."""
        if not 0 <= step < self.calls:
            raise IndexError(f"evaluation batch {step} of {self.calls}")
        start = self.start + min(step * self.batch_size, self.stop - self.start)
        # Ranges differ by one sample at most, so two sizes give the count of all shares.
        own = self._part_of(self.stop - self.start, step)
        longer, shorter = self._part_of(self._shortest + 1, step), self._part_of(self._shortest, step)
        together = self._longer * longer + (self._count - self._longer) * shorter
        return BatchPart(np.arange(start, start + own, dtype=np.int64), start, together)

    def _part_of(self, size: int, call: int) -> int:
        """Return the number of samples that call ``call`` takes of a range of ``size`` samples."""
        return min(max(size - call * self.batch_size, 0), self.batch_size)


def eval_calls(size: int, shares: int, batch_size: int) -> int:
    """Return the number of calls that every rank makes: the batches of the longest of ``shares`` ranges."""
    longest = -(-size // shares) if shares else 0
    return -(-longest // batch_size)


def refuse_other_share(state: Json, share: Share) -> None:
    """Raise ConfigError if the ``state`` of a loader, from a checkpoint, is that of another share."""
    assert isinstance(state, Mapping)
    saved = state["share"]
    assert isinstance(saved, Sequence)
    if [*saved] != [share.index, share.count]:
        raise ConfigError(
            f"data: this rank read share {saved[0]} of {saved[1]} of the data up to the checkpoint, and has share "
            f"{share.index} of {share.count} now. Streams and the parts of data.partition cannot be shared out anew: "
            "continue with the same strategy.name and strategy.mesh as before, or start a new run with `toolkit submit`"
        )


#: Keeps these hashes apart from those that other parts of the package make.
_PART = 0x50415254


def share_of(indices: Indices, count: int) -> Indices:
    """Return which of ``count`` shares has each of the samples ``indices`` (n,) under ``hash``.

    Programs that distribute the samples use it. It depends on neither the run's seed nor the size of the data set.
    """
    words = mix_array(indices.astype(np.uint64) + np.uint64(hash64(_PART)))
    return (words % np.uint64(count)).astype(np.int64)


def samples_of(size: int, share: Share, partition: str) -> range | Indices:
    """Return the samples of ``share`` in a data set of ``size``, ascending.

    With ``hash`` each of them takes 8 bytes of memory. Raises ConfigError where there are none.
    """
    found: range | Indices
    match partition:
        case "blocks":
            found = range(*share.bounds(size))
        case "hash":
            mine = []
            # In chunks: all indices of a large data set would take many times the memory of a part's.
            for start in range(0, size, limits().permuted_at_once):
                indices = np.arange(start, min(start + limits().permuted_at_once, size), dtype=np.int64)
                mine.append(indices[share_of(indices, share.count) == share.index])
            found = np.concatenate(mine)
        case _:
            raise ConfigError(f"data.partition: {partition} says nothing of which samples a share has")
    if not len(found):
        raise ConfigError(
            f"data.partition: {partition} leaves share {share.index} of {share.count} none of {size} samples; use "
            "fewer ranks, more data, or data.partition: global"
        )
    return found


class PartOrder:
    """The endless order of one share's part: pass after pass, each with its own permutation."""

    def __init__(self, size: int, seed: int, share: Share, partition: str) -> None:
        self._samples = samples_of(size, share, partition)
        self._order = ShuffledOrder(len(self._samples), hash64(_PART, seed, share.index))

    def at(self, places: Indices) -> Indices:
        """Return the samples at ``places``, of any shape, counted from the first that this share takes in the run."""
        found = self._order.at(places)
        if isinstance(self._samples, range):
            return found + self._samples.start
        return self._samples[found]
