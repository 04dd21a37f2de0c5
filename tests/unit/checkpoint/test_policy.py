"""How often to save: the optimum against a simulation, and its bounds."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.checkpoint.policy import MOST_OVERHEAD, PRESUMED_S, SHORTEST_S, between_failures_s, interval_s


def lost_s(interval: float, cost: float, between: float) -> float:
    """Seconds lost per second of work, in a simulation: saves, and work done since the last one, at each failure."""
    draw = np.random.default_rng(1)
    failures = draw.exponential(between, 20_000)
    period = interval + cost
    saves = np.floor(failures / period)
    return float((saves * cost + (failures - saves * period)).sum() / failures.sum())


def test_no_other_interval_loses_clearly_less() -> None:
    cost, between = 20.0, 50_000.0
    best = interval_s(cost, 0.0, between)
    assert best == pytest.approx((2 * cost * between) ** 0.5, rel=0.5)  # the bound of 1 % is close
    ours = lost_s((2 * cost * between) ** 0.5, cost, between)
    for other in (0.25, 0.5, 2.0, 4.0):
        assert lost_s(other * (2 * cost * between) ** 0.5, cost, between) > ours


def test_a_save_never_costs_more_than_its_share() -> None:
    assert interval_s(5.0, 0.0, 100.0) == 5.0 / MOST_OVERHEAD


def test_the_one_before_is_written_first() -> None:
    assert interval_s(0.01, 600.0, PRESUMED_S) == 1200.0


def test_a_save_that_costs_nothing_is_not_made_all_the_time() -> None:
    assert interval_s(0.0, 0.0, PRESUMED_S) == SHORTEST_S


def attempt(cause: str, hours: int) -> dict[str, str]:
    return {"cause": cause, "started": "2026-01-01T00:00:00+00:00", "ended": f"2026-01-01T{hours:02}:00:00+00:00"}


def test_a_run_learns_how_often_it_fails() -> None:
    assert between_failures_s([]) == PRESUMED_S
    hours = [attempt("crashed", 4), attempt("preempted", 10), attempt("hang", 4), attempt("node_failure", 6)]
    assert between_failures_s(hours) == (PRESUMED_S + 24 * 3600) / 4
