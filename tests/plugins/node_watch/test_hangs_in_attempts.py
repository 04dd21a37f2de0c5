"""A supervisor's attempts that hang: the rank that is behind is named."""

import json
import re
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.process_limits import ChangeLimits
from tests.unit.run import test_supervisor as core
from tests.unit.run.test_supervisor import NodeAgents, Ranks, completes, ended
from toolkit import config as configs
from toolkit import hang
from toolkit.base import fsio
from toolkit.cli import run_facts
from toolkit.config import JobConfig
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent.messages import (
    NodeRequest,
    RequestAnswered,
    ScriptRankStatus,
    StacksAnswered,
    StacksOrder,
    WatchRanksOrder,
)
from toolkit.nodes.agent.reports import RankProgress
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agents import Events
from toolkit.nodes.start.launcher import AllRanksEnded, RanksSucceeded
from toolkit.plugins.node_watch import stack_summary
from toolkit.run.attempt.error_files import read_error_file
from toolkit.run.supervise.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("quick")


class StackReaders(NodeAgents):
    """Agents that know the ranks in ``known`` by their reports, and digest stacks."""

    def __init__(self, *known: RankProgress) -> None:
        self._known = {progress.rank: progress for progress in known}

    def ask(self, orders: Mapping[str, NodeRequest], wait_s: float) -> Mapping[str, RequestAnswered]:
        answers = dict[str, RequestAnswered]()
        for host, order in orders.items():
            assert isinstance(order, StacksOrder)
            answers[host] = StacksAnswered(order.request, json.loads(self._digest(order)))
        return answers

    def _digest(self, order: StacksOrder) -> str:
        folder = RunDir(Path(order.run)).attempt_logs(order.attempt)
        return stack_summary.summarize_stacks(folder, [self._known.get(s.rank, s) for s in order.rank_progress])


def hangs(ranks: Ranks) -> None:
    core.hangs(ranks)
    ranks.answers_kill = False  # by the question for the stacks


def supervise_quickly(run: RunDir, ranks: Ranks, job: str = JobConfig().job, reporting: Sequence[int] = (0,)) -> int:
    """Supervise with a group timeout of 1 s. Ranks that are ``reporting`` are in their eighth step."""
    agents = StackReaders(*(RankProgress(rank, "in a step", 7, 0.6, False) for rank in reporting))
    return core.supervise_quickly(run, ranks, job, agents)


@pytest.fixture
def impatient(change_limits: ChangeLimits) -> None:
    change_limits(stacks_s=0.5, look_for_stacks_every_s=0.05, status_every_s=0.05)


@pytest.mark.usefixtures("impatient")
def test_a_hang_is_examined_killed_at_once_and_restarted_with_the_rank_behind_named(run: RunDir) -> None:
    fsio.make_dir(run.attempt_logs(1))  # as the launcher does
    ranks = Ranks(hangs, completes)
    assert supervise_quickly(run, ranks) == 0
    assert ranks.signals == [signal.SIGURG, signal.SIGKILL]
    line, _ = run.attempts()
    assert (line.cause, line.decision) == ("hang", "restart")
    behind = line.first_failure
    assert (behind.rank, behind.host) == (1, "node2")
    assert behind.how.startswith("has not started, ")
    assert behind.how.endswith("; 1 other in a step")
    assert read_error_file(run.error_file(1, 1)).how == behind.how


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("all_have_ended", [False, True])
def test_a_rank_that_has_ended_is_not_blamed_for_a_hang(run: RunDir, all_have_ended: bool) -> None:
    """Before, a rank that did not answer counted as stopped, and its node was suspected."""
    fsio.make_dir(run.attempt_logs(1))

    def ends_but_rank_0(ranks: Ranks) -> None:
        hangs(ranks)
        ranks.events.put(RanksSucceeded((0, 1) if all_have_ended else (1,)))

    config = JobConfig()
    config.dist.timeout_s = 1
    agents: Any = StackReaders(RankProgress(0, "finishing", 8, 0.6, False), RankProgress(1, "finishing", 8, 0.6, True))
    allocation = Allocation(("node1", "node2"), (1, 1), 1)
    assert Supervisor(run, config, allocation, Ranks(ends_but_rank_0, completes), None, agents).run() == 0
    line = run.attempts()[0]
    assert line.cause == "hang"
    assert line.first_failure.rank == (None if all_have_ended else 0)


@pytest.mark.usefixtures("impatient")
def test_a_hang_of_which_nobody_knows_who_is_behind_blames_no_rank_and_no_node(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: Any) -> str:
        raise OSError("Stale file handle")

    monkeypatch.setattr(stack_summary, "stack_text", away)
    assert supervise_quickly(run, Ranks(hangs, completes), reporting=[0, 1]) == 0
    line, _ = run.attempts()
    assert (line.cause, line.decision, line.suspect) == ("hang", "restart", None)
    assert line.line.startswith("the slowest rank is unknown: there was no time to read the stacks of 2 of 2 ranks")
    assert list(run.attempt_logs(1).glob("error-*")) == []
    failure = run_facts.facts(run)["first_failure"]
    assert (failure["rank"], failure["host"], failure["how"][:16]) == (None, "", "the slowest rank")


class ScriptWatchers(StackReaders):
    """Agents that tell at once of the ranks in ``silent``, in the first attempt, and read ``stacks`` from outside."""

    def __init__(self, ranks: Ranks, silent: Sequence[int] = (), stacks: Mapping[int, str] = {}) -> None:
        super().__init__()
        self._ranks, self._silent, self._stacks = ranks, silent, stacks
        self.watched: list[tuple[int, bool]] = []  #: attempt, and whether its ranks are to be watched from now on

    def request(self, orders: Mapping[str, WatchRanksOrder], heard: Events) -> None:
        assert [*orders] == ["node1", "node2"]
        order = orders["node1"]
        self.watched.append((order.attempt, bool(order.command)))
        for rank in self._silent if self.watched == [(1, True)] else ():
            self._ranks.events.put(ScriptRankStatus(1, rank, "silent", 0.6))

    def _digest(self, order: StacksOrder) -> str:
        assert order.outside
        assert order.may_end
        for rank, text in self._stacks.items():
            fsio.write_atomic(hang.stack_path(RunDir(Path(order.run)).attempt_logs(1), rank), text + hang.ANSWERED)
        return super()._digest(order)


def watch_script(run: RunDir, ranks: Ranks, **known: Any) -> ScriptWatchers:
    """Supervise a script that reports nothing."""
    agents = ScriptWatchers(ranks, **known)
    core.supervise_quickly(run, ranks, configs.SCRIPT_JOB, agents)
    return agents


def ends_later(ranks: Ranks) -> None:
    threading.Timer(0.6, ranks.events.put, (AllRanksEnded(0),)).start()


@pytest.mark.usefixtures("impatient")
def test_a_foreign_script_that_reports_nothing_is_watched_from_outside(run: RunDir) -> None:
    ranks = Ranks(ends_later)
    agents = watch_script(run, ranks)
    assert ranks.signals == []
    assert agents.watched == [(1, True), (1, False)]


@pytest.mark.usefixtures("impatient")
def test_silent_ranks_are_ended_as_a_hang_and_that_in_no_collective_is_named(run: RunDir) -> None:
    fsio.make_dir(run.attempt_logs(1))
    barrier = (
        "Thread 0x1 (most recent call first):\n"
        '  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 1 in barrier\n'
    )
    lock = 'Thread 0x1 (most recent call first):\n  File "/x/train.py", line 8 in hang_for_ever\n'
    ranks = Ranks(lambda _: None, lambda ranks: ranks.events.put(AllRanksEnded(0)))
    watch_script(run, ranks, silent=[0, 1], stacks={0: barrier, 1: lock})
    assert ranks.signals == [signal.SIGKILL]
    line, after = run.attempts()
    assert (line.cause, line.decision, after.cause) == ("hang", "restart", "completed")
    behind = line.first_failure
    assert (behind.rank, behind.host) == (1, "node2")
    assert re.fullmatch(r"silent \(train\.py:8\), [12] s; 1 other in barrier", behind.how)
    assert "in hang_for_ever" in run_facts.facts(run)["first_failure"]["traceback"]


@pytest.mark.usefixtures("impatient")
def test_a_rank_that_was_silent_when_another_failed_is_named_in_the_log(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    """The others wait for it in NCCL. That is no silence, and NCCL gives up in the end."""

    def gives_up(ranks: Ranks) -> None:
        threading.Timer(0.6, ranks.events.put, (ended(0, code=1),)).start()

    watch_script(run, Ranks(gives_up, lambda ranks: ranks.events.put(AllRanksEnded(0))), silent=[1])
    assert run.attempts()[0].cause == "crashed"
    assert re.search(r"silent for [12] s or longer before: rank 1\b", caplog.text)


@pytest.mark.usefixtures("impatient")
def test_a_foreign_script_that_has_called_start_is_watched_by_its_reports(
    run: RunDir, change_limits: ChangeLimits
) -> None:
    change_limits(silence_measured_after_share=10.0)
    fsio.make_dir(run.attempt_logs(1))
    ranks = Ranks(hangs, lambda ranks: ranks.events.put(AllRanksEnded(0)))
    assert supervise_quickly(run, ranks, job=configs.SCRIPT_JOB) == 0
    assert ranks.signals == [signal.SIGURG, signal.SIGKILL]
    assert [line.cause for line in run.attempts()] == ["hang", "completed"]
