"""The supervisor when nodes at work are drained or sick. The test plays the launcher, Slurm and the agents."""

import logging
import signal
import threading
import time
from collections.abc import Callable

import pytest

from tests.pages import blocks
from tests.process_limits import ChangeLimits
from tests.unit.run.test_supervisor import NodeAgents, Ranks, Store, completes, ended
from tests.unit.run.test_supervisor_nodes import HOSTS
from toolkit.base.errors import SlurmRefusedError
from toolkit.cli import columns, run_facts, run_rows
from toolkit.config import SCRIPT_JOB, JobConfig
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent.messages import LeaveOrder, Message
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.launcher import AllRanksEnded
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.supervise.node_care import LEAST_TIME_TO_MOVE_S, LONGEST_STEP_TO_MOVE_S, NodeCare
from toolkit.run.supervise.rank_stop import RankStopper, StopAsked
from toolkit.run.supervise.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("quick", "network")

NEW_FAN = "drained: new fan by root"


class Agents(NodeAgents):
    """Agents that are all heard, and report the sickness that the test chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.heard_hosts = frozenset(HOSTS)
        self.sick_hosts: dict[str, str] = {}
        self.dismissed: list[str] = []

    def send(self, host: str, message: Message) -> None:
        assert message == LeaveOrder()
        self.dismissed.append(host)


@pytest.fixture(autouse=True)
def often(change_limits: ChangeLimits) -> None:
    change_limits(status_every_s=0.01, ask_drained_every_s=0.0)


@pytest.fixture
def agents() -> Agents:
    return Agents()


Supervise = Callable[..., int]


@pytest.fixture
def supervise(run: RunDir, slurm: FakeSlurm, agents: Agents) -> Supervise:
    def supervise(ranks: Ranks, *, spare: int = 1, hosts: tuple[str, ...] = HOSTS, job: str | None = None) -> int:
        config = JobConfig()
        config.cluster.spare_nodes = spare
        config.job = job or config.job
        allocation = Allocation(hosts, (1,) * len(hosts), 1, job_id="1")
        return Supervisor(run, config, allocation, ranks, slurm, agents).run()  # type: ignore[arg-type]

    return supervise


def works(ranks: Ranks, *, step_s: float = 0.1) -> None:
    """Make ten steps, and continue."""
    ranks.report(step=10, step_start=0, spent={"compute": 10 * step_s})


def stops_when_asked(ranks: Ranks) -> None:
    works(ranks)

    def stop() -> None:
        ranks.report(step=12, step_start=0, phase="stopped")
        ranks.events.put(ended(0, 1, code=75))
        ranks.events.put(AllRanksEnded(75))

    Store.on_propose = stop


class Looks:
    """Calls ``then`` after the third look at the nodes that has Slurm's answer."""

    def __init__(self) -> None:
        self.count = 0
        self.then: Callable[[], None] = lambda: None


@pytest.fixture(autouse=True)
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    looks, look = Looks(), NodeCare.look_for_degraded

    def counted(it: NodeCare, attempt: Attempt, stops: RankStopper) -> None:
        has_an_answer = it._drained is None or bool(it._drained.found)
        look(it, attempt, stops)
        looks.count += has_an_answer
        if looks.count == 3:
            looks.then()

    monkeypatch.setattr(NodeCare, "look_for_degraded", counted)
    return looks


def end(ranks: Ranks) -> None:
    ranks.tell_result(10)
    ranks.events.put(AllRanksEnded(0))


def test_a_drained_node_is_left_for_a_spare_and_given_back(
    supervise: Supervise, run: RunDir, slurm: FakeSlurm, agents: Agents
) -> None:
    slurm.drains = {"node2": "new fan by root"}
    ranks = Ranks(stops_when_asked, completes)
    assert supervise(ranks) == 0
    first, second = run.attempts()
    assert (first.cause, first.decision, first.vacated_nodes) == ("moved", "restart", ("node2",))
    assert first.line == f"moved off node2: {NEW_FAN}; stopped at step 12, checkpoint saved"
    assert (first.nodes, second.nodes) == (("node1", "node2"), ("node1", "node3"))
    assert (Store.proposed, ranks.signals) == ([], [])  # of the second attempt
    assert (agents.dismissed, slurm.kept) == (["node2"], {"1": "node[1,3]"})
    assert f"node2 is not used: {NEW_FAN}" in columns.notes_of(run_rows.status_rows([run])[0])
    assert run_facts.facts(run)["attempts"][0].line == first.line


def test_a_site_that_lets_no_job_shrink_keeps_the_node_and_the_run_goes_on(
    supervise: Supervise,
    run: RunDir,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(job_id: str, *, keep: str) -> None:
        raise SlurmRefusedError("Requested operation is presently disabled")

    slurm.drains = {"node2": "new fan by root"}
    monkeypatch.setattr(slurm, "release_nodes", refuse)
    assert supervise(Ranks(stops_when_asked, completes)) == 0
    assert [line.nodes for line in run.attempts()] == [("node1", "node2"), ("node1", "node3")]
    assert "node2 cannot be released: Requested operation is presently disabled" in caplog.messages


def test_a_sick_node_is_left_but_stays_the_jobs(
    supervise: Supervise, run: RunDir, slurm: FakeSlurm, agents: Agents
) -> None:
    agents.sick_hosts = {"node1": "processors throttled for heat"}  # the batch host
    assert supervise(Ranks(stops_when_asked, completes)) == 0
    first, second = run.attempts()
    assert first.line.startswith("moved off node1: processors throttled for heat; ")
    assert second.nodes == ("node3", "node2")
    assert (agents.dismissed, slurm.kept) == ([], {})


def test_a_node_without_a_good_spare_is_named_once_and_the_run_goes_on(
    supervise: Supervise, run: RunDir, slurm: FakeSlurm, looks: Looks, caplog: pytest.LogCaptureFixture
) -> None:
    slurm.drains = {"node2": "new fan by root"}

    def act(ranks: Ranks) -> None:
        works(ranks)
        looks.then = lambda: end(ranks)

    assert supervise(Ranks(act), spare=0) == 0
    (only,) = run.attempts()
    assert (only.cause, Store.proposed) == ("completed", [])
    warned = [r.message for r in caplog.records if r.levelno >= logging.WARNING and r.message.startswith("node ")]
    assert warned == [f"node node2: {NEW_FAN}"]
    assert f"node node2: {NEW_FAN}" in columns.notes_of(run_rows.status_rows([run])[0])
    assert run_facts.facts(run)["degraded_nodes"] == {"node2": NEW_FAN}


def test_a_job_on_one_node_asks_for_no_nodes(supervise: Supervise, slurm: FakeSlurm, looks: Looks) -> None:
    def act(ranks: Ranks) -> None:
        works(ranks)
        looks.then = lambda: end(ranks)

    assert supervise(Ranks(act), spare=0, hosts=HOSTS[:1]) == 0
    assert slurm.asked_for_nodes == []


@pytest.mark.parametrize("reason", ["near the time limit", "steps that take long", "before the first step", "a script"])
def test_a_run_that_would_lose_by_it_stays(
    supervise: Supervise, run: RunDir, slurm: FakeSlurm, looks: Looks, reason: str
) -> None:
    slurm.drains = {"node2": "new fan by root"}
    step_s = 2 * LONGEST_STEP_TO_MOVE_S if reason == "steps that take long" else 0.1
    if reason == "near the time limit":
        row = slurm.show_job("1")
        assert row is not None
        slurm._set(row, time_limit_s=36_000.0, end_time=slurm.now + LEAST_TIME_TO_MOVE_S)

    def act(ranks: Ranks) -> None:
        if reason == "before the first step":
            ranks.report(step=0, step_start=0, spent={})
        else:
            works(ranks, step_s=step_s)
        # the ranks end only after looks that could have moved the run
        looks.then = lambda: end(ranks)

    assert supervise(Ranks(act), job=SCRIPT_JOB if reason == "a script" else None) == 0
    assert Store.proposed == []
    assert [line.cause for line in run.attempts()] == ["completed"]


def test_a_move_has_as_much_time_as_the_longest_save_and_other_stops_have_not(
    supervise: Supervise, run: RunDir, slurm: FakeSlurm, change_limits: ChangeLimits
) -> None:
    change_limits(stop_s=0.05, script_stop_s=0.05)
    slurm.drains = {"node2": "new fan by root"}

    def saves_for_long(ranks: Ranks) -> None:
        works(ranks)

        def stop() -> None:
            if Store.proposed == ["stop"]:
                # after ten times STOP_LIMIT_S the move still waits; a stop by a signal then does not
                threading.Timer(0.5, ranks.events.put, [StopAsked(signal.SIGINT)]).start()

        Store.on_propose = stop

    ranks = Ranks(saves_for_long)
    began = time.monotonic()
    assert supervise(ranks) == 75
    assert time.monotonic() - began > 0.5
    assert Store.proposed == ["stop", "stop"]
    assert set(ranks.signals) == {signal.SIGKILL}
    (only,) = run.attempts()
    assert (only.cause, only.decision) == ("stopped", "finish")


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_run_ended_as_docs_extending_says_is_not_requeued(
    is_asked: bool,
    supervise: Supervise,
    run: RunDir,
) -> None:
    (recipe,) = (block for block in blocks("docs/extending.md", "python") if "user_requests.record_intent" in block)

    def told(ranks: Ranks) -> None:
        stops_when_asked(ranks)
        if is_asked:
            exec(recipe, {"folder": run.path})
        else:  # the ranks have agreed among themselves
            Store.on_propose()

    assert supervise(Ranks(told)) == 75
    (only,) = run.attempts()
    assert (only.cause, only.decision) == ("stopped", "finish" if is_asked else "requeue")
    assert (run.result() is not None) == is_asked
    assert Store.proposed == ["stop"] * is_asked


def test_a_preemption_while_the_ranks_stop_wins(
    supervise: Supervise,
    run: RunDir,
    slurm: FakeSlurm,
) -> None:
    def preempted(ranks: Ranks) -> None:
        works(ranks)

        def stop() -> None:
            slurm.preempt("1", grace_s=60)
            ranks.events.put(StopAsked(signal.SIGTERM))
            ranks.events.put(ended(0, 1, code=75))
            ranks.events.put(AllRanksEnded(75))

        Store.on_propose = stop

    slurm.drains = {"node2": "new fan by root"}
    assert supervise(Ranks(preempted)) == 75
    (only,) = run.attempts()
    assert (only.cause, only.decision) == ("preempted", "requeue")
    assert slurm.excluded == {}  # Slurm itself keeps the job off a drained node
    assert slurm.kept == {}
