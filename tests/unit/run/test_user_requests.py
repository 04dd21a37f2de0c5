"""Requests of users. Each is passed on until it is answered or withdrawn, whichever process dies meanwhile."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.waiting import wait_for
from toolkit.base.errors import RequestError
from toolkit.cli import on_demand
from toolkit.files import rundir
from toolkit.files.run_files import RunResult, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.hang import outside_stacks, stack_digest, stacks
from toolkit.hang.stack_digest import RankGroup
from toolkit.nodes.agent.reports import Standing
from toolkit.run.records import stop_request, user_request
from toolkit.run.records.stop_request import Intent
from toolkit.run.records.user_request import Answer, StackGroup, UserRequest, Wish
from toolkit.run.supervise.attempt_loop import UserRequests


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return rundir.create("name", tmp_path)


def request(wish: Wish = Wish.SET, **values: Any) -> UserRequest:
    return UserRequest(wish, time.time(), **values)


STACK = (
    'File "/venv/lib/site-packages/torch/nn.py", line 3, in forward',
    'File "/toolkit/run/rank/main.py", line 9, in run',
)


class Desk:
    """An attempt's requests, with a store that notes proposals. The stacks of its ranks are known."""

    def __init__(self, run: RunDir, *, is_foreign: bool = False) -> None:
        self.proposed: list[str] = []
        self.attempt = SimpleNamespace(
            number=1, stop=None, kill_at=None, plan=SimpleNamespace(world_size=2), progress=SimpleNamespace(step=5)
        )
        store = SimpleNamespace(propose=lambda kind, by: self.proposed.append(kind))
        hangs = SimpleNamespace(read_stacks=self.read_stacks)
        context = SimpleNamespace(run=run, is_foreign=is_foreign)
        self.look = UserRequests(cast(Any, context), cast(Any, self.attempt), cast(Any, store), cast(Any, hangs)).look

    def read_stacks(self) -> list[RankGroup]:
        return [RankGroup((True, 5, 1, True), "in a step", True, True, (0, 1), 2.0, STACK)]


def test_each_request_is_handed_on_once_in_an_attempt_and_again_in_the_next(run: RunDir) -> None:
    first, second = user_request.put(run, request()), user_request.put(run, request())
    desk = Desk(run)
    desk.look()
    desk.look()
    assert desk.proposed == [f"request {first}", f"request {second}"]
    user_request.answer(run, first, Answer(step=7))
    user_request.remove(run, second)
    of_next_supervisor = Desk(run)
    of_next_supervisor.look()
    assert of_next_supervisor.proposed == [], "one is answered, and one was withdrawn"
    third = user_request.put(run, request())
    of_next_supervisor.look()
    assert of_next_supervisor.proposed == [f"request {third}"]


def test_requests_wait_while_the_ranks_are_told_to_stop(run: RunDir) -> None:
    user_request.put(run, request())
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
        number = user_request.put(run, asked)
        desk.look()
        answer = user_request.answer_to(run, number)
        assert answer is not None
        assert why in (answer.refused or "")
        assert desk.proposed == []


def test_stacks_are_the_supervisors_answer_and_go_to_no_rank(run: RunDir) -> None:
    desk = Desk(run)
    number = user_request.put(run, request(Wish.STACKS))
    desk.look()
    answer = wait_for(lambda: user_request.answer_to(run, number), 5, "an answer")
    assert answer.groups == (StackGroup((0, 1), "in a step", 2.0, STACK),)
    assert desk.proposed == []
    page = on_demand.stacks_page(run, answer)
    assert page.split("\n\n")[1] == "2 ranks: 0-1: in a step, for 2 s\n  torch/nn.py:3 forward"
    # Ranks that have only begun have none, which is no lack of a program.
    without = answer.replace(groups=())
    assert "needs py-spy" in on_demand.stacks_page(run, without)
    run.write_status(RunStatus(RunState.STARTING))
    assert "its ranks are starting; try again" in on_demand.stacks_page(run, without)


def test_stacks_that_cannot_be_read_are_an_answer_too(run: RunDir) -> None:
    desk, number = Desk(run), user_request.put(run, request(Wish.STACKS))
    desk.attempt.progress = None
    desk.look()
    answer = wait_for(lambda: user_request.answer_to(run, number), 5, "an answer")
    assert "the stacks cannot be shown" in (answer.refused or "")


def test_a_damaged_request_is_refused_and_others_are_served(run: RunDir) -> None:
    damaged, good = user_request.put(run, request()), user_request.put(run, request())
    (run.path / "requests" / f"{damaged}.json").write_text('{"wish": ')
    desk = Desk(run)
    desk.look()
    answer = user_request.answer_to(run, damaged)
    assert answer is not None
    assert f"{damaged}.json" in (answer.refused or "")
    assert desk.proposed == [f"request {good}"]


def test_a_request_of_a_command_that_was_killed_long_ago_is_removed(run: RunDir) -> None:
    number = user_request.put(run, request())
    path = run.path / "requests" / f"{number}.json"
    before = time.time() - user_request.LONGEST_WAIT_S - 1
    os.utime(path, (before, before))
    assert user_request.unanswered(run) == []
    assert not path.exists()


def test_only_the_owner_can_read_or_write_requests(run: RunDir) -> None:
    number = user_request.put(run, request())
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


def test_stacks_from_outside_end_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without py-spy there is only the kernel's view of the process."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with subprocess.Popen([os.path.realpath("/proc/self/exe"), "-c", "input()"], stdin=subprocess.PIPE) as process:
        outside_stacks.write_without_end(tmp_path, {3: process.pid})
        assert process.poll() is None
        process.kill()
    text = stacks.stack_path(tmp_path, 3).read_text()
    assert f"# process {process.pid}: " in text
    assert text.endswith(stacks.ANSWERED)


def test_removed_stacks_do_not_pass_for_new_ones(tmp_path: Path) -> None:
    path = stacks.stack_path(tmp_path, 0)
    standing = Standing(0, "in a step", 1, 0.0, True)
    with path.open("a") as of_rank:
        of_rank.write(f'Thread 0x1 (most recent call first):\n  File "x.py", line 1 in old\n{stacks.ANSWERED}')
        of_rank.flush()
        assert stack_digest.collect(tmp_path, [standing])[0]
        stack_digest.remove(tmp_path, [standing, Standing(1, None, None, 0.0, True)])
        assert stack_digest.collect(tmp_path, [standing]) == {0: []}
        of_rank.write(f'Thread 0x1 (most recent call first):\n  File "x.py", line 1 in new\n{stacks.ANSWERED}')
    assert path.read_text().startswith("Thread")
    (group,) = stack_digest.from_json(json.loads(stack_digest.digest(tmp_path, [standing], whole=True)))
    assert group.stack == ('File "x.py", line 1, in new',)


def test_only_ranks_with_one_stack_form_a_group(tmp_path: Path) -> None:
    for rank, line in enumerate([1, 2, 1]):
        text = f'Thread 0x1 (most recent call first):\n  File "x.py", line {line} in f\n{stacks.ANSWERED}'
        stacks.stack_path(tmp_path, rank).write_text(text)
    standings = [Standing(rank, "in a step", 1, 0.0, False) for rank in range(3)]
    read = stack_digest.collect(tmp_path, standings)
    seen = [stack_digest.RankStack(standing, read[standing.rank]) for standing in standings]
    assert [group.ranks for group in stack_digest.group(seen)] == [(0, 1, 2)]
    assert [group.ranks for group in stack_digest.group(seen, whole=True)] == [(0, 2), (1,)]


def test_a_stop_does_not_replace_a_cancel(run: RunDir) -> None:
    stop_request.ask(run, Intent.CANCEL)
    stop_request.ask(run, Intent.STOP)
    assert stop_request.asked(run) is Intent.CANCEL
