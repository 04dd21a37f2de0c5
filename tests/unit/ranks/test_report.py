"""A rank's reports, the loss of its agent, and the requests to the store's host."""

import errno
import io
import json
import logging
import os
import secrets
import subprocess
import sys
import threading
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.process_limits import ChangeLimits
from tests.waiting import PATIENCE, wait_for
from toolkit import hang
from toolkit import hang as activity_words
from toolkit.base.errors import EXIT_FAILED
from toolkit.base.process_limits import limits
from toolkit.files.run_files import OwnerRecord, RunResult, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.hang import Activity, Watchdog
from toolkit.nodes.agent import reports
from toolkit.nodes.agent.reports import MAX_BYTES, AgentGoneError, Inbox, NodeProgress, Outbox, RankReport
from toolkit.ranks import report, store_host
from toolkit.ranks.agreement import PREFIX, STOP, propose
from toolkit.ranks.agreement.rounds import Round
from toolkit.ranks.agreement.torch_store import StoreTransport, in_pieces
from toolkit.ranks.report import AgentReporter, FileReporter, Reporter, StartupActivity, family_cpu_s

TIMEOUT_S = 20


class Agent(Outbox):
    """An agent in memory, which can be gone, absent or busy."""

    def __init__(self) -> None:
        self.reports: list[RankReport] = []
        self.patience: list[float] = []
        self.is_gone = False

    def send(self, message: bytes, wait_s: float = 0.0) -> bool:
        if self.is_gone:
            raise AgentGoneError
        self.patience.append(wait_s)
        parsed = reports.parse(message)
        assert parsed is not None
        self.reports.append(parsed)
        return True

    @property
    def last(self) -> RankReport:
        return self.reports[-1]


@pytest.fixture(autouse=True)
def exits(monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits) -> list[int]:
    """Return the codes with which a reporter ends this process. The process lives on."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    change_limits(report_every_s=0.01)
    return codes


@pytest.fixture
def silent(change_limits: ChangeLimits) -> None:
    """Let a reporter report at its end only."""
    change_limits(report_every_s=600.0)


def reporter_to(agent: Outbox, rank: int, activity: Activity | None = None) -> AgentReporter:
    return AgentReporter(agent, 2, rank, activity or Activity())


def test_the_newest_of_every_field_arrives_and_the_training_waits_for_nobody() -> None:
    agent = Agent()
    reporter = reporter_to(agent, 0)
    reporter.progress(step=1, loss=2.5)
    wait_for(lambda: agent.reports and agent.last.fields, TIMEOUT_S, "the first report")
    reporter.progress(step=2)
    reporter.progress(step=3, phase="evaluate")
    reporter.close()
    told = dict(agent.last.fields or {})
    assert {name: told[name] for name in ("step", "loss", "phase")} == {"step": 3, "loss": 2.5, "phase": "evaluate"}
    assert set(agent.patience[:-1]) == {0.0}


def test_a_report_says_what_the_rank_does_and_one_that_stands_still_keeps_reporting() -> None:
    """The agent learns from it that the rank lives. Only rank 0 reports what users see of the run."""
    agent, activity = Agent(), Activity()
    reporter = reporter_to(agent, 1, activity)
    reporter.progress(loss=1.0)
    activity.phase, activity.step = activity_words.WAITING_FOR_DATA, 7
    activity.note_progress()
    expected = RankReport(2, 1, "waiting for data", 7, 1)
    wait_for(lambda: agent.reports.count(expected) > 2, TIMEOUT_S, "several reports")
    reporter.close()


def test_a_report_that_fails_is_logged_and_the_next_one_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    """Before, the thread ended in silence, and the rank counted as stopped."""
    agent, failures = Agent(), [OSError(errno.ENOBUFS, os.strerror(errno.ENOBUFS)), TypeError("no JSON")]

    class FailsTwice(Agent):
        def send(self, message: bytes, wait_s: float = 0.0) -> bool:
            if failures:
                raise failures.pop()
            return agent.send(message, wait_s)

    reporter = reporter_to(FailsTwice(), 1)
    wait_for(lambda: agent.reports, TIMEOUT_S, "a report")
    reporter.close()
    assert "a report of this rank has failed: TypeError('no JSON')" in caplog.text


@pytest.mark.usefixtures("silent")
def test_the_last_words_are_sent_also_by_a_rank_that_ends_before_the_first_heartbeat() -> None:
    agent = Agent()
    reporter = reporter_to(agent, 0)
    reporter.progress(step=450)
    assert agent.reports == []
    reporter.close()
    assert (agent.last.fields or {})["step"] == 450
    assert agent.patience == [report.LAST_WAIT_S]


def test_a_report_under_way_when_the_reporter_closes_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    agent, is_under_way = Agent(), threading.Event()
    reporter = reporter_to(agent, 1)
    plain = reporter._report

    def late() -> RankReport:
        """Wait until the reporter is closed, as a thread that gets no CPU."""
        is_under_way.set()
        assert reporter._closed.wait(PATIENCE * TIMEOUT_S)
        return plain()

    monkeypatch.setattr(reporter, "_report", late)
    assert is_under_way.wait(PATIENCE * TIMEOUT_S)
    reporter.close()
    assert agent.patience[-2:] == [0.0, report.LAST_WAIT_S]


@pytest.mark.usefixtures("silent")
def test_only_rank_0_tells_the_result_of_the_run_and_waits_until_it_is_taken() -> None:
    agents = [Agent(), Agent()]
    for rank, agent in enumerate(agents):
        reporter = reporter_to(agent, rank)
        reporter.finish({"step": 10, "metrics": {"eval/accuracy": 0.5}})
        reporter.close()
    assert [each.result for each in agents[0].reports] == [{"step": 10, "metrics": {"eval/accuracy": 0.5}}, None]
    assert agents[0].patience[0] == report.RESULT_WAIT_S
    assert [each.result for each in agents[1].reports] == [None]


@pytest.mark.usefixtures("silent")
def test_more_metrics_than_a_report_holds_are_left_to_tensorboard(caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent()
    reporter = reporter_to(agent, 0)
    metrics = {f"eval/{number}": 0.5 for number in range(MAX_BYTES // 10)}
    reporter.progress(step=7, metrics=metrics)
    with caplog.at_level(logging.WARNING):
        reporter.finish({"step": 7, "metrics": metrics})
        reporter.close()
    assert agent.reports[0].result == {"step": 7, "metrics": {}}
    assert {**(agent.reports[1].fields or {}), "time": 0} == {"step": 7, "metrics": {}, "time": 0}
    assert len([line for line in caplog.messages if "too many metrics" in line]) == 1


@pytest.mark.usefixtures("silent")
def test_an_agent_that_leaves_while_the_reporter_closes_is_no_failure(exits: list[int]) -> None:
    agent = Agent()
    reporter = reporter_to(agent, 1)
    agent.is_gone = True
    reporter.close()
    assert exits == []


def test_a_rank_whose_agent_is_gone_ends_itself(exits: list[int]) -> None:
    name = f"\0toolkit-test-{secrets.token_hex(8)}"
    inbox = Inbox(name)
    with closing(Outbox(name)) as outbox, closing(reporter_to(outbox, 2)):
        wait_for(inbox.take, TIMEOUT_S, "a report")
        assert exits == []
        inbox.close()
        wait_for(lambda: exits, TIMEOUT_S, "the end of the rank")
        assert set(exits) == {EXIT_FAILED}


RANK = """
import sys, threading
from toolkit.base import logs
from toolkit.hang import Activity
from toolkit.nodes.agent.reports import Outbox
from toolkit.ranks.report import AgentReporter

logs.setup("rank 1/2 node2")
AgentReporter(Outbox("\\0" + sys.argv[1]), 1, 1, Activity())
threading.Event().wait()  # stands for a collective that nobody will end
"""


def test_a_rank_that_hangs_in_a_collective_is_ended_when_its_supervisor_is_gone() -> None:
    name = f"toolkit-test-{secrets.token_hex(8)}"
    inbox = Inbox(f"\0{name}")
    command = [sys.executable, "-c", RANK, name]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as rank:
        wait_for(inbox.take, TIMEOUT_S, "a report")
        inbox.close()
        _, told = rank.communicate(timeout=PATIENCE * TIMEOUT_S)
    assert rank.returncode == EXIT_FAILED
    (line,) = told.splitlines()
    assert "rank 1/2 node2 ERROR the agent of this node is gone" in line


def test_ranks_whose_progress_is_told_once_a_second_report_once_a_second() -> None:
    reporters = [reporter_to(Agent(), rank) for rank in (0, 1)]
    assert [reporter._every_s / limits().report_every_s for reporter in reporters] == [1, 2]
    for reporter in reporters:
        reporter.close()


def test_an_unsupervised_run_has_a_status_while_it_goes_on_and_a_result_at_its_end(run: RunDir) -> None:
    run.write_result(RunResult.from_json({"state": "failed"}))
    reporter = FileReporter(run, RunStatus(supervised=False, pid=7))
    assert run.result() is None  # it was the last start's: a waiting process would take it for this one's
    reporter.progress(step=5, loss=float("nan"))
    status = wait_for(lambda: run.status() if run.step() else None, TIMEOUT_S, "a status")
    assert (status.state, status.pid, status.progress.step) == ("running", 7, 5)
    assert status.progress.loss is None
    reporter.finish({"step": 9, "metrics": {"eval/accuracy": 1.0}})
    reporter.close()
    result = run.result()
    assert result.wall_s >= 0
    expected = RunResult(RunState.COMPLETED, attempts=1, step=9, metrics={"eval/accuracy": 1.0})
    assert result.replace(wall_s=None) == expected
    assert (run.status().state, run.status().progress.step) == ("completed", 5)


@pytest.mark.parametrize(("phase", "state"), [({}, "failed"), ({"phase": "stopped"}, "stopped")])
def test_an_unsupervised_run_without_a_result_has_failed_or_was_stopped(
    run: RunDir, phase: dict[str, str], state: str
) -> None:
    reporter = FileReporter(run, RunStatus())
    reporter.progress(step=5, **phase)
    reporter.close()
    assert (run.status().state, run.status().progress.step) == (state, 5)
    assert run.result() is None


def test_an_unsupervised_rank_ends_when_another_process_has_its_run(run: RunDir) -> None:
    code = (
        "import sys, threading, pathlib\n"
        "from toolkit.ranks.report import FileReporter\n"
        "from toolkit.files.run_files import RunStatus\n"
        "from toolkit.files.rundir import RunDir\n"
        "run = RunDir(pathlib.Path(sys.argv[1]))\n"
        "FileReporter(run, RunStatus(pid=7), lambda: run.belongs_to(1))\n"
        "threading.Event().wait()\n"
    )
    run.write_owner(OwnerRecord(1, "", "local", "", 0, 0.0))
    with subprocess.Popen([sys.executable, "-c", code, str(run.path)], stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: run.status().pid == 7, PATIENCE * TIMEOUT_S, "its status")
        run.write_owner(OwnerRecord(2, "", "local", "", 0, 0.0))
        _, said = process.communicate(timeout=PATIENCE * TIMEOUT_S)
    assert (process.returncode, f"run {run.id} was started again by another process" in said) == (1, True), said
    assert run.status().state == "running"  # as it left it: the status is the other's now


def test_a_full_disk_costs_an_unsupervised_run_some_of_its_status_and_nothing_else(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, write = threading.Event(), RunDir.write_status

    def full(self: RunDir, status: RunStatus) -> None:
        refused.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunDir, "write_status", full)
    reporter = FileReporter(run, RunStatus())
    reporter.progress(step=5)
    assert refused.wait(PATIENCE * TIMEOUT_S)
    monkeypatch.setattr(RunDir, "write_status", write)
    reporter.progress(step=6)
    wait_for(lambda: run.step() == 6, TIMEOUT_S, "the next status")
    monkeypatch.setattr(RunDir, "write_status", full)
    reporter.close()


def test_the_other_ranks_of_an_unsupervised_run_write_nothing(run: RunDir) -> None:
    before = sorted(run.path.rglob("*"))
    reporter = Reporter()
    reporter.progress(step=1)
    reporter.finish({"step": 1})
    reporter.close()
    assert sorted(run.path.rglob("*")) == before


LINES = [json.dumps({"propose": "stop", "by": f"user {i}"}) + "\n" for i in range(2)]


def test_every_request_is_obeyed_but_one_that_is_cut_off() -> None:
    """A supervisor that dies in the middle of a line has requested nothing. A stranger's messages change nothing."""
    store: Any = HashStore()
    store.set("toolkit/agree/0/proposal", "not JSON")
    store_host.serve(store, 2, io.StringIO(LINES[0] + LINES[1][:7]))
    assert json.loads(store.get("toolkit/agree/0/call/1")) == ["stop", "user 0"]


class CountingStore:
    """A store in memory. It notes the length of each message of several keys."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.messages: list[int] = []

    def set_timeout(self, timeout: timedelta) -> None:
        pass

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self.values.setdefault(key, value.encode())

    def append(self, key: str, value: str) -> None:
        self.values[key] += value.encode()

    def multi_set(self, keys: list[str], values: list[str]) -> None:
        self.messages.append(sum(len(text) + 9 for text in (*keys, *values)))
        self.values |= {key: value.encode() for key, value in zip(keys, values, strict=True)}

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.messages.append(sum(len(key) + 9 for key in keys))
        return [self.values[key] for key in keys]


def test_no_message_for_many_ranks_is_longer_than_the_server_parses_at_once() -> None:
    """Before, 16,385 nodes of 8 ranks were more keys than the server takes."""
    ranks, store = 10_000, CountingStore()
    transport = StoreTransport(store)  # type: ignore[arg-type]
    propose(transport, ranks, STOP, by="the supervisor")
    acks = {Round(PREFIX, 0).ack(rank): "[7, false]" for rank in range(ranks)}
    transport.set(acks)
    assert transport.get(list(acks)) == ["[7, false]"] * ranks
    assert max(store.messages) <= 4096
    assert len(store.messages) < 1500


def test_a_value_that_is_long_by_itself_goes_in_one_message() -> None:
    pieces = list(in_pieces([("a", "1"), ("long", "x" * 10_000), ("b", "2")]))
    assert pieces == [{"a": "1"}, {"long": "x" * 10_000}, {"b": "2"}]


HANG_TIMEOUT_S = 600


class Rank:
    """A rank whose clock and use of the CPU the test sets, with the agent and the supervisor that hear of it."""

    def __init__(self) -> None:
        self.now = self.used_s = 0.0
        self.activity = Activity()
        self._work = StartupActivity(self.activity, lambda: self.used_s, lambda: self.now)
        self._agent = NodeProgress(lambda: self.now)
        self.watchdog = Watchdog(HANG_TIMEOUT_S, lambda: self.now)

    def go_on(self, seconds: int, cores: float) -> bool:
        """Report each second. Return whether it ever counted as a hang."""
        was_stuck = False
        for _ in range(seconds):
            self.now += 1.0
            self.used_s += cores
            self._work.look()
            now = self.activity
            self._agent.on_report(RankReport(1, 0, now.phase, now.step, now.count))
            digest = self._agent.summarize()
            assert digest is not None
            self.watchdog.on_report("here", digest)
            was_stuck |= self.watchdog.is_stuck()
        return was_stuck


@pytest.mark.parametrize(
    ("phases", "cores", "times", "hangs"),
    [
        ((hang.SETTING_UP, hang.PRIMING, hang.IN_STEP, hang.OWN_CODE), 0.3, 3, False),  # it compiles
        ((hang.WAITING_FOR_DATA, hang.LOGGING, hang.LOADING), 1.0, 1, True),  # it may be busy as it waits
        ((hang.IN_STEP,), 0.005, 1, True),
    ],
)
def test_before_its_first_step_a_rank_hangs_unless_it_may_compile(
    phases: tuple[str, ...], cores: float, times: int, hangs: bool
) -> None:
    for phase in phases:
        rank = Rank()
        rank.activity.phase = phase
        assert rank.go_on(times * HANG_TIMEOUT_S, cores=cores) is hangs, phase


def test_after_the_first_step_the_cpu_says_nothing() -> None:
    rank = Rank()
    rank.activity.phase = hang.IN_STEP
    assert not rank.go_on(HANG_TIMEOUT_S, cores=1.0)
    rank.activity.step = 1
    assert rank.go_on(HANG_TIMEOUT_S, cores=1.0)


def test_compilers_that_a_rank_has_started_count_as_it() -> None:
    """Those that run, and those that have ended."""
    before_s = family_cpu_s()
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        alive_s = family_cpu_s() - before_s
        child.communicate(b"\n")
    assert alive_s >= 0.25
    assert family_cpu_s() - before_s >= 0.25
