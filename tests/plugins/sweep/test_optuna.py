"""Points that Optuna chooses. They get better by the results, and a killed submitter loses and doubles none."""

import dataclasses
import math
import sys
from pathlib import Path

import pytest

from tests.plugins.sweep.test_submission import SlurmOnDisk, killed, project, submit
from toolkit.base.errors import RequestError
from toolkit.files.run_files import RunResult, RunState
from toolkit.plugins.sweep import axes, sweep_folder
from toolkit.plugins.sweep.sweep_folder import Point, SweepDir
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.attempt.journal import write_ended

pytest.importorskip("optuna")
__all__ = ["project"]  # the fixture: each test is in a project of its own

AXES = ("optim.lr=log(1e-5,1e-1)", "params.width=1,2", "train.seed=0..2")


def distance(point: Point) -> float:
    """Return a point's distance from the best one, as a metric of its run."""
    return abs(math.log10(float(point.values["optim.lr"])) + 3) + (point.values["params.width"] == 1)


def finish(sweep: SweepDir) -> None:
    """Write the result of each point that has none."""
    for number, point in enumerate(sweep.points()):
        run = sweep.run_of(point)
        if run.result() is not None:
            continue
        if number == 5:  # its last figure, of an early step, would be the best of all
            write_ended(run, RunState.FAILED, "a bad node")
            failed = run.result()
            assert failed is not None
            run.write_result(dataclasses.replace(failed, metrics={"eval/loss": -9.0}))
            assert [each.score for each in axes.tried(sweep, "-eval/loss") if each.score == -9.0] == []
        else:
            metrics = {"eval/loss": distance(point)}
            run.write_result(RunResult(RunState.COMPLETED, attempts=1, step=1, metrics=metrics))


def test_points_get_better_with_the_results_of_those_before() -> None:
    for count in (*range(12, 60, 8), 60):
        sent = submit(FakeSlurm(), *AXES, optuna=count, metric="-eval/loss")
        assert len(sent.sweep.points()) == count
        finish(sent.sweep)
    found = [distance(point) for point in sent.sweep.points()]
    near = [sum(each < 0.5 for each in part) for part in (found[:12], found[-24:])]
    assert near[1] / 24 > 2 * near[0] / 12
    assert len({point.id for point in sent.sweep.points()}) == 60
    # The same call again has nothing to do, also with the results there.
    again = submit(FakeSlurm(), *AXES, optuna=60)
    assert (again.new, again.points, again.jobs) == (0, [], [])


def test_a_small_sweep_knows_which_way_is_better() -> None:
    axis = {"optim.lr": axes.parse("optim.lr", "log(1e-5,1e-1)")}
    before = [axes.Tried({"optim.lr": 10.0**-power}, is_over=True, score=float(power)) for power in (2, 3, 4, 5)]
    less, more = (axes.suggest_points(axis, 8, 0, before, less_is_better=is_less) for is_less in (True, False))
    assert less != more


@pytest.mark.parametrize("at", range(0, 400, 16))
def test_a_submitter_killed_at_any_operation_leaves_as_many_points_as_asked(tmp_path: Path, at: int) -> None:
    slurm, options = SlurmOnDisk(tmp_path / "jobs"), {"optuna": 7, "metric": "eval/accuracy"}
    assert killed(slurm, at, *AXES, **options) or at > 300
    sweep = submit(slurm, *AXES, **options).sweep
    assert len(sweep.points()) == len({point.id for point in sweep.points()}) == 7
    assert sorted(slurm.scripts) == sorted(str(path.with_suffix(".sh")) for path in sweep.arrays())


def test_fewer_points_are_there_where_the_values_allow_no_more() -> None:
    sent = submit(FakeSlurm(), "params.width=1,2", "train.seed=0..2", optuna=20, metric="eval/accuracy")
    assert sent.new == 6


def test_a_range_of_too_many_values_is_refused_before_they_are_made() -> None:
    with pytest.raises(RequestError, match=r"--optuna: train\.seed: 1,000,000,001 points are more than"):
        submit(FakeSlurm(), "train.seed=0..1000000000", optuna=4, metric="eval/loss")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optuna": 4}, "--optuna: runs are compared by --metric"),
        ({"optuna": 4, "random": 4, "metric": "eval/loss"}, "--random: does not go with --optuna"),
        ({"optuna": 0, "metric": "eval/loss"}, "a sample of 0 points is out of range"),
        ({"optuna": 10**9, "metric": "eval/loss"}, "more than the"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_is_written(options: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        submit(FakeSlurm(), *AXES, **options)
    assert not sweep_folder.of_name("mine").path.exists()


def test_without_optuna_the_user_hears_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(RequestError, match=r"pip install 'slurm-batch-toolkit\[optuna\]'"):
        submit(FakeSlurm(), *AXES, optuna=4, metric="eval/loss")
