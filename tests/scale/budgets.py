"""Whether the retry budget gives up a run because of its size.

The real rules judge each failure of a random month. All failures are the run's own fault here, which is the worst case:
those of nodes that can be replaced cost nothing of the budget.
"""

import random
from collections.abc import Mapping

from tests.scale import Curve
from tests.unit.run.test_verdict import until_given_up

RUNS = 20


def month(nodes: int) -> Mapping[str, float]:
    """Count the runs that are given up, by the time between two checkpoints."""
    counts: dict[str, float] = {"failures": round(nodes * 0.28 / 100 * 30)}
    for minutes in (1, 10, 30):
        ends = [until_given_up(nodes, random.Random(seed), minutes) for seed in range(RUNS)]
        counts[f"of {RUNS}, {minutes} min"] = sum(end is not None for end in ends)
    return counts


CURVES = [Curve("given up in a month", "nodes", (1000, 3000, 10_000), month)]
