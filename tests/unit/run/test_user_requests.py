"""Requests of users. Each is passed on until it is answered or withdrawn, whichever process dies meanwhile."""

import os
import stat
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from toolkit.base.errors import RequestError
from toolkit.cli import on_demand
from toolkit.files.run_files import RunResult, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.run.records import user_requests
from toolkit.run.records.user_requests import Answer, Intent, PendingRequests, RequestKind, UserRequest
from toolkit.run.supervise.attempt_loop import UserRequestHandler


def request(wish: RequestKind = RequestKind.PROFILE, **values: Any) -> UserRequest:
    return UserRequest(wish, time.time(), **values)


class Desk:
    """An attempt's requests, with a store that notes proposals, and a watch that notes what it is to answer."""

    def __init__(self, run: RunDir, *, is_script: bool = False) -> None:
        self.proposed: list[str] = []
        self.for_stacks: list[str] = []
        self.attempt = SimpleNamespace(stop=None, kill_at=None, plan=SimpleNamespace(world_size=2))
        store = SimpleNamespace(propose=lambda kind, by: self.proposed.append(kind))
        investigation = SimpleNamespace(answer=lambda request_id, reports: self.for_stacks.append(request_id))
        hangs = SimpleNamespace(investigation=investigation, reports=None)
        self.run, context = run, SimpleNamespace(run=run, is_script=is_script)
        self.requests = UserRequestHandler(
            cast(Any, context), cast(Any, self.attempt), cast(Any, store), cast(Any, hangs)
        )

    def look(self) -> None:
        self.requests.pass_on(user_requests.scan_requests(self.run).ids)


def test_each_request_is_handed_on_once_in_an_attempt_and_again_in_the_next(run: RunDir) -> None:
    first, second = user_requests.put(run, request()), user_requests.put(run, request())
    desk = Desk(run)
    desk.look()
    desk.look()
    assert desk.proposed == [f"request {first}", f"request {second}"]
    user_requests.answer(run, first, Answer(step=7))
    user_requests.remove(run, second)
    of_next_supervisor = Desk(run)
    of_next_supervisor.look()
    assert of_next_supervisor.proposed == [], "one is answered, and one was withdrawn"
    third = user_requests.put(run, request())
    of_next_supervisor.look()
    assert of_next_supervisor.proposed == [f"request {third}"]


def test_requests_wait_while_the_ranks_are_told_to_stop(run: RunDir) -> None:
    user_requests.put(run, request())
    desk = Desk(run)
    desk.attempt.stop = "move"
    desk.look()
    assert desk.proposed == []
    desk.attempt.stop = None
    desk.look()
    assert len(desk.proposed) == 1


def test_what_ranks_cannot_do_is_refused_with_the_reason(run: RunDir) -> None:
    for desk, asked, why in [
        (Desk(run, is_script=True), request(), "a script under `toolkit exec`"),
        (Desk(run), request(RequestKind.PROFILE, rank=2), "has no rank 2: its ranks are 0 to 1"),
    ]:
        number = user_requests.put(run, asked)
        desk.look()
        assert why in (user_requests.answer_to(run, number).refused or "")
        assert desk.proposed == []


def test_a_request_for_stacks_is_answered_by_the_supervisor_and_goes_to_no_rank(run: RunDir) -> None:
    desk = Desk(run, is_script=True)
    number = user_requests.put(run, request(RequestKind.STACKS))
    desk.look()
    assert (desk.for_stacks, desk.proposed) == ([number], [])


def test_a_damaged_request_is_refused_and_others_are_served(run: RunDir) -> None:
    damaged, good = user_requests.put(run, request()), user_requests.put(run, request())
    (run.path / "requests" / f"{damaged}.json").write_text('{"wish": ')
    desk = Desk(run)
    desk.look()
    assert f"{damaged}.json" in (user_requests.answer_to(run, damaged).refused or "")
    assert desk.proposed == [f"request {good}"]


def test_a_request_of_a_command_that_was_killed_long_ago_is_removed(run: RunDir) -> None:
    number = user_requests.put(run, request())
    path = run.path / "requests" / f"{number}.json"
    before = time.time() - user_requests.LONGEST_WAIT_S - 1
    os.utime(path, (before, before))
    assert user_requests.scan_requests(run) == PendingRequests()
    assert not path.exists()


def test_only_the_owner_can_read_or_write_requests(run: RunDir) -> None:
    number = user_requests.put(run, request())
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
    handle = SimpleNamespace(statuses=lambda: iter([run.status()]), wake_supervisor=lambda: None)
    monkeypatch.setattr("toolkit.run.submission.handle.attach", lambda run: handle)
    with pytest.raises(RequestError, match="no answer within 1 s, the request is withdrawn"):
        on_demand.carry_out(run, request(), 1.0)
    assert list((run.path / "requests").iterdir()) == []
    with pytest.raises(RequestError, match="--wait: 0 is out of range; must be between 0 and 3600 seconds"):
        on_demand.carry_out(run, request(), 0.0)


def test_a_stop_does_not_replace_a_cancel(run: RunDir) -> None:
    user_requests.record_intent(run, Intent.CANCEL)
    user_requests.record_intent(run, Intent.STOP)
    assert user_requests.read_intent(run) is Intent.CANCEL


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_root_asks_does_not_keep_out_the_runs_own_user(run: RunDir) -> None:
    os.chown(run.path, 12345, 12345)
    user_requests.record_intent(run, Intent.STOP)
    assert (run.path / "requests").stat().st_uid == 12345
