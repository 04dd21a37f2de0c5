"""Points on this machine are started once each, whatever else happens at that moment."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.sweep.test_submission import project
from tests.process_limits import ChangeLimits
from toolkit.cli import run_rows
from toolkit.cli.main import main
from toolkit.files.run_files import DependencyRecord, RunResult, RunState
from toolkit.files.rundir import RunDir
from toolkit.plugins.sweep import awaited, local, request, rows, submission, sweep_folder
from toolkit.plugins.sweep.request import Options
from toolkit.plugins.sweep.rows import PointRow
from toolkit.plugins.sweep.sweep_folder import SweepDir
from toolkit.run.records import ownership, user_requests
from toolkit.run.submission import executors
from toolkit.run.submission.handle import Run

__all__ = ["project"]  # the fixture: each test is in a project of its own


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits) -> SweepDir:
    """Return a sweep of two points that this process is to run."""
    monkeypatch.setattr(local, "start", lambda path: str(os.getpid()))
    change_limits(look_at_points_every_s=0.01)
    submission.submit(request.read("mine.yaml", ["train.seed=0,1"], Options()), Path.cwd(), "local")
    return sweep_folder.of_name("mine")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have runs complete at once. Return the ids of those that were started."""
    starts: list[str] = []

    def send(run: RunDir, *_: Any) -> Any:
        starts.append(run.id)
        run.write_result(RunResult(RunState.COMPLETED, attempts=1, step=1, metrics={}))
        return Run(run, "local", "")

    monkeypatch.setattr(executors, "send", send)
    return starts


def runs_of(sweep: SweepDir) -> list[RunDir]:
    return [sweep.run_of(point) for point in sweep.points()]


def look(sweep: SweepDir) -> list[PointRow]:
    return rows.of_points(sweep, run_rows.status_rows)


def work(sweep: SweepDir) -> None:
    local.run_array([*sweep.arrays()][-1])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ESTALE])
def test_a_disk_that_fails_for_a_moment_ends_no_sweep_and_no_point(
    sweep: SweepDir, started: list[str], monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits, number: int
) -> None:
    usual, calls = executors.send, list[str]()

    def send(run: RunDir, *others: Any) -> Any:
        calls.append(run.id)
        if len(calls) in (1, 3):
            raise OSError(number, os.strerror(number))
        return usual(run, *others)

    monkeypatch.setattr(executors, "send", send)
    change_limits(retry_every_s=0.01)
    work(sweep)
    assert [each.state for each in look(sweep)] == ["completed"] * 2
    assert (len(calls), started) == (4, [run.id for run in runs_of(sweep)])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ESTALE])
@pytest.mark.parametrize("method", ["owner", "result", "write_status", "write_result"])
def test_a_file_that_fails_for_a_moment_ends_no_sweep(
    sweep: SweepDir, started: list[str], monkeypatch: pytest.MonkeyPatch, number: int, method: str
) -> None:
    first, second = runs_of(sweep)
    user_requests.record_intent(first, user_requests.Intent.STOP)
    usual, calls = getattr(RunDir, method), list[object]()

    def fail_once(self: RunDir, *others: Any) -> Any:
        calls.append(self)
        if len(calls) == 1:
            raise OSError(number, os.strerror(number))
        return usual(self, *others)

    monkeypatch.setattr(RunDir, method, fail_once)
    work(sweep)
    assert calls
    assert ([each.state for each in look(sweep)], started) == (["stopped", "completed"], [second.id])


@pytest.mark.parametrize("name", ["owner.json", "config.yaml", "result.json"])
def test_a_damaged_point_keeps_no_other_from_being_run(sweep: SweepDir, started: list[str], name: str) -> None:
    first, second = runs_of(sweep)
    (first.path / name).write_text("{")
    work(sweep)
    assert (started, look(sweep)[1].state) == ([second.id], "completed")


def test_a_point_that_waits_for_its_turn_is_queued_and_can_be_ended(
    sweep: SweepDir, started: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = runs_of(sweep)
    assert [each.state.split()[0] for each in look(sweep)] == ["queued"] * 2
    assert len(awaited.prerequisites(DependencyRecord((), (str(sweep.path),)), lambda jobs: {}).working) == 2
    assert main(["cancel", first.id]) == 0
    work(sweep)
    assert [each.state for each in look(sweep)] == ["cancelled", "completed"]
    assert started == [second.id]


def test_a_sweep_that_was_stopped_goes_on_with_a_retry(sweep: SweepDir, started: list[str]) -> None:
    assert submission.stop(sweep) == (2, 0, {})
    work(sweep)
    assert ([each.state for each in look(sweep)], started) == (["stopped"] * 2, [])
    jobs, sent = submission.retry(sweep, [each.point for each in look(sweep) if each.is_to_retry])
    assert (jobs, len(sent)) == ([], 2)
    assert [each.state.split()[0] for each in look(sweep)] == ["queued"] * 2
    work(sweep)
    assert [each.state for each in look(sweep)] == ["completed"] * 2


def test_a_point_that_its_user_resumes_is_left_to_him(sweep: SweepDir, started: list[str]) -> None:
    first, second = runs_of(sweep)
    ownership.submit_as(first, "local", ownership.take(first, ownership.number_of(first)))
    work(sweep)
    assert (first.result(), started) == (None, [second.id])


def test_points_whose_process_was_killed_are_lost_and_can_be_retried(
    sweep: SweepDir, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    monkeypatch.setattr(local, "start", lambda path: str(child))
    submission.submit(request.read("mine.yaml", ["train.seed=2,3"], Options()), Path.cwd(), "local")
    for run in runs_of(sweep)[2:]:
        run.write_status(run.status().replace(updated=1.0))
    assert [each.state for each in look(sweep)] == ["queued", "queued", "lost", "lost"]
    monkeypatch.setattr(local, "start", lambda path: str(os.getpid()))
    submission.retry(sweep, [each.point for each in look(sweep) if each.is_to_retry])
    work(sweep)
    assert [each.state.split()[0] for each in look(sweep)] == ["queued", "queued", "completed", "completed"]
