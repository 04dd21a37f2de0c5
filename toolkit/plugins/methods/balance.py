"""`data.balance: auto`: give slower ranks fewer samples of each global batch. The others need not wait for them then.

At the logging steps every rank learns every rank's own time of a step (see `toolkit.train.loop`), and all compute the
same shares from the same numbers: proportional to smoothed speeds, between half and one and a half times an even share.
New shares take effect some steps later: workers may have loaded batches by the old ones until then. The global batch
and the weights of its samples stay the same, so the training does too, to rounding, but for what a model does with its
part of a batch (batch statistics, dropout).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolkit.base import logs
from toolkit.base.errors import ConfigError
from toolkit.data.loader import Batches
from toolkit.metrics.sinks import MOST_CURVES
from toolkit.ranks.batch import Share
from toolkit.ranks.state import Json

#: Weight of the newest window in the smoothed speed: one window may hold a garbage collection or a burst on the disk.
FRESH = 0.5
#: Shares are moved only where the slowest rank's time becomes shorter by this fraction of it.
WORTH = 0.03

log = logs.get(__name__)


class Balance:
    """Moves the shares of ``loader``. All ranks must make the same calls, and all get the same shares."""

    def __init__(self, loader: Batches, ranks: int, accumulate: int) -> None:
        size = loader.global_batch_size
        self._loader = loader
        # One sample for each pass of gradient accumulation at least, if an even share has as many.
        self._least = max(size // (2 * ranks), min(accumulate, size // ranks), 1)
        self._most = -(-3 * size // (2 * ranks))
        bounds = [Share(rank, ranks).bounds(size) for rank in range(ranks)]
        #: Pairs (first step, samples of each rank): the current shares, and those agreed on for later.
        self._cuts = [(0, [stop - start for start, stop in bounds])]
        self._speeds: list[float] | None = None
        self._window: int | None = None  #: first step of the window; None in an attempt's first one: caches are cold

    def update(self, step: int, own_s: Sequence[float]) -> dict[str, float]:
        """Measure the speeds at a logging step. Move the shares if that is worth it.

        ``step`` steps are done; each since the last call took rank r ``own_s[r]`` seconds. Returns the samples that
        each rank has in the next step, for TensorBoard.
        """
        began, self._window = self._window, step
        newest, counts = self._cuts[-1]
        # A window tells the speeds only if the newest shares held in all of it, and every rank worked.
        if began is not None and newest <= began and min(own_s) > 0:
            measured = [count / seconds for count, seconds in zip(counts, own_s, strict=True)]
            before = self._speeds or measured
            both = zip(measured, before, strict=True)
            self._speeds = [FRESH * new + (1 - FRESH) * old for new, old in both]
            better = shares(self._speeds, self._loader.global_batch_size, self._least, self._most)
            if _slowest(better, self._speeds) <= (1 - WORTH) * _slowest(counts, self._speeds):
                # Workers may already have batches up to ``ahead`` steps in hand.
                first = step + self._loader.ahead
                self._loader.rebalance(first, better)
                self._cuts = [self._cuts[-1], (first, better)]
                shown = ", ".join(map(str, better[:MOST_CURVES]))
                log.info("from step %d on the ranks have %s samples each", first, shown)
        now = [counts for first, counts in self._cuts if first <= step][-1]
        width = len(str(len(now) - 1))
        return {f"world_share/rank_{rank:0{width}}": float(count) for rank, count in enumerate(now[:MOST_CURVES])}

    def state(self) -> Json:
        """Return the shares and speeds for a checkpoint."""
        return {"cuts": self._cuts, "speeds": self._speeds}

    def restore(self, saved: Any) -> None:
        """Continue with the shares of a :meth:`state`, if they are large enough and of the same number of ranks."""
        if saved is None or len(saved["cuts"][0][1]) != len(self._cuts[0][1]):
            return
        if min(min(counts) for _, counts in saved["cuts"]) < self._least:
            log.info("shares begin even again: train.accumulate now needs %d samples on each rank", self._least)
            return
        self._cuts = [(first, [*counts]) for first, counts in saved["cuts"]]
        self._speeds = saved["speeds"]
        for first, counts in self._cuts:
            self._loader.rebalance(first, counts)


def build_balance(loader: Batches, share: Share, ranks: int, accumulate: int) -> Balance:
    """Raises ConfigError where ranks work on the same samples: their times are not those of a share."""
    if share.count != ranks:
        raise ConfigError(
            f"data.balance: auto needs a share for each rank, and {ranks} ranks have {share.count}; set it to even"
        )
    return Balance(loader, ranks, accumulate)


def shares(speeds: Sequence[float], size: int, least: int, most: int) -> list[int]:
    """Divide ``size`` samples among ranks in proportion to their speeds, ``least`` to ``most`` each.

    Samples left over by rounding down go to the largest remainders, among equal ones to the first (Hamilton's method).
    """
    # In proportion to the speeds, clipped to the bounds: bisect the factor.
    low, high = 0.0, most / min(speeds)
    for _ in range(100):  # more than the bits that a float has
        factor = (low + high) / 2
        if sum(_clipped(speeds, factor, least, most)) < size:
            low = factor
        else:
            high = factor
    ideal = _clipped(speeds, low, least, most)
    # Round down, then give one more sample each to the ranks that lost most by it and are below their bound.
    counts = [int(part) for part in ideal]
    by_remainder = sorted(range(len(counts)), key=lambda rank: (counts[rank] - ideal[rank], rank))
    may_grow = [rank for rank in by_remainder if counts[rank] < most]
    for rank in may_grow[: size - sum(counts)]:
        counts[rank] += 1
    return counts


def _clipped(speeds: Sequence[float], factor: float, least: int, most: int) -> list[float]:
    return [min(max(factor * speed, float(least)), float(most)) for speed in speeds]


def _slowest(counts: Sequence[int], speeds: Sequence[float]) -> float:
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))
