"""Requests of users. Each is passed on until it is answered or withdrawn, whichever process dies meanwhile."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from toolkit.base.errors import RequestError
from toolkit.cli import on_demand
from toolkit.files import rundir
from toolkit.files.run_files import RunResult, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.run.records import stop_request
from toolkit.run.records.stop_request import Answer, Intent, UserRequest, Wish
from toolkit.run.supervise.attempt_loop import UserRequests


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return rundir.create("name", tmp_path)


def request(wish: Wish = Wish.PROFILE, **values: Any) -> UserRequest:
    return UserRequest(wish, time.time(), **values)


class Desk:
    """An attempt's requests, with a store that notes proposals, and a watch that notes what it is to answer."""

    def __init__(self, run: RunDir, *, is_foreign: bool = False) -> None:
        self.proposed: list[str] = []
        self.for_stacks: list[str] = []
        self.attempt = SimpleNamespace(stop=None, kill_at=None, plan=SimpleNamespace(world_size=2))
        store = SimpleNamespace(propose=lambda kind, by: self.proposed.append(kind))
        investigation = SimpleNamespace(answer=lambda request_id, reports: self.for_stacks.append(request_id))
        hangs = SimpleNamespace(investigation=investigation, reports=None)
        context = SimpleNamespace(run=run, is_foreign=is_foreign)
        self.look = UserRequests(cast(Any, context), cast(Any, self.attempt), cast(Any, store), cast(Any, hangs)).look


def test_each_request_is_handed_on_once_in_an_attempt_and_again_in_the_next(run: RunDir) -> None:
    first, second = stop_request.put(run, request()), stop_request.put(run, request())
    desk = Desk(run)
    desk.look()
    desk.look()
    assert desk.proposed == [f"request {first}", f"request {second}"]
    stop_request.answer(run, first, Answer(step=7))
    stop_request.remove(run, second)
    of_next_supervisor = Desk(run)
    of_next_supervisor.look()
    assert of_next_supervisor.proposed == [], "one is answered, and one was withdrawn"
    third = stop_request.put(run, request())
    of_next_supervisor.look()
    assert of_next_supervisor.proposed == [f"request {third}"]


def test_requests_wait_while_the_ranks_are_told_to_stop(run: RunDir) -> None:
    stop_request.put(run, request())
    desk = Desk(run)
    desk.attempt.stop = "move"
    desk.look()
    assert desk.proposed == []
    desk.attempt.stop = None
    desk.look()
    assert len(desk.proposed) == 1


def test_what_ranks_cannot_do_is_refused_with_the_reason(run: RunDir) -> None:
    for desk, asked, why in [
        (Desk(run, is_foreign=True), request(), "a script under `toolkit exec`"),
        (Desk(run), request(Wish.PROFILE, rank=2), "has no rank 2: its ranks are 0 to 1"),
    ]:
        number = stop_request.put(run, asked)
        desk.look()
        answer = stop_request.answer_to(run, number)
        assert answer is not None
        assert why in (answer.refused or "")
        assert desk.proposed == []


def test_a_request_for_stacks_is_answered_by_the_supervisor_and_goes_to_no_rank(run: RunDir) -> None:
    desk = Desk(run, is_foreign=True)
    number = stop_request.put(run, request(Wish.STACKS))
    desk.look()
    assert (desk.for_stacks, desk.proposed) == ([number], [])


def test_a_damaged_request_is_refused_and_others_are_served(run: RunDir) -> None:
    damaged, good = stop_request.put(run, request()), stop_request.put(run, request())
    (run.path / "requests" / f"{damaged}.json").write_text('{"wish": ')
    desk = Desk(run)
    desk.look()
    answer = stop_request.answer_to(run, damaged)
    assert answer is not None
    assert f"{damaged}.json" in (answer.refused or "")
    assert desk.proposed == [f"request {good}"]


def test_a_request_of_a_command_that_was_killed_long_ago_is_removed(run: RunDir) -> None:
    number = stop_request.put(run, request())
    path = run.path / "requests" / f"{number}.json"
    before = time.time() - stop_request.LONGEST_WAIT_S - 1
    os.utime(path, (before, before))
    assert stop_request.unanswered(run) == []
    assert not path.exists()


def test_only_the_owner_can_read_or_write_requests(run: RunDir) -> None:
    number = stop_request.put(run, request())
    folder = run.path / "requests"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / f"{number}.json").stat().st_mode) == 0o600


def test_nothing_is_asked_of_a_run_that_has_ended_or_waits(run: RunDir) -> None:
    run.write_status(RunStatus(state=RunState.QUEUED))
    with pytest.raises(RequestError, match="is queued: it has no ranks yet"):
        on_demand.carry_out(run, request(), 1.0)
    run.write_result(RunResult(RunState.COMPLETED))
    with pytest.raises(RequestError, match=r"has ended \(completed\)"):
        on_demand.carry_out(run, request(), 1.0)
    assert not (run.path / "requests").exists()


def test_without_an_answer_the_request_is_withdrawn(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.write_status(RunStatus(state=RunState.RUNNING))
    handle = SimpleNamespace(statuses=lambda: iter([run.status()]))
    monkeypatch.setattr("toolkit.run.submission.handle.attach", lambda run: handle)
    with pytest.raises(RequestError, match="no answer within 1 s, the request is withdrawn"):
        on_demand.carry_out(run, request(), 1.0)
    assert list((run.path / "requests").iterdir()) == []
    with pytest.raises(RequestError, match="--wait 0: from 0 to 3600 seconds"):
        on_demand.carry_out(run, request(), 0.0)


def test_a_stop_does_not_replace_a_cancel(run: RunDir) -> None:
    stop_request.ask(run, Intent.CANCEL)
    stop_request.ask(run, Intent.STOP)
    assert stop_request.asked(run) is Intent.CANCEL
