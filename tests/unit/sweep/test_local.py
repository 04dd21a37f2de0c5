"""Points on this machine are started once each, whatever else happens at that moment."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.unit.sweep.test_submission import project
from toolkit.launch import outages
from toolkit.launch.record import ownership, sweep_folder
from toolkit.launch.record.sweep_folder import SweepDir
from toolkit.launch.submission import executors
from toolkit.launch.submission.handle import Run
from toolkit.run_files import RunResult, RunState
from toolkit.rundir import RunDir
from toolkit.sweep import local, request, submission
from toolkit.sweep.request import Options

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
    run.write_owner(owner.replace(pid=os.getppid()))
    assert local._start(sweep, point) is None
    assert run.result() is None
