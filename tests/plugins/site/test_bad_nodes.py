"""The supervisor with nodes that the checks find bad."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.process_limits import ChangeLimits
from tests.unit.run.test_supervisor import Ranks, completes
from tests.unit.run.test_supervisor_nodes import AGENTS, HOSTS, UnheardKill, supervise
from toolkit.config import JobConfig
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent.messages import CheckAnswered
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agents import NodeAnswered
from toolkit.nodes.start.launcher import RanksExited
from toolkit.plugins.site.checks import preflight as node_checks
from toolkit.plugins.site.checks.verdict import NodesReport
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.job import slurm_job
from toolkit.run.supervise.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("network")


class Preflight:
    """Checks that find the nodes of ``bad`` bad. ``meanwhile`` is called during them."""

    def __init__(self) -> None:
        self.bad: dict[str, str] = {}
        self.unknown: tuple[str, ...] = ()
        self.meanwhile: Callable[[], None] = lambda: None
        self.asked: list[tuple[tuple[str, ...], set[str]]] = []

    def __call__(self, folder: Path, job: Allocation, *_: object, spares: set[str]) -> NodesReport:
        self.asked.append((job.hosts, spares))
        self.meanwhile()
        return NodesReport(job.hosts, {}, self.bad, {}, (), 0.1, self.unknown)


@pytest.fixture(autouse=True)
def preflight(monkeypatch: pytest.MonkeyPatch) -> Preflight:
    preflight = Preflight()
    monkeypatch.setattr("toolkit.plugins.site.checks.preflight.report_on_nodes", preflight)
    return preflight


@pytest.mark.parametrize("is_killed", [True, False])
@pytest.mark.parametrize("first", ["node1", "dead"])
def test_a_silent_node_is_found_dead_whatever_its_place_and_after_a_kill(
    run: RunDir,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    change_limits: ChangeLimits,
    preflight: Preflight,
    first: str,
    is_killed: bool,
) -> None:
    """Before, some nodes were never asked, and the run waited for them without end. They were the node of rank 0, and
    all nodes of an attempt that was being killed. The death itself may be why other ranks crash. Where the batch host
    is bad, rank 0 is on another node."""
    change_limits(status_every_s=0.02)
    monkeypatch.setattr(AGENTS, "unsure_hosts", frozenset())
    allocation = Allocation(("node1", "dead", "node3", "node4"), (1, 1, 1, 1), 1, job_id="1")
    preflight.bad = {} if first == "node1" else {"node1": "its disk is full"}

    def falls_silent(ranks: Ranks) -> None:
        ranks.report(step=10, step_start=0)
        if is_killed:
            ranks.events.put(
                RanksExited((int(ranks.hosts[0] == "dead"),), "node3", "exit code 1", None, time.time(), 1)
            )
        else:
            AGENTS.unsure_hosts = frozenset({"dead"})

    config = JobConfig()
    config.cluster.spare_nodes = 2
    config.retry.allow_fewer_nodes = True
    ranks = UnheardKill(falls_silent, completes)
    assert Supervisor(run, config, allocation, ranks, slurm, AGENTS).run() == 0
    assert run.attempts()[0].nodes[0] == first
    assert run.attempts()[0].lost_nodes == ("dead",)


def test_a_node_that_is_not_fit_is_never_started_on(run: RunDir, slurm: FakeSlurm, preflight: Preflight) -> None:
    preflight.bad = {"node1": "the disk is full"}
    assert supervise(run, slurm, Ranks(completes), spare=1) == 0
    assert preflight.asked == [(HOSTS, {"node3"})]
    assert run.attempts()[0].nodes == ("node2", "node3")
    assert run.status().bad_nodes == {"node1": "the disk is full"}


def test_the_late_answer_of_another_node_does_not_make_a_bad_one_good(
    run: RunDir, slurm: FakeSlurm, preflight: Preflight
) -> None:
    ranks = Ranks(completes)
    preflight.bad = {"node1": "the disk is full"}
    preflight.meanwhile = lambda: ranks.events.put(NodeAnswered("node3", CheckAnswered(1, "", 0.0, 0.0), 0.0, 0.0))
    assert supervise(run, slurm, ranks, spare=1) == 0
    assert run.attempts()[0].nodes == ("node2", "node3")


def test_without_a_spare_the_job_is_requeued_without_it_and_says_why(
    run: RunDir, slurm: FakeSlurm, preflight: Preflight
) -> None:
    preflight.bad = {"node2": "its clock is off"}
    assert supervise(run, slurm, Ranks()) == 75
    (line,) = run.attempts()
    assert (line.cause, line.decision) == ("node_failure", "requeue")
    assert "node2: its clock is off" in line.line
    assert slurm.excluded == {"1": "node2"}


def test_without_a_requeue_left_a_job_with_too_few_good_nodes_is_given_up(
    run: RunDir, slurm: FakeSlurm, preflight: Preflight
) -> None:
    preflight.bad = {"node2": "its clock is off"}
    config = JobConfig()
    config.retry.max_requeues = 0
    assert Supervisor(run, config, Allocation(HOSTS, (1, 1, 1), 1, job_id="1"), Ranks(), slurm, AGENTS).run() == 1
    assert (run.result().state, slurm.excluded) == ("failed", {})
    assert "node2: its clock is off; given up (retry.max_requeues: 0)" in str(run.result().why)


@pytest.mark.parametrize(
    ("what", "cause", "code"),
    [(FakeSlurm.cancel, "cancelled", 1), (FakeSlurm.preempt, "preempted", 75)],
)
def test_what_ends_the_job_ends_the_checks_and_the_nodes_are_not_to_blame(
    run: RunDir,
    slurm: FakeSlurm,
    preflight: Preflight,
    what: Callable[[FakeSlurm, str], None],
    cause: str,
    code: int,
) -> None:
    def ends() -> None:
        what(slurm, "1")
        os.kill(os.getpid(), signal.SIGTERM)

    preflight.bad = {"node2": "it did not answer", "node3": "it did not answer"}
    preflight.meanwhile = ends
    assert supervise(run, slurm, Ranks()) == code
    (line,) = run.attempts()
    assert (line.cause, line.step_end) == (cause, None)
    assert run.status().bad_nodes == {}
    assert slurm.excluded == {}
    assert slurm.show_job("1").state == ("PENDING" if cause == "preempted" else "COMPLETING")


def test_the_third_start_takes_what_it_gets(run: RunDir, slurm: FakeSlurm, preflight: Preflight) -> None:
    slurm.nodes_to_spare = 0
    preflight.bad = {"node2": "its clock is off"}
    codes = []
    for _ in range(3):
        codes.append(supervise(run, slurm, Ranks(completes)))
        slurm.advance(200)
        if slurm.show_job("1").state == "PENDING":
            slurm.start("1", "node[1-3]")
    assert codes == [75, 75, 0]
    assert run.result().state == "completed"


@pytest.mark.parametrize("is_dead", [True, False])
def test_a_node_of_which_nothing_was_heard_is_used_unless_it_is_dead(
    run: RunDir, slurm: FakeSlurm, preflight: Preflight, monkeypatch: pytest.MonkeyPatch, is_dead: bool
) -> None:
    preflight.unknown = ("node2",)
    monkeypatch.setattr(slurm_job, "unreachable", lambda hosts, port, here, timeout_s: set(hosts) if is_dead else set())
    assert supervise(run, slurm, Ranks(completes), spare=1) == 0
    assert run.attempts()[0].nodes == ("node1", "node3" if is_dead else "node2")
    assert list(run.status().bad_nodes) == (["node2"] if is_dead else [])


def test_the_preflight_can_be_left_out(run: RunDir, slurm: FakeSlurm, preflight: Preflight) -> None:
    config = JobConfig()
    config.cluster.preflight = False
    allocation = Allocation(HOSTS, (1, 1, 1), 1, job_id="1")
    assert Supervisor(run, config, allocation, Ranks(completes), slurm, AGENTS).run() == 0
    assert preflight.asked == []


@pytest.mark.parametrize("spare", [0, 1])
def test_gpus_are_measured_where_a_spare_can_replace_the_slow_one(
    run: RunDir, slurm: FakeSlurm, preflight: Preflight, monkeypatch: pytest.MonkeyPatch, spare: int
) -> None:
    assert not preflight.bad
    asked: list[Sequence[str]] = []

    def slow_nodes(agents: object, job: Allocation, events: object) -> dict[str, str]:
        asked.append(job.hosts)
        return {}

    monkeypatch.setattr(node_checks, "slow_nodes", slow_nodes)
    config = JobConfig()
    config.cluster.spare_nodes = spare
    allocation = Allocation(HOSTS, (1, 1, 1), 1, gpus=(2,) * 3, job_id="1")
    assert Supervisor(run, config, allocation, Ranks(completes), slurm, AGENTS).run() == 0
    assert asked == [HOSTS] * spare
