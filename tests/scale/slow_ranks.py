"""How often a slightly slower rank is named, and how often a healthy one.

The own times of a step are made up. Ranks on equal hardware differ by a percent. A window's mean varies by four
percent, and half of a window's deviation stays in the next one. Twice a day something slows a rank, its node, or all
ranks: for a minute at most to twice the time (a cold start, a burst on the shared disk), or for ten minutes by up to a
fifth. A rank that is slow for longer, or by more, is no false alarm.
"""

import math
from collections.abc import Mapping

import numpy as np

from tests.scale import Curve
from toolkit.plugins.report.stragglers import Stragglers

WINDOW_S = 20.0
RANKS_PER_NODE = 8
DAY = round(86_400 / WINDOW_S)
#: A planted rank must be named within this time.
HOURS = 6


def own_times(rng: np.random.Generator, ranks: int, windows: int) -> np.ndarray:
    """The seconds of a step, (windows, ranks)."""
    noise = rng.normal(0.0, 0.04 * np.sqrt(1 - 0.5**2), (windows, ranks))
    for window in range(1, windows):
        noise[window] += 0.5 * noise[window - 1]
    factors = np.ones_like(noise)
    for width in (1, RANKS_PER_NODE, ranks):
        count = rng.poisson(windows * ranks / width / (DAY / 2))
        for first, place in zip(rng.integers(0, windows, count), rng.integers(0, ranks // width, count), strict=True):
            length, factor = ((rng.integers(1, 4), 2.0), (rng.integers(3, 30), 1.2))[rng.integers(0, 2)]
            part = factors[first : first + length, place * width : (place + 1) * width]
            np.maximum(part, rng.uniform(1.05, factor), out=part)
    return (1.0 + rng.normal(0.0, 0.01, ranks)) * (1.0 + noise) * factors


def named(times: np.ndarray) -> dict[int, float]:
    """Return the hour at which each rank was first named."""
    now = 0.0
    stragglers = Stragglers(str, clock=lambda: now)
    hours: dict[int, float] = {}
    for row in times.tolist():
        now += WINDOW_S
        stragglers.update(row)
        if round(now / WINDOW_S) % 15 == 0:
            for straggler in stragglers.named():
                for rank in straggler.ranks:
                    hours.setdefault(rank, now / 3600)
    return hours


def planted(ranks: int, seed: int, slower: float = 1.1) -> float | None:
    """Return the hours until the slow rank was named, or None if it never was."""
    rng = np.random.default_rng(seed)
    times = own_times(rng, ranks, HOURS * round(3600 / WINDOW_S))
    slow = int(rng.integers(0, ranks))
    times[:, slow] *= slower
    return named(times).get(slow)


def detection(ranks: int) -> Mapping[str, float]:
    """Count the named planted ranks, and a healthy job's false alarms in 100 node-days."""
    hours = [planted(ranks, seed) for seed in range(100)]
    found = sorted(hour for hour in hours if hour is not None)
    days = 800 / ranks  # 100 node-days
    alarms = sum(len(named(own_times(np.random.default_rng(seed), ranks, DAY))) for seed in range(round(days)))
    return {
        "10 % slow, named of 100": len(found),
        "hours, median": round(found[len(found) // 2], 2) if found else math.inf,
        "hours, worst": round(found[-1], 2) if found else math.inf,
        "false alarms in 100 node-days": alarms,
    }


CURVES = [Curve("slow ranks", "ranks", (8, 64), detection)]
