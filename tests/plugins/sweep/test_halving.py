"""Successive halving: which runs of a sweep go on from a rung."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from toolkit.base import fsio, reading
from toolkit.files import rundir
from toolkit.files.run_files import AttemptRecord, RunProgress, SweepPoint
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.plugins.sweep.halving import Halving, worse_than
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.facts import Cause, Decision, Facts, Stop
from toolkit.run.attempt.verdict import judge
from toolkit.run.job.slurm_job import JobFate
from toolkit.run.supervise.stop_path import StopPath


def test_of_runs_in_a_random_order_about_a_third_goes_on_and_the_best_always(tmp_path: Path) -> None:
    values = list(range(81))
    random.Random(3).shuffle(values)
    passed = [value for value in values if worse_than(tmp_path / "rung-1", f"p{value}", float(value), 3) is None]
    assert 0 in passed
    # Early runs are compared with few others, so some go on that would not have later.
    assert 20 <= len(passed) <= 41
    assert sum(value < 27 for value in passed) > 18


def test_a_run_is_judged_once_and_a_damaged_record_ends_none(tmp_path: Path) -> None:
    rung = tmp_path / "rung-1"
    for number in range(3):
        worse_than(rung, f"p{number}", float(number), 2)
    assert worse_than(rung, "late", 9.0, 2) == "number 4 of 4, and the best 2 go on"
    assert worse_than(rung, "late", 9.0, 2) is None
    assert worse_than(rung, "nan", float("nan"), 2) == "not a number"
    (rung / "p9=x").touch()
    assert worse_than(rung, "other", 99.0, 2) is None


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = rundir.create("name", tmp_path / "runs")
    point = SweepPoint("mine", "p", {}, metric="-eval/loss", halving=2)
    fsio.write_json(run.path / "point.json", point.to_file())
    fsio.make_dir(run.path.parent.parent / ".sweeps/mine")
    return run


def halving_of(run: RunDir, *lines: AttemptRecord) -> Halving:
    return Halving(cast(Any, SimpleNamespace(run=run, journal=SimpleNamespace(lines=lines))))


def look(halving: Halving, step: int, loss: float | None) -> tuple[list[Stop], Attempt]:
    """Return the reasons to stop, and the attempt that they were given to."""
    metrics = {} if loss is None else {"eval/loss": loss}
    progress = RunProgress(step=step, total_steps=100, metrics=metrics)
    attempt = Attempt(1, 0.0, Allocation(("here",), (1,), 1), progress=progress)
    halving.look(attempt, cast(StopPath, SimpleNamespace(ask=attempt.ask_to_stop)))
    return [] if attempt.stop is None else [attempt.stop], attempt


def test_a_run_is_stopped_at_the_first_rung_where_others_are_better(run: RunDir) -> None:
    for rung in (1, 2, 3, 4):
        place = fsio.make_dir(run.path.parent.parent / f".sweeps/mine/rung-{rung}")
        for number, loss in enumerate((0.5, 0.6, 3.0)):
            (place / f"q{number}={loss if rung < 3 else loss + 9}").touch()
    halving = halving_of(run)
    assert look(halving, 5, 2.0)[0] == []  # before the first rung
    assert look(halving, 6, None)[0] == []  # no figure yet
    assert look(halving, 7, 2.0)[0] == []  # rung 4: the others were worse
    asked, attempt = look(halving, 25, 2.0)
    assert asked == [Stop.HALVING]
    assert attempt.stop_note == "ended by halving at step 25: eval/loss 2 is number 3 of 4, and the best 2 go on"
    verdict = judge(Facts(75, stopped_cleanly=True, stop=Stop.HALVING, stop_note=attempt.stop_note, step_end=26))
    assert (verdict.cause, verdict.decision) == (Cause.STOPPED, Decision.FINISH)
    assert verdict.line.startswith(attempt.stop_note)
    cancelled = judge(Facts(75, stopped_cleanly=True, stop=Stop.HALVING, slurm=JobFate.CANCELLED))
    assert cancelled.cause is Cause.CANCELLED


def test_a_run_that_is_lost_before_it_has_stopped_stops_in_its_next_attempt(run: RunDir) -> None:
    place = fsio.make_dir(run.path.parent.parent / ".sweeps/mine/rung-4")
    for number in range(3):
        (place / f"q{number}=0.5").touch()
    first = look(halving_of(run), 7, 2.0)[1].stop_note
    lost = closed(1, "lost", "the job is gone")
    asked, attempt = look(halving_of(run, lost), 8, 0.1)
    assert (asked, attempt.stop_note) == ([Stop.HALVING], first)
    ended = closed(2, "stopped", f"{first}; 7 steps are kept")
    assert look(halving_of(run, lost, ended), 9, 0.1)[0] == []  # its user has resumed it


def closed(number: int, cause: str, line: str) -> AttemptRecord:
    times = {"started": "2026-11-20T15:00:00.000+00:00", "ended": "2026-11-20T15:01:00.000+00:00"}
    ends = {"attempt": number, "cause": cause, "decision": "restart", "line": line, "nodes": "here"}
    return AttemptRecord.from_json({**ends, **times})


def test_a_run_of_no_sweep_is_compared_with_nothing(tmp_path: Path) -> None:
    halving = halving_of(rundir.create("name", tmp_path))
    assert look(halving, 50, 9.0)[0] == []


def test_a_point_that_cannot_be_read_now_lets_the_run_go_on(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(path: Path, most_bytes: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(reading, "read_bytes", fails)
    assert look(halving_of(run), 25, 2.0)[0] == []
    assert "without being compared" in caplog.text


def test_of_four_runs_with_three_one_goes_on(tmp_path: Path) -> None:
    for number in range(3):
        worse_than(tmp_path / "rung-1", f"p{number}", (0.0, 8.0, 9.0)[number], 3)
    assert worse_than(tmp_path / "rung-1", "p3", 1.0, 3) == "number 2 of 4, and the best 1 go on"


def test_a_run_that_was_judged_goes_on_also_without_a_number(tmp_path: Path) -> None:
    assert worse_than(tmp_path / "rung-1", "p", 1.0, 3) is None
    assert worse_than(tmp_path / "rung-1", "p", float("nan"), 3) is None
