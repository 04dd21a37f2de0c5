"""TensorBoard's view of a run's attempts, from files as the supervisor writes them."""

from __future__ import annotations

import errno
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.files import rundir
from toolkit.files.run_files import AttemptRecord, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.metrics.goodput import MEASURED, PARTS, Timesheet
from toolkit.plugins.report.stragglers import History


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return rundir.create("test", tmp_path)


def ledger(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(PARTS, 0.0) | seconds


def line(number: int, first: int | None, last: int | None, **more: Any) -> AttemptRecord:
    times = {"started": "2026-11-20T15:00:10.000+00:00", "ended": "2026-11-20T15:02:00.000+00:00"}
    place = {
        "nodes": "node[1-2]",
        "cause": "crashed",
        "decision": "restart",
        "line": "rank 1 on node2: killed by SIGKILL",
    }
    keys = {"attempt": number, "step_start": first, "step_end": last, **times, **place, **more}
    return AttemptRecord.from_json(keys)


def history(run: RunDir, attempt: int, first_step: int, *, rank: int = 0, **spent: float) -> History:
    sheet = Timesheet()
    sheet.spent |= spent
    session: Any = SimpleNamespace(attempt=attempt, is_main=rank == 0, run_dir=run.path)
    return History(session, first_step, sheet)


def test_the_shares_are_of_the_time_since_the_submission_over_all_attempts(run: RunDir) -> None:
    """The whole is 200 s: 120 s up to the end of the first attempt.

    Then 20 s pass to the second one's first step, and 60 s after it.
    """
    before = ledger(queue=10.0, training=90.0, data_wait=6.0, idle=14.0)
    run.add_attempt(line(1, 0, 100, submitted="2026-11-20T15:00:00.000+00:00", goodput=before))
    at = datetime.fromisoformat("2026-11-20T15:02:20.000+00:00").timestamp()
    run.write_status(
        RunStatus.from_json({"attempt": 2, "updated": at, "started": at, "goodput": ledger(start_up=18.0, idle=2.0)})
    )
    seen = history(run, 2, 80, training=54.0, data_wait=6.0).scalars(120)  # 40 steps, 20 of them again
    assert seen.pop("run/attempt") == 2.0
    shares = ledger(queue=10.0, start_up=18.0, training=90.0 + 27.0, data_wait=6.0 + 3.0, replay=30.0, idle=16.0)
    assert seen == pytest.approx({f"goodput/{part}": seconds / 200.0 for part, seconds in shares.items()}, abs=1e-5)


def test_without_a_supervisor_the_shares_are_of_the_loops_own_time(run: RunDir) -> None:
    seen = history(run, 1, 0, training=3.0, evaluation=1.0).scalars(10)
    assert (seen["goodput/training"], seen["goodput/evaluation"], seen["run/attempt"]) == (0.75, 0.25, 1.0)
    assert sum(seen.values()) == pytest.approx(2.0)


def test_the_first_attempt_has_no_restarts_to_tell_of(run: RunDir) -> None:
    assert history(run, 1, 0).take_table() is None


def test_each_restart_is_a_row_that_says_what_it_cost(run: RunDir) -> None:
    run.add_attempt(line(1, 0, 170))
    run.add_attempt(line(2, None, None, line="rank 0: a|b\nnot found", nodes="node[1,3]"))
    run.write_status(RunStatus.from_json({"attempt": 3, "nodes": ["node1"]}))
    seen = history(run, 3, 100)
    assert (seen.take_table() or "").splitlines() == [
        "| attempt | from step | nodes | why the attempt before it ended | steps lost |",
        "| --- | --- | --- | --- | --- |",
        "| 2 |  | node[1,3] | crashed: rank 1 on node2: killed by SIGKILL |  |",
        r"| 3 | 100 | node1 | crashed: rank 0: a\|b not found |  |",
    ]
    assert seen.take_table() is None  # once in an attempt
    assert "| 2 | 60 | node[1-2] | crashed: rank 1 on node2: killed by SIGKILL | 110 |" in told_of(run)


def told_of(run: RunDir) -> str:
    """Return the table at the first step of the second attempt."""
    (run.path / "attempts.jsonl").unlink()
    run.add_attempt(line(1, 0, 170))
    run.write_status(RunStatus.from_json({"attempt": 2, "nodes": ["node1", "node2"]}))
    return history(run, 2, 60).take_table() or ""


def test_a_disk_that_is_away_costs_figures_and_ends_no_training(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(_: RunDir) -> RunStatus:
        raise OSError(errno.EIO, "Input/output error")

    told = history(run, 1, 0)
    monkeypatch.setattr(RunDir, "status", away)
    assert "goodput/training" in told.scalars(1)


def test_only_rank_0_reads_the_files(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.add_attempt(line(1, 0, 100, goodput=ledger(training=1.0)))
    monkeypatch.setattr(RunDir, "attempts", lambda self: 1 / 0)
    monkeypatch.setattr(RunDir, "status", lambda self: 1 / 0)
    other = history(run, 2, 0, rank=1, **dict.fromkeys(MEASURED, 1.0))
    assert (other.scalars(5), other.take_table()) == ({}, None)
