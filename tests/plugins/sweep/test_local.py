"""Points on this machine are started once each, whatever else happens at that moment."""

from __future__ import annotations

import errno
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.sweep.test_submission import project
from toolkit.base import outages
from toolkit.base.procfs import ProcessIdentity
from toolkit.cli import show
from toolkit.cli.main import main
from toolkit.files.run_files import AfterRecord, RunResult, RunState
from toolkit.files.rundir import RunDir
from toolkit.plugins.sweep import again, awaited, local, request, submission, sweep_folder
from toolkit.plugins.sweep.request import Options
from toolkit.plugins.sweep.states import PointStanding, standings
from toolkit.plugins.sweep.sweep_folder import SweepDir
from toolkit.run.records import ownership
from toolkit.run.submission import executors
from toolkit.run.submission.handle import Run

__all__ = ["project"]  # the fixture: each test is in a project of its own


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> SweepDir:
    """Return a sweep of two points that no process runs yet."""
    monkeypatch.setattr(local, "start", lambda sweep: None)
    submission.submit(request.read("mine.yaml", ["train.seed=0,1"], Options()), Path.cwd(), "local")
    return sweep_folder.of_name("mine")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ESTALE])
def test_a_disk_that_fails_for_a_moment_ends_no_sweep_and_no_point(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    starts: list[str] = []

    def send(run: RunDir, *_: Any) -> Any:
        starts.append(run.id)
        if len(starts) in (1, 3):
            raise OSError(number, os.strerror(number))
        run.write_result(RunResult(RunState.COMPLETED, attempts=1, step=1, metrics={}))
        return Run(run, "local", "")

    monkeypatch.setattr(executors, "send", send)
    monkeypatch.setattr(outages, "RETRY_EVERY_S", 0.01)
    local.work(sweep)
    runs = [sweep.run_of(point) for array in sweep.arrays() for point in array.points()]
    assert [run.result() and run.result().state for run in runs] == ["completed"] * 2
    assert len(starts) == 4


def test_a_point_that_its_user_resumes_at_this_moment_is_left_to_him(sweep: SweepDir) -> None:
    point = sweep.arrays()[0].points()[0]
    run = sweep.make_run(point, 1.0)
    owner = ownership.submit_as(run, "local", ownership.take(run, 0))
    run.write_owner(owner.replace(**asdict(ProcessIdentity.of(os.getppid()))))
    assert local._start(sweep, point) is None
    assert run.result() is None


def test_a_point_that_its_user_resumes_after_a_retry_is_started_by_one_of_them(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = sweep.arrays()[0].points()[0]
    run = sweep.make_run(point, 1.0)
    ownership.submit_as(run, "local", ownership.take(run, 0))
    run.write_result(RunResult(RunState.FAILED, attempts=1, step=7, metrics={}))
    number = ownership.take(run, ownership.number_of(run))  # and at this moment it has written no owner yet
    assert local._start(sweep, point) is None
    assert run.result() == RunResult(RunState.FAILED, attempts=1, step=7, metrics={})
    run.give_back_number(number)
    started: list[str] = []
    monkeypatch.setattr(executors, "send", lambda run, *_: started.append(run.id))
    local._start(sweep, point)
    assert started == [run.id]


def test_points_that_wait_for_their_second_start_count_as_queued_and_can_be_stopped(sweep: SweepDir) -> None:
    points = sweep.arrays()[0].points()
    for point in points:
        sweep.make_run(point, 1.0).write_result(RunResult(RunState.FAILED, attempts=1, step=7, metrics={}))
    time.sleep(0.01)  # a tick of the file system's clock
    again.retry(sweep, look(sweep))
    assert [each.state for each in look(sweep)] == ["failed"] * 2  # no process would start them
    awaiting = AfterRecord((), (str(sweep.path),))
    fd = sweep.local_lock()  # as the process holds it
    assert fd is not None
    try:
        waiting = look(sweep)
        assert [each.state for each in waiting] == ["queued"] * 2
        assert len(awaited.outlook(awaiting, lambda jobs: {}).working) == 2
        assert len(local._waiting(sweep)) == 2
        time.sleep(0.01)
        assert again.stop(sweep, waiting) == (2, 0)
        assert [each.state for each in look(sweep)] == ["failed"] * 2
        assert local._waiting(sweep) == []
    finally:
        os.close(fd)
    results = [sweep.run_of(point).result() for point in points]
    assert [result and result.step for result in results] == [7, 7]


def test_a_point_that_waits_for_its_second_start_can_be_told_not_to(
    sweep: SweepDir, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = sweep.arrays()[0].points()
    for point in (first, second):
        sweep.make_run(point, 1.0).write_result(RunResult(RunState.FAILED, attempts=1, step=7, metrics={}))
    time.sleep(0.01)  # a tick of the file system's clock
    again.retry(sweep, look(sweep))
    time.sleep(0.01)
    for words in (
        "was to be run again by its sweep, and is not any more; it stays failed",
        "has already ended: failed",
    ):
        assert main(["cancel", sweep.run_of(first).id]) == 0
        assert words in capsys.readouterr().out
    assert local._waiting(sweep) == [second]


def look(sweep: SweepDir) -> list[PointStanding]:
    return standings(sweep, lambda jobs: {}, show.status_rows)
