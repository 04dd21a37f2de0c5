"""Data that stay where they are: each share keeps its part for the whole run.

For data on the nodes' own disks, of which a node holds a part, and for parts that must stay separate. ``blocks``: share
i has the samples ``Share(i, count).bounds(size)``, end to end. ``hash``: a sample's part follows from its index alone
(:func:`part_of`), so it stays where it is when the data set grows. The parts then differ in size: a part of n samples
by about the square root of n.

In each step share i takes its samples of the global batch from its own part, and goes through the part in passes. In
one pass each sample of the part comes once, in an order of its own. Passes through parts of different sizes take
different times, so samples of a smaller part come more often.
"""

from __future__ import annotations

import numpy as np

from toolkit.base.errors import ConfigError
from toolkit.data.permutation import Indices, ShuffledOrder, hash64, mix_array
from toolkit.ranks.batch import Share

#: Keeps these hashes apart from those that other parts of the package make.
_PART = 0x50415254
_CHUNK = 1 << 20


def part_of(indices: Indices, count: int) -> Indices:
    """Return which of ``count`` shares has each of the samples ``indices`` (n,) under ``hash``.

    Programs that distribute the samples use it. It depends on neither the run's seed nor the size of the data set.
    """
    words = mix_array(indices.astype(np.uint64) + np.uint64(hash64(_PART)))
    return (words % np.uint64(count)).astype(np.int64)


def samples_of(size: int, share: Share, split: str) -> range | Indices:
    """Return the samples of ``share`` in a data set of ``size``, ascending.

    With ``hash`` each of them takes 8 bytes of memory. Raises ConfigError where there are none.
    """
    found: range | Indices
    match split:
        case "blocks":
            found = range(*share.bounds(size))
        case "hash":
            mine = []
            # In chunks: all indices of a large data set would take many times the memory of a part's.
            for start in range(0, size, _CHUNK):
                indices = np.arange(start, min(start + _CHUNK, size), dtype=np.int64)
                mine.append(indices[part_of(indices, share.count) == share.index])
            found = np.concatenate(mine)
        case _:
            raise ConfigError(f"data.split: {split} says nothing of which samples a share has")
    if not len(found):
        raise ConfigError(
            f"data.split: {split} leaves share {share.index} of {share.count} none of {size} samples; use fewer ranks, "
            "more data, or data.split: global"
        )
    return found


class PartOrder:
    """The endless order of one share's part: pass after pass, each with its own permutation."""

    def __init__(self, size: int, seed: int, share: Share, split: str) -> None:
        self._samples = samples_of(size, share, split)
        self._order = ShuffledOrder(len(self._samples), hash64(_PART, seed, share.index))

    def at(self, places: Indices) -> Indices:
        """Return the samples at ``places``, of any shape.

        Places are counted from the first sample that this share takes in the run.
        """
        found = self._order.at(places)
        if isinstance(self._samples, range):
            return found + self._samples.start
        return self._samples[found]
