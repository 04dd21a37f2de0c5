"""`data.share: auto`: ranks that are slower get fewer samples of each global batch, so that nobody waits for them.

At the logging steps every rank learns every rank's own time of a step (see :mod:`toolkit.metrics.pace`), and all make
the same of the same numbers: nothing more is sent. A rank's speed is the samples of its share by that time; shares are
made proportional to smoothed speeds, within half and one and a half times an even share, and moved where that shortens
the slowest rank's time by ``WORTH``. They take effect some steps later, when no worker has loaded by the old ones.

The global batch is the same samples in the same order, and a strategy weights each rank's loss by its samples, so what
is trained is the same to rounding, but for what a model does with its part of a batch (batch statistics, dropout).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from toolkit import logs
from toolkit.dist.batch import Share
from toolkit.dist.state import Json
from toolkit.errors import ConfigError
from toolkit.metrics.pace import MOST_CURVES

#: Of the newest window in the smoothed speed; a single one holds a garbage collection or a burst on the disk.
FRESH = 0.5
#: The slowest rank's time must become shorter by this part of it.
WORTH = 0.03

log = logs.get(__name__)


class Divisible(Protocol):
    """What is needed of a loader: see :class:`toolkit.data.loader.Loader`."""

    global_batch_size: int
    balances: bool
    ahead: int

    def cut(self, step: int, counts: Sequence[int]) -> None: ...


class Even:
    """The shares stay as they are."""

    def update(self, step: int, own_s: Sequence[float]) -> dict[str, float]:
        """See :class:`Balance`."""
        return {}

    def state(self) -> Json:
        """See :class:`Balance`."""

    def restore(self, saved: Any) -> None:
        """Another run's shares, or this one's from when it had auto, are left: from here on they are even."""


class Balance:
    """Moves the shares of ``loader``; equal on every rank, which all must call alike."""

    def __init__(self, loader: Divisible, ranks: int, accumulate: int) -> None:
        size = loader.global_batch_size
        self._loader = loader
        self._least = max(size // (2 * ranks), min(accumulate, size // ranks), 1)
        self._most = -(-3 * size // (2 * ranks))
        bounds = [Share(rank, ranks).bounds(size) for rank in range(ranks)]
        #: From which step on each rank has how many samples: those of now, and those that are agreed on for later.
        self._cuts = [(0, [stop - start for start, stop in bounds])]
        self._speeds: list[float] | None = None
        self._window: int | None = None  #: its first step; None: in the first one of an attempt caches are cold

    def update(self, step: int, own_s: Sequence[float]) -> dict[str, float]:
        """A logging step: ``step`` steps are done, of which those since the last one took rank r ``own_s[r]`` seconds
        each. Returns the samples that each rank has in the next step, for TensorBoard."""
        began, self._window = self._window, step
        newest, counts = self._cuts[-1]
        if began is not None and newest <= began and min(own_s) > 0:
            self._measure([count / seconds for count, seconds in zip(counts, own_s, strict=True)])
            self._move(step, counts)
        now = [counts for first, counts in self._cuts if first <= step][-1]
        digits = len(str(len(now) - 1))
        return {f"world_share/rank_{rank:0{digits}}": float(n) for rank, n in enumerate(now[:MOST_CURVES])}

    def _measure(self, speeds: list[float]) -> None:
        before = self._speeds or speeds
        self._speeds = [FRESH * new + (1 - FRESH) * old for new, old in zip(speeds, before, strict=True)]

    def _move(self, step: int, counts: list[int]) -> None:
        assert self._speeds is not None
        better = shares(self._speeds, self._loader.global_batch_size, self._least, self._most)
        if _slowest(better, self._speeds) > (1 - WORTH) * _slowest(counts, self._speeds):
            return
        first = step + self._loader.ahead
        self._loader.cut(first, better)
        self._cuts = [self._cuts[-1], (first, better)]
        log.info("from step %d on the ranks have %s samples each", first, ", ".join(map(str, better[:MOST_CURVES])))

    def state(self) -> Json:
        """For a checkpoint."""
        return {"cuts": self._cuts, "speeds": self._speeds}

    def restore(self, saved: Any) -> None:
        """Go on with the shares of a :meth:`state`; with those of another number of ranks nothing can be begun."""
        if saved is None or len(saved["cuts"][0][1]) != len(self._cuts[0][1]):
            return
        self._cuts = [(first, [*counts]) for first, counts in saved["cuts"]]
        self._speeds = saved["speeds"]
        for first, counts in self._cuts:
            self._loader.cut(first, counts)


def build_balance(loader: Divisible, share: Share, ranks: int, accumulate: int) -> Balance | Even:
    """What `data.share` asks for. ConfigError where ranks work on the same samples: their times are not a share's."""
    if not loader.balances or ranks == 1:
        return Even()
    if share.count != ranks:
        raise ConfigError(
            f"data.share: auto needs a share for each rank, and {ranks} ranks have {share.count}; set it to even"
        )
    return Balance(loader, ranks, accumulate)


def shares(speeds: Sequence[float], size: int, least: int, most: int) -> list[int]:
    """``size`` samples for ranks of these speeds, each ``least`` to ``most`` of them, otherwise in proportion.

    What is left by rounding down goes to the largest remainders, of equal ones to the first (Hamilton's method).
    """
    ideal = _within(speeds, size, least, most)
    found = [int(part) for part in ideal]
    by_remainder = sorted(range(len(found)), key=lambda rank: (found[rank] - ideal[rank], rank))
    for rank in [rank for rank in by_remainder if found[rank] < most][: size - sum(found)]:
        found[rank] += 1
    return found


def _within(speeds: Sequence[float], size: int, least: int, most: int) -> list[float]:
    """The parts in proportion, but those that would be beyond a bound are at it: by bisection of the factor."""
    low, high = 0.0, most / min(speeds)
    for _ in range(100):  # more than the bits that a float has
        factor = (low + high) / 2
        if sum(min(max(factor * speed, least), most) for speed in speeds) < size:
            low = factor
        else:
            high = factor
    return [min(max(low * speed, float(least)), float(most)) for speed in speeds]


def _slowest(counts: Sequence[int], speeds: Sequence[float]) -> float:
    return max(count / speed for count, speed in zip(counts, speeds, strict=True))
