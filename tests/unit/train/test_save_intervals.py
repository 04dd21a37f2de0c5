"""How often to save: the optimum against a simulation, and its bounds; which checkpoints stay."""

import numpy as np
import pytest

from toolkit.checkpoint.folder import Keep
from toolkit.checkpoint.manifest import Manifest
from toolkit.files.run_files import AttemptRecord
from toolkit.train.saver import MAX_OVERHEAD, PRESUMED_S, SHORTEST_S, between_failures_s, interval_s


def lost_s(interval: float, cost: float, between: float) -> float:
    """Return the seconds lost per second of work, in a simulation.

    A save costs its time, and a failure costs the work since the last save.
    """
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
    assert interval_s(5.0, 0.0, 100.0) == 5.0 / MAX_OVERHEAD


def test_the_one_before_is_written_first() -> None:
    assert interval_s(0.01, 600.0, PRESUMED_S) == 1200.0


def test_a_save_that_costs_nothing_is_not_made_all_the_time() -> None:
    assert interval_s(0.0, 0.0, PRESUMED_S) == SHORTEST_S


def attempt(cause: str, hours: int) -> AttemptRecord:
    return AttemptRecord(1, ("node1",), 0.0, 3600.0 * hours, cause, "restart")


def test_a_run_learns_how_often_it_fails() -> None:
    assert between_failures_s([]) == PRESUMED_S
    hours = [attempt("crashed", 4), attempt("preempted", 10), attempt("hang", 4), attempt("node_failure", 6)]
    assert between_failures_s(hours) == (PRESUMED_S + 24 * 3600) / 4
    assert between_failures_s([attempt("crashed", -50)]) == PRESUMED_S / 2, "its clock was set back"


def evaluated(step: int, accuracy: float | None = None, at: int | None = None) -> Manifest:
    """Return a checkpoint's manifest whose run was last evaluated ``at`` a step.

    By default that is the checkpoint's own step.
    """
    meta = {"evaluated": at or step, "metrics": {} if accuracy is None else {"eval/accuracy": accuracy}}
    return Manifest(step, 1, {}, meta, {}, {}, {})


RUN = [
    evaluated(60, 0.7),
    evaluated(50, 0.95, at=45),
    evaluated(40, 0.95, at=35),
    evaluated(30, 0.9),
    evaluated(20),
    evaluated(10, 0.6),
]


@pytest.mark.parametrize(
    ("keep", "steps"),
    [
        (Keep(2), {60, 50}),
        (Keep(3, every=20), {60, 50, 40, 20}),
        (Keep(2, best="eval/accuracy"), {60, 50, 30}),  # the figure of step 35 is not of the checkpoint at 40
        (Keep(2, best="-eval/accuracy"), {60, 50, 10}),
        (Keep(2, best="eval/loss"), {60, 50}),
    ],
)
def test_the_newest_every_nth_and_the_best_stay(keep: Keep, steps: set[int]) -> None:
    assert keep.steps(RUN) == steps


def test_of_equals_the_first_stays_and_no_number_is_never_the_best() -> None:
    figures = {50: float("nan"), 40: 0.5, 30: 0.9, 20: 0.9, 10: 0.1}
    run = [evaluated(step, figure) for step, figure in figures.items()]
    assert Keep(2, best="eval/accuracy").steps(run) == {50, 40, 20}
    assert Keep(2, best="-eval/accuracy").steps(run) == {50, 40, 10}


def test_stops_inside_a_row_of_skipped_steps_leave_the_checkpoint_before_it() -> None:
    rows = {97: True, 95: True, 60: False, 40: False}
    manifests = [Manifest(step, 1, {}, {"skipped_steps": {"waits": row}}, {}, {}, {}) for step, row in rows.items()]
    assert Keep(2).steps(manifests) == {97, 95, 60}


def test_the_newest_with_finite_weights_stays_behind_any_number_of_others() -> None:
    def saved(step: int, finite: bool) -> Manifest:
        return Manifest(step, 1, {}, {"finite": finite}, {}, {}, {})

    run = [saved(50, False), saved(40, False), saved(30, False), saved(20, True), saved(10, True)]
    assert Keep(2).steps(run) == {50, 40, 20}
