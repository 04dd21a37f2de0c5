"""How often a save by time pays.

Young (1974) and Daly (2006): where a save costs C and failures come every M on average, the least time is lost by
saving every sqrt(2 C M). What the training waits for is C; what is written behind its back costs nothing but must be
done before the next one begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

#: Before a run has failed: once a day and run, which is what large clusters see with some hundred GPUs.
PRESUMED_S = 86_400.0
MOST_OVERHEAD = 0.01
SHORTEST_S = 10.0
FAILURES = ("crashed", "hang", "out_of_memory", "node_failure")


def interval_s(blocked_s: float, written_s: float, between_failures_s: float) -> float:
    """Seconds from one save to the next: Young's, but for 1 % of the time at the most, and not before the one is
    written."""
    best = math.sqrt(2 * blocked_s * between_failures_s)
    return max(best, blocked_s / MOST_OVERHEAD, 2 * written_s, SHORTEST_S)


def between_failures_s(attempts: Sequence[Mapping[str, Any]]) -> float:
    """Mean seconds between failures, from the run's own attempts and one failure a day that is presumed before them."""
    seconds = sum((_time(a["ended"]) - _time(a["started"])).total_seconds() for a in attempts)
    return (PRESUMED_S + seconds) / (1 + sum(a["cause"] in FAILURES for a in attempts))


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)
