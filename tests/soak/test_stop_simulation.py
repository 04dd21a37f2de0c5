"""A thousand runs of 64 ranks: all ranks stop at one step, and none hangs."""

import secrets
from collections import Counter

import pytest

from tests.unit.ranks.simulation import case_of, faults, play

pytestmark = pytest.mark.soak
RANKS = 64
CASES = 1000


def test_ranks_never_disagree_and_never_hang_in_a_thousand_deliveries() -> None:
    base = secrets.randbelow(10**9)
    print(f"seeds {base} to {base + CASES - 1}")
    endings: Counter[str] = Counter()
    for seed in range(base, base + CASES):
        case = case_of(seed, RANKS)
        stories = play(case)
        found = faults(case, stories)
        assert not found, f"case_of({seed}, {RANKS}) = {case}\n" + "\n".join(found)
        endings[" ".join(kind for kind, _ in stories[0].handed_out) or "complete"] += 1
    print(dict(endings))
