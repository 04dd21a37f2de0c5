"""How often a run's files are due."""

import os
import time
from pathlib import Path

import pytest

from tests.process_limits import ChangeLimits
from toolkit.files import polling, rundir
from toolkit.files.polling import PollTimer
from toolkit.run.records import user_requests
from toolkit.run.records.user_requests import PendingRequests


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def due(clock: list[float], files: PollTimer, seconds: float) -> int:
    """Return at how many of the ticks of so many seconds the files are due."""
    count = 0
    for _ in range(round(2 * seconds)):
        clock[0] += 0.5
        count += files.is_due("running")
    return count


def test_files_are_due_at_each_tick_at_first_and_then_rarely(clock: list[float]) -> None:
    files = PollTimer()
    assert due(clock, files, 59) == 2 * 59
    assert due(clock, files, 600) in range(120, 125)


def test_while_somebody_watches_they_are_due_each_second(clock: list[float]) -> None:
    files = PollTimer()
    due(clock, files, 120)
    files.has_viewer = True
    assert due(clock, files, 60) == 60


def test_a_new_state_and_a_request_are_not_kept_waiting(clock: list[float]) -> None:
    files = PollTimer()
    due(clock, files, 120)
    assert files.is_due("saving")
    assert not files.is_due("saving")
    files.hurry()
    assert files.is_due("saving")


def test_a_run_is_watched_until_nobody_has_looked_for_some_time(tmp_path: Path, change_limits: ChangeLimits) -> None:
    run = rundir.create("test", tmp_path)
    assert user_requests.scan_requests(run) == PendingRequests()
    polling.mark_viewer(run)
    assert user_requests.scan_requests(run) == PendingRequests(has_viewer=True)
    mark = run.path / "requests" / "watched"
    os.utime(mark, (time.time() - 60,) * 2)
    assert user_requests.scan_requests(run) == PendingRequests()
    polling.mark_viewer(run)
    assert user_requests.scan_requests(run) == PendingRequests(has_viewer=True)


def test_another_users_run_can_be_watched_as_it_is(tmp_path: Path) -> None:
    run = rundir.create("test", tmp_path)
    (run.path / "requests").write_text("not a folder")
    polling.mark_viewer(run)
