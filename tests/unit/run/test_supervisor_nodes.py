"""The supervisor when nodes are lost. The test chooses the answers of launcher and Slurm."""

import errno
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.process_limits import ChangeLimits
from tests.unit.run.test_supervisor import NodeAgents, Ranks, Store, completes, left_behind, stops
from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import EXIT_STOPPED, RequestError, ToolkitError
from toolkit.base.process_limits import limits
from toolkit.config import JobConfig
from toolkit.files import records
from toolkit.files.run_files import RunResult
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent.die_with_parent import SIGNALS
from toolkit.nodes.agent.messages import StuckConnectionsAnswered
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agents import NodeAnswered
from toolkit.nodes.start.launcher import AllRanksEnded, LaunchFailed, NodeFailed, RanksExited, RanksSucceeded
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.attempt.journal import Journal
from toolkit.run.attempt.verdict import Verdict
from toolkit.run.job import nodes
from toolkit.run.job.nodes import Nodes
from toolkit.run.records import user_requests
from toolkit.run.records.ownership import Claim, Overtaken
from toolkit.run.records.user_requests import Intent
from toolkit.run.requeue import follow_up
from toolkit.run.supervise import attempt_loop, conclude, entry, supervisor
from toolkit.run.supervise.rank_stop import StopAsked
from toolkit.run.supervise.supervisor import Supervisor
from toolkit.slurm.commands import Settings

pytestmark = pytest.mark.usefixtures("quick", "network")

HOSTS = ("node1", "node2", "node3")
ALLOCATION = Allocation(HOSTS, (1, 1, 1), 1, job_id="1")


class PlayedAgents(NodeAgents):
    """The agents of a job whose nodes are all there. A question calls ``say_unanswered``."""

    say_unanswered: Callable[[], None] = staticmethod(lambda: None)

    def ask_for_unanswered(self) -> None:
        self.say_unanswered()

    def host_at(self, address: str) -> str | None:
        return {"10.0.0.1": "node1", "10.0.0.2": "node2", "10.0.0.3": "node3"}.get(address)


AGENTS: Any = PlayedAgents()


def supervise(run: RunDir, slurm: FakeSlurm, ranks: Ranks, *, spare: int = 0, fewer: bool = False) -> int:
    config = JobConfig()
    config.cluster.spare_nodes = spare
    config.retry.allow_fewer_nodes = fewer
    allocation = Allocation(HOSTS, (1, 1, 1), 1, job_id="1", restart_count=slurm.show_job("1").restarts)
    return Supervisor(run, config, allocation, ranks, slurm, AGENTS).run()


def loses_node2(ranks: Ranks) -> None:
    """Lose node2: it falls silent, the other ranks are killed, and srun waits for ever."""
    ranks.answers_kill = False
    ranks.report(step=10, step_start=0)
    ranks.events.put(NodeFailed("node2"))
    elsewhere = [rank for rank, host in enumerate(ranks.hosts) if host != "node2"]
    ranks.events.put(RanksExited(tuple(elsewhere), "node1", "killed by SIGKILL", signal.SIGKILL, time.time()))


def test_a_spare_takes_over_as_soon_as_the_reachable_ranks_are_gone(run: RunDir, slurm: FakeSlurm) -> None:
    ranks = Ranks(loses_node2, completes)
    assert supervise(run, slurm, ranks, spare=1) == 0
    first, second = run.attempts()
    assert (first.cause, first.decision, first.lost_nodes) == ("node_failure", "restart", ("node2",))
    assert (first.nodes, second.nodes) == (("node1", "node2"), ("node1", "node3"))
    assert ranks.signals == [signal.SIGKILL]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_lost_node_is_not_waited_for_once_all_other_ranks_have_finished(
    run: RunDir, slurm: FakeSlurm, is_first: bool
) -> None:
    def loses_the_last(ranks: Ranks) -> None:
        ranks.answers_kill = False
        ranks.report(step=10, step_start=0)
        events = [NodeFailed("node2"), RanksSucceeded((0,))]
        for event in events if is_first else reversed(events):
            ranks.events.put(event)

    ranks = Ranks(loses_the_last, completes)
    assert supervise(run, slurm, ranks, spare=1) == 0
    assert [line.cause for line in run.attempts()] == ["node_failure", "completed"]
    assert ranks.signals == [signal.SIGKILL]


@pytest.mark.parametrize(
    "words", ["hang", "Unable to create step for job 1: Requested node configuration is not available"]
)
def test_a_node_that_slurm_has_taken_is_lost_though_it_is_back(run: RunDir, slurm: FakeSlurm, words: str) -> None:
    """It was dead for so short a time that only Slurm saw it. Its rank seems to hang, or a step there is refused."""

    def fails_on_the_taken_node(ranks: Ranks) -> None:
        slurm.release_nodes("1", keep="node[1,3]")
        if words == "hang":
            ranks.events.put(RanksExited((1,), "node2", "exit code 1", None, time.time(), 1))
        else:
            ranks.events.put(LaunchFailed((1,), "node2", words))
        ranks.events.put(AllRanksEnded(1))

    assert supervise(run, slurm, Ranks(fails_on_the_taken_node, completes), spare=1) == 0
    first, second = run.attempts()
    assert (first.cause, first.decision, first.lost_nodes) == ("node_failure", "restart", ("node2",))
    assert second.nodes == ("node1", "node3")


class UnheardKill(Ranks):
    """Ranks of which one is on ``dead``. Its end is never reported."""

    def send_signal(self, number: signal.Signals = signal.SIGKILL) -> None:
        AGENTS.unsure_hosts = frozenset({"dead"})
        living = tuple(rank for rank, host in enumerate(self.hosts) if host != "dead")
        self.events.put(RanksExited(living, "node3", "killed by SIGKILL", signal.SIGKILL, time.time()))


def test_a_rank_that_sigkill_does_not_end_is_not_waited_for(
    run: RunDir, slurm: FakeSlurm, change_limits: ChangeLimits
) -> None:
    """It waits in the kernel for a disk or a driver. Its node answers. Before, the run hung until its limit."""
    change_limits(unkillable_s=0.3, dying_s=0.3)

    class Unkillable(Ranks):
        tells_each_end = True

        def send_signal(self, number: signal.Signals = signal.SIGKILL) -> None:
            self.signals.append(number)
            self.events.put(RanksExited((0,), "node1", "killed by SIGKILL", signal.SIGKILL, time.time()))

    def crashes(ranks: Ranks) -> None:
        ranks.report(step=10, step_start=0)
        ranks.events.put(RanksExited((0,), "node1", "exit code 1", None, time.time(), 1))

    ranks = Unkillable(crashes, completes)
    assert supervise(run, slurm, ranks, spare=1) == 0
    assert ranks.abandoned
    first, second = run.attempts()
    assert (first.nodes, first.lost_nodes) == (("node1", "node2"), ("node2",))
    assert second.nodes == ("node1", "node3")
    assert len(ranks.signals) > 2


def test_ranks_that_sigkill_ends_nowhere_are_waited_for(
    run: RunDir, slurm: FakeSlurm, change_limits: ChangeLimits
) -> None:
    """A disk that all nodes share is away: no node is to blame."""
    change_limits(unkillable_s=0.05, dying_s=0.05)

    class Stuck(Ranks):
        tells_each_end = True

        def send_signal(self, number: signal.Signals = signal.SIGKILL) -> None:
            self.signals.append(number)
            if len(self.signals) == 6:  # the disk is back
                self.events.put(AllRanksEnded(137))

    def crashes(ranks: Ranks) -> None:
        ranks.report(step=10, step_start=0)
        ranks.events.put(RanksExited((), "node1", "exit code 1", None, time.time(), 1))

    ranks = Stuck(crashes, completes)
    assert supervise(run, slurm, ranks, spare=1) == 0
    assert not ranks.abandoned
    assert [attempt.lost_nodes for attempt in run.attempts()] == [(), ()]


def test_an_error_of_the_agents_thread_between_two_attempts_ends_the_supervisor(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, the error was dropped. The next attempt waited for ever for agents without a server."""

    def crashes(ranks: Ranks) -> None:
        ranks.events.put(RanksExited((0,), "node1", "exit code 1", None, time.time(), 1))

    def judge(*arguments: Any) -> Verdict:
        ranks.events.put(ValueError("the links broke"))
        return judging(*arguments)

    ranks, judging = Ranks(crashes, completes), conclude.judge_attempt
    monkeypatch.setattr(conclude, "judge_attempt", judge)
    with pytest.raises(ValueError, match="the links broke"):
        supervise(run, slurm, ranks)


def test_fewer_nodes_go_on_where_that_is_allowed(run: RunDir, slurm: FakeSlurm) -> None:
    assert supervise(run, slurm, Ranks(loses_node2, completes), fewer=True) == 0
    assert [line.world_size for line in run.attempts()] == [3, 2]


@pytest.mark.parametrize(
    ("to_spare", "bad", "excluded"),
    [(9, [], {"1": "node2"}), (0, [], {}), (1, ["node3"], {"1": "node2"})],
    ids=["without the node", "with it where the job could never start else", "without the latest of several"],
)
def test_with_neither_the_job_is_requeued(
    run: RunDir, slurm: FakeSlurm, to_spare: int, bad: list[str], excluded: dict[str, str]
) -> None:
    for host in bad:
        nodes.remember(run, host, "has failed before")
    slurm.nodes_to_spare = to_spare
    assert supervise(run, slurm, Ranks(loses_node2)) == 75
    (line,) = run.attempts()
    assert (line.cause, line.decision) == ("node_failure", "requeue")
    assert (slurm.excluded, slurm.show_job("1").restarts) == (excluded, 1)


def test_a_batch_host_that_died_and_is_back_is_named_and_used(run: RunDir, slurm: FakeSlurm) -> None:
    left_behind(run, started=time.time(), updated=time.time(), nodes=list(HOSTS), tasks=[1, 1, 1])
    nodes.remember(run, "node1", "the supervisor on the batch host node1 has been silent for 25 s and does not answer")
    assert supervise(run, slurm, Ranks(completes)) == 0
    first, second = run.attempts()
    assert (first.cause, first.decision, first.line) == ("node_failure", "requeue", "lost node1")
    assert "node1" in second.nodes


def test_a_requeue_by_another_node_was_no_preemption(run: RunDir, slurm: FakeSlurm) -> None:
    """The batch host was cut off and is back. Another node has put the job into the queue meanwhile."""

    def was_cut_off(ranks: Ranks) -> None:
        ranks.report(step=10, step_start=0)
        nodes.remember(run, "node1", "the batch host node1 has left the job's node list")
        slurm.requeue("1")
        ranks.events.put(RanksExited((0, 1), "node1", "killed by SIGKILL", signal.SIGKILL, time.time()))

    assert supervise(run, slurm, Ranks(was_cut_off), spare=1) == 75
    (line,) = run.attempts()
    assert (line.cause, line.decision, line.lost_nodes) == ("node_failure", "requeue", ("node1",))


def test_a_node_that_kills_two_attempts_is_replaced(run: RunDir, slurm: FakeSlurm) -> None:
    def dies_on_node1(ranks: Ranks) -> None:
        ranks.report(step=10 * (1 + len(run.attempts())), step_start=0)
        ranks.events.put(RanksExited((0,), "node1", "killed by SIGKILL", signal.SIGKILL, time.time()))

    assert supervise(run, slurm, Ranks(dies_on_node1, dies_on_node1, completes), spare=1) == 0
    assert [line.nodes[0] for line in run.attempts()] == ["node1", "node1", "node3"]
    assert list(nodes.remembered(run)) == ["node1"]
    assert run.status().bad_nodes == {"node1": "ended 2 attempts"}


def test_the_lines_of_earlier_attempts_are_read_once(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand attempts on thousands of nodes are not read again for each new one."""

    def crashes(ranks: Ranks) -> None:
        ranks.report(step=10 * len(reads) + len(ranks.hosts), step_start=0)
        ranks.events.put(RanksExited((0,), "node1", "killed by SIGKILL", signal.SIGKILL, time.time()))

    reads: list[Path] = []
    read_lines = records.read_lines
    monkeypatch.setattr(records, "read_lines", lambda path, kind: reads.append(path) or read_lines(path, kind))
    assert supervise(run, slurm, Ranks(crashes, crashes, completes)) == 0
    files = [path.name for path in reads]
    assert files.count("attempts.jsonl") <= 2, "once for what was left over, once for the journal"
    assert len(run.attempts()) == 3


def test_an_attempt_has_a_number_of_its_own_also_while_the_shared_folder_is_gone(run: RunDir, slurm: FakeSlurm) -> None:
    """A node may lose the mount between the starts of its supervisor and its ranks."""
    fsio.make_dir(run.attempt_logs(4))
    run.rank_log(4, 0).touch()
    allocation = Allocation(("node1",), (1,), 1, job_id="1")
    journal = Journal(run, allocation, Nodes(run, allocation, spare=0, allow_fewer=False))
    journal.read()
    run.path.rename(run.path.with_name("hidden"))
    assert [journal.next_number(), journal.next_number()] == [5, 6]


def is_refused_by_node2(ranks: Ranks) -> None:
    """Fail to start the rank on node2. The other one ends well, and srun with 0."""
    ranks.answers_kill = False
    for rank in [rank for rank, host in enumerate(ranks.hosts) if host == "node2"]:
        ranks.events.put(LaunchFailed((rank,), "node2", "Slurmd could not connect IO"))
    ranks.events.put(AllRanksEnded(0))


def test_a_node_that_cannot_start_ranks_is_replaced_at_once(run: RunDir, slurm: FakeSlurm) -> None:
    """Before, the run counted as completed: srun ends with 0."""
    assert supervise(run, slurm, Ranks(is_refused_by_node2, completes), spare=1) == 0
    first, second = run.attempts()
    assert (first.cause, first.decision, first.lost_nodes) == ("node_failure", "restart", ("node2",))
    assert first.line.startswith("rank 1 on node2: could not be started: Slurmd could not connect IO")
    assert (second.nodes, second.cause) == (("node1", "node3"), "completed")


def test_without_a_spare_the_job_is_requeued_off_the_node_that_cannot_start_ranks(
    run: RunDir, slurm: FakeSlurm
) -> None:
    assert supervise(run, slurm, Ranks(is_refused_by_node2)) == 75
    assert run.attempts()[0].cause == "node_failure"
    assert slurm.excluded == {"1": "node2"}


def test_a_step_that_slurm_refuses_blames_no_node_and_says_why(run: RunDir, slurm: FakeSlurm) -> None:
    def is_refused(ranks: Ranks) -> None:
        ranks.events.put(LaunchFailed((), None, "Unable to create step for job 1: Requested nodes are busy"))
        ranks.events.put(AllRanksEnded(1))

    assert supervise(run, slurm, Ranks(is_refused, completes)) == 0
    first, _ = run.attempts()
    assert (first.cause, first.lost_nodes, first.suspect) == ("crashed", (), None)
    assert "Unable to create step for job 1: Requested nodes are busy" in first.line
    assert run.status().bad_nodes == {}


@pytest.mark.parametrize(
    "words",
    [
        "Insufficient GRES available in allocation",
        "Invalid generic resource (gres) specification",
        "Requested node configuration is not available",
    ],
)
@pytest.mark.parametrize("by_agents", [True, False])
def test_a_step_that_does_not_fit_the_jobs_request_ends_the_run_and_blames_no_node(
    run: RunDir, slurm: FakeSlurm, words: str, *, by_agents: bool
) -> None:
    """Any other node, and any other start, would be refused as well."""

    def is_refused(ranks: Ranks) -> None:
        for rank, host in enumerate(HOSTS if by_agents else [None]):
            ranks.events.put(LaunchFailed((rank,) if by_agents else (), host, f"Unable to create step: {words}"))
        ranks.events.put(AllRanksEnded(1))

    assert supervise(run, slurm, Ranks(is_refused, completes)) == 1
    (only,) = run.attempts()
    assert (only.decision, only.lost_nodes, only.suspect) == ("give_up", (), None)
    assert only.line.startswith("Slurm refuses the step that starts the ranks: Unable to create step: " + words)
    assert (run.status().bad_nodes, slurm.excluded) == ({}, {})


def dies_mute(*ranks_and_hosts: tuple[int, str]) -> Callable[[Ranks], None]:
    """Return an act whose ranks end with exit code 127. They report nothing and leave no error file."""

    def act(ranks: Ranks) -> None:
        for rank, host in ranks_and_hosts:
            ranks.events.put(RanksExited((rank,), host, "exit code 127", None, time.time(), 127))

    return act


def test_a_node_on_which_ranks_end_before_their_first_report_is_used_twice_only(run: RunDir, slurm: FakeSlurm) -> None:
    """No rank had made a step. Before, the attempt that condemned the node ended the run too."""
    on_node2 = dies_mute((1, "node2"))
    assert supervise(run, slurm, Ranks(on_node2, on_node2, completes), spare=1) == 0
    assert [line.suspect for line in run.attempts()] == ["node2", "node2", None]
    assert [line.decision for line in run.attempts()] == ["restart", "restart", "finish"]
    assert run.attempts()[2].nodes == ("node1", "node3")


def test_no_node_is_to_blame_where_no_rank_of_any_starts(run: RunDir, slurm: FakeSlurm) -> None:
    everywhere = dies_mute((0, "node1"), (1, "node2"))
    assert supervise(run, slurm, Ranks(everywhere, everywhere), spare=1) == 1
    assert [line.suspect for line in run.attempts()] == [None, None]


def commits(ranks: Ranks) -> None:
    """Stop, and say that the step is saved."""
    ranks.report(step=7, step_start=0, phase="stopped")
    stops(ranks, 3)


def test_a_run_that_is_cancelled_between_verdict_and_requeue_says_so(run: RunDir, slurm: FakeSlurm) -> None:
    """Before, it came back, or was shown as requeued for ever."""
    requeue = slurm.requeue

    def cancelled_first(job_id: str, *, if_running: bool = False) -> None:
        slurm.cancel(job_id)
        requeue(job_id, if_running=if_running)

    slurm.requeue = cancelled_first  # called after the verdict
    supervise(run, slurm, Ranks(commits))
    assert run.result().state == run.status().state == "cancelled"
    assert run.attempts()[0].decision == "requeue"
    row = slurm.show_job("1")
    assert (row.state, row.restarts) == ("COMPLETING", 0)


def test_an_exit_code_that_no_report_and_no_file_confirms_is_a_failure(run: RunDir, slurm: FakeSlurm) -> None:
    """Before, `os._exit(75)` on all ranks was "checkpoint saved", and requeued."""

    def exits(ranks: Ranks) -> None:
        ranks.report(step=7, step_start=0, phase="train")
        stops(ranks, 3)

    supervise(run, slurm, Ranks(exits, exits, exits, exits, exits))
    lines = run.attempts()
    assert {line.cause for line in lines} == {"crashed"}
    assert lines[0].decision == "restart"
    assert "exit code 75, but have saved no stop" in lines[0].line
    assert lines[-1].decision == "give_up"
    assert run.result().state == "failed"


def test_a_supervisor_that_was_overtaken_leaves_everything_alone(run: RunDir, slurm: FakeSlurm) -> None:
    def overtaken(ranks: Ranks) -> None:
        run.write_owner(run.owner().replace(number=100))

    ranks = Ranks(overtaken)
    with pytest.raises(Overtaken):
        supervise(run, slurm, ranks)
    assert ranks.abandoned
    assert ranks.signals == []
    assert run.attempts() == []
    assert run.result() is None


def test_ranks_that_end_because_their_run_was_taken_over_write_nothing_in_it(
    run: RunDir, slurm: FakeSlurm, change_limits: ChangeLimits
) -> None:
    """In steady training the supervisor looks for its owner rarely, and they may have ended before."""
    change_limits(files_often_s=0.0, files_every_s=3600.0, supervisor_quiet_s=3600.0, supervisor_silent_s=3600.0)

    def overtaken(ranks: Ranks) -> None:
        ranks.report(step=7, step_start=0)

        def end() -> None:
            run.write_owner(run.owner().replace(number=100))
            ranks.events.put(AllRanksEnded(137))

        threading.Timer(2 * limits().status_every_s, end).start()  # the first look has found nothing

    with pytest.raises(Overtaken):
        supervise(run, slurm, Ranks(overtaken))
    assert run.attempts() == []
    assert run.result() is None


def test_a_supervisor_whose_runs_folder_was_removed_leaves(run: RunDir, slurm: FakeSlurm) -> None:
    ranks = Ranks(lambda _: shutil.rmtree(run.path))
    with pytest.raises(Overtaken, match="was removed"):
        supervise(run, slurm, ranks)
    assert ranks.abandoned
    assert not run.path.exists()


@pytest.mark.parametrize(
    ("folder", "parent"),
    [(errno.ESTALE, 0), (errno.EIO, 0), (errno.ENOENT, errno.ENOENT), (errno.ENOENT, errno.EIO)],
)
def test_a_file_server_that_is_away_for_a_moment_does_not_end_the_run(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, folder: int, parent: int
) -> None:
    plain = Path.stat

    def stat(path: Path, **options: Any) -> os.stat_result:
        if number := {run.path: folder, run.path.parent: parent}.get(path):
            raise OSError(number, os.strerror(number))
        return plain(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert not attempt_loop._is_removed(run.path)


def test_the_next_supervisor_tells_what_became_of_a_killed_one(run: RunDir, slurm: FakeSlurm) -> None:
    left_behind(run, progress={"step": 5})
    earlier_death = "the supervisor was killed by SIGKILL"
    assert Supervisor(run, JobConfig(), ALLOCATION, Ranks(completes), slurm).run(earlier_death) == 0
    first, second = run.attempts()
    assert (first.cause, first.decision, first.line) == ("crashed", "restart", earlier_death)
    assert second.cause == "completed"


def leave(run: RunDir, **more: Any) -> int:
    """Write the files of a supervisor that dies during an attempt. Returns the number by which its ranks may write."""
    claim = Claim.of_job(run, ALLOCATION, None)
    started = {"started": time.time() - 20, "updated": time.time(), "progress": {"step": 5, "step_start": 0}}
    start = {"since": time.time() - 30, "submitted": None, "queue_s": 2.0, "ready": time.time() - 25, "best_step": 0}
    place = {"nodes": ["node1", "node2"], "tasks": [1, 1], "job_id": "1", "restart_count": 0}
    left_behind(run, **{"attempt": 3, "start": start, **started, **place, **more})
    return claim.owner.number


@pytest.mark.parametrize(
    "status",
    [
        pytest.param({}, id="while ranks train"),
        pytest.param({"state": "restarting"}, id="between two attempts"),
        pytest.param({"state": "stopping", "stop": "move"}, id="leaving nodes that nobody knows"),
        pytest.param({"stop": "odd"}, id="stopping for a reason that nobody knows"),
        pytest.param({"tasks": [1]}, id="on nodes whose ranks are not all known"),
        pytest.param({"nodes": [], "tasks": []}, id="on nodes that are not known"),
    ],
)
def test_after_a_killed_supervisor_comes_the_next_attempt(
    run: RunDir, slurm: FakeSlurm, status: dict[str, Any]
) -> None:
    number = leave(run, **status)
    assert Supervisor(run, JobConfig(), ALLOCATION, Ranks(completes), slurm).run("killed") == 0
    assert [(line.attempt, line.cause) for line in run.attempts()] == [(3, "crashed"), (4, "completed")]
    assert (run.owner_number() or 0) > number


def test_after_a_killed_supervisor_ranks_stay_on_the_nodes_that_hold_their_state(run: RunDir, slurm: FakeSlurm) -> None:
    leave(run, nodes=["node3", "node2"])
    config = JobConfig()
    config.cluster.spare_nodes = 1
    assert Supervisor(run, config, ALLOCATION, Ranks(completes), slurm).run("killed") == 0
    assert run.attempts()[-1].nodes == ("node3", "node2")


def test_a_run_that_was_stopped_before_its_supervisor_was_killed_has_ended(run: RunDir, slurm: FakeSlurm) -> None:
    leave(run, state="stopping", stop="user")
    user_requests.record_intent(run, Intent.STOP)
    assert Supervisor(run, JobConfig(), ALLOCATION, Ranks(), slurm).run("killed") == EXIT_STOPPED
    assert run.result().state == "stopped"


def test_a_job_whose_supervisors_all_end_without_a_word_is_given_up(run: RunDir, slurm: FakeSlurm) -> None:
    """Such attempts get no verdict, and follow-up jobs would follow each other for ever."""
    config = JobConfig()
    config.retry.max_requeues = 2
    supervisor_of = partial(Supervisor, run, config, ALLOCATION)
    for attempt in (1, 2):
        left_behind(run, attempt=attempt)
        supervisor.close_interrupted(supervisor_of(Ranks(), slurm)._context, None)
    left_behind(run, attempt=3)
    with pytest.raises(ToolkitError, match="given up after 2 requeues"):
        supervisor_of(Ranks(), slurm).run()


def test_a_restarted_job_says_which_node_the_last_start_lost(run: RunDir, slurm: FakeSlurm) -> None:
    left_behind(run, stop="signal", nodes=["node1", "dead"], tasks=[1, 1])
    assert supervise(run, slurm, Ranks(completes)) == 0
    first, _ = run.attempts()
    assert (first.cause, first.lost_nodes, first.line) == ("node_failure", ("dead",), "lost dead")
    assert list(nodes.remembered(run)) == ["dead"]


def test_a_job_killed_after_its_run_had_ended_does_not_run_it_again(run: RunDir, slurm: FakeSlurm) -> None:
    run.write_result(RunResult.from_json({"state": "completed"}))
    assert Supervisor(run, JobConfig(), ALLOCATION, Ranks(), slurm).run("killed") == 0


@pytest.mark.parametrize(("is_preempted", "cause"), [(True, "preempted"), (False, "completed")])
def test_a_foreign_script_that_ends_with_0_in_a_preemption_comes_back(
    run: RunDir, slurm: FakeSlurm, is_preempted: bool, cause: str
) -> None:
    """Slurm signals the ranks alone at the beginning of the grace time. The supervisor gets no signal."""

    def saves(ranks: Ranks) -> None:
        if is_preempted:
            slurm.preempt("1", grace_s=30)
        ranks.events.put(AllRanksEnded(0))

    config = JobConfig(job=configs.SCRIPT_JOB)
    Supervisor(run, config, ALLOCATION, Ranks(saves), slurm).run()
    assert [line.cause for line in run.attempts()] == [cause]
    assert slurm.show_job("1").restarts == is_preempted


def ended_by_a_preemption_that_cancels(slurm: FakeSlurm, job: str) -> None:
    slurm.preempt_mode = "CANCEL"
    slurm.preempt(job)
    slurm.advance(0)


@pytest.mark.parametrize(
    ("what", "cause", "restarts"),
    [(FakeSlurm.cancel, "cancelled", 0), (ended_by_a_preemption_that_cancels, "preempted", 1)],
)
def test_a_rank_that_survives_the_end_of_its_job_is_left_to_slurm(
    run: RunDir,
    slurm: FakeSlurm,
    change_limits: ChangeLimits,
    what: Callable[[FakeSlurm, str], None],
    cause: str,
    restarts: int,
) -> None:
    """Its SIGTERM came between fork and exec. Slurm has forgotten the step, and srun waits for it."""
    change_limits(dying_s=0.0, kill_again_s=60.0)

    def told(ranks: Ranks) -> None:
        ranks.answers_kill = False
        what(slurm, "1")
        ranks.events.put(StopAsked(signal.SIGTERM))
        ranks.events.put(RanksExited((0,), "node1", "killed by SIGTERM", signal.SIGTERM, time.time()))

    ranks = Ranks(told)
    supervise(run, slurm, ranks)
    assert ranks.abandoned
    assert run.attempts()[0].cause == cause
    assert slurm.show_job("1").restarts == restarts


def test_a_job_that_somebody_but_told_to_stop_is_waited_for(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "settings", lambda: Settings(kill_wait_s=0.0))  # Slurm would not wait either

    def told(ranks: Ranks) -> None:
        ranks.report(step=7, step_start=0)
        ranks.events.put(StopAsked(signal.SIGTERM))
        threading.Timer(2 * limits().status_every_s, commits, [ranks]).start()

    ranks = Ranks(told)
    assert supervise(run, slurm, ranks) == 75
    assert not ranks.abandoned
    assert "checkpoint saved" in run.attempts()[0].line


def with_limit(
    run: RunDir,
    slurm: FakeSlurm,
    ranks: Ranks,
    minutes: int,
    delay_s: int,
    left_s: float | None = None,
    up: bool = True,
) -> int:
    """Supervise a job of one node with this time limit and save_before_limit_s. ``left_s`` of the limit are left."""
    job = slurm.sbatch([f"--time={minutes}", "job.sh"])
    slurm.start(job)
    if left_s is not None:
        slurm._set(slurm._one(job), end_time=slurm.now + left_s)
    config = JobConfig()
    config.cluster.save_before_limit_s = delay_s
    slurm.is_up = up
    return Supervisor(run, config, Allocation(("node1",), (1,), 1, job_id=job), ranks, slurm).run()


def gets_slurms_signal(ranks: Ranks) -> None:
    """Get Slurm's signal, and complete 2 looks later if nothing stops the ranks."""
    ranks.report(step=7, step_start=0)
    ranks.events.put(StopAsked(signal.SIGUSR2))
    Store.on_propose = lambda: ranks.events.put(AllRanksEnded(75))
    threading.Timer(3 * limits().status_every_s, completes, [ranks]).start()


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0, -3600.0])
def test_a_signal_that_comes_at_once_does_not_end_the_attempt(
    run: RunDir, slurm: FakeSlurm, change_limits: ChangeLimits, ahead_s: float
) -> None:
    """Before, each attempt was out of time in its first second. In the end the run was given up. That was with a
    save_before_limit_s as long as the limit, or a batch host's clock that is ahead."""
    change_limits(status_every_s=0.05)
    slurm.now = time.time() - ahead_s
    assert with_limit(run, slurm, Ranks(gets_slurms_signal), minutes=2, delay_s=3600) == 0
    assert [line.cause for line in run.attempts()] == ["completed"]


@pytest.mark.parametrize(
    ("delay_s", "minutes", "margin_s"), [(120, 1, 30), (0, 1, 10), (50, 2, 50)], ids=["half", "slack", "delay"]
)
def test_the_ranks_are_stopped_in_time_by_the_controllers_clock(
    run: RunDir, slurm: FakeSlurm, delay_s: int, minutes: int, margin_s: int
) -> None:
    """They stop at half the limit, save_before_limit_s or a few seconds before it. Its clock is 2 h ahead."""
    slurm.now = time.time() - 7200
    proposed = []

    def trains(ranks: Ranks) -> None:
        ranks.report(step=7, step_start=0)

        def stop() -> None:
            proposed.append(time.monotonic())
            stops(ranks, 1)

        Store.on_propose = stop

    began = time.monotonic()
    assert with_limit(run, slurm, Ranks(trains), minutes, delay_s, left_s=margin_s + 0.3) == 75
    assert proposed[0] - began >= 0.3
    assert [(line.cause, line.decision) for line in run.attempts()] == [("timeout", "requeue")]


def test_the_clock_is_watched_though_the_controller_was_away_at_the_start(
    run: RunDir, slurm: FakeSlurm, change_limits: ChangeLimits
) -> None:
    """Before, the limit was never known. No follow-up job was submitted, and the job ended in the middle of a step."""
    change_limits(status_every_s=0.02, ask_of_job_every_s=0.02)
    slurm.now = time.time()
    slurm.preempt_mode = "CANCEL"
    follow_ups: list[str] = []

    def trains(ranks: Ranks) -> None:
        ranks.report(step=7, step_start=0)

        def stop() -> None:
            follow_ups.extend(row.job_id for row in slurm._jobs.values() if row.state == "PENDING")
            stops(ranks, 1)

        Store.on_propose = stop
        slurm.is_up = True  # the controller is back

    assert with_limit(run, slurm, Ranks(trains), minutes=1, delay_s=0, left_s=11, up=False) == 75
    assert [(line.cause, line.decision) for line in run.attempts()] == [("timeout", "requeue")]
    assert len(follow_ups) == follow_up.COUNT


def test_a_second_signal_is_somebodys(run: RunDir, slurm: FakeSlurm, change_limits: ChangeLimits) -> None:
    change_limits(status_every_s=0.05)
    slurm.now = time.time()

    def gets_two(ranks: Ranks) -> None:
        ranks.report(step=7, step_start=0)
        for _ in range(2):
            ranks.events.put(StopAsked(signal.SIGUSR2))
        Store.on_propose = lambda: stops(ranks, 1)

    assert with_limit(run, slurm, Ranks(gets_two), minutes=2, delay_s=3600) == 75
    assert [line.cause for line in run.attempts()] == ["stopped"]


def test_an_unanswered_connection_names_both_nodes_and_the_later_one_is_replaced(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait for the node itself, or for an address outside the attempt, tells nothing."""

    def fails(ranks: Ranks) -> None:
        addresses = ("10.0.0.1", "10.0.0.2", "10.0.0.3", "10.9.9.9")
        told = NodeAnswered("node2", StuckConnectionsAnswered(1, addresses), 0.0, 0.0)
        monkeypatch.setattr(AGENTS, "say_unanswered", lambda: ranks.events.put(told))
        ranks.events.put(RanksExited((0,), "node1", "exit code 1", None, time.time(), 1))

    assert supervise(run, slurm, Ranks(fails, fails, completes), spare=1) == 0
    first, second, last = run.attempts()
    assert "no connection from node2 to node1" in first.line
    assert (first.suspect, second.suspect) == ("node2", "node2")
    assert "caused by node node2" in second.line
    assert last.nodes == ("node1", "node3")


def test_an_error_that_names_the_address_of_a_node_tells_on_both(run: RunDir, slurm: FakeSlurm) -> None:
    def fails(ranks: Ranks) -> None:
        path = run.error_file(1, 1)
        fsio.make_dir(path.parent)
        message = "timed out after 60000ms while trying to connect to (10.0.0.1, 29500)."
        fsio.write_json(path, {"rank": 1, "host": "node2", "type": "DistNetworkError", "message": message})
        ranks.events.put(RanksExited((1,), "node2", "exit code 1", None, time.time(), 1))

    assert supervise(run, slurm, Ranks(fails, completes)) == 0
    assert "no connection from node2 to node1" in run.attempts()[0].line


def test_a_follow_up_job_names_the_job_before_it_that_was_preempted(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm = FakeSlurm(preempt_mode="CANCEL")
    for job in (slurm.sbatch(["job.sh"]), slurm.sbatch(["job.sh"])):
        slurm.start(job, "node1")
    slurm.preempt("1")
    slurm.advance(1)
    left_behind(run, job_id="1", restart_count=3, nodes=["node1"], tasks=[1])
    allocation = Allocation(("node1",), (1,), 1, job_id="2")
    assert Supervisor(run, JobConfig(), allocation, Ranks(completes), slurm).run() == 0
    first, second = run.attempts()
    assert (first.cause, first.job_id, first.restart_count) == ("preempted", "1", 3)
    assert (second.job_id, second.restart_count) == ("2", 0)


def test_a_job_that_comes_back_to_a_full_disk_waits_for_room(
    run: RunDir, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    """Each of its files is refused once. They are owner, size, job, the line of the last start, and the result."""
    left_behind(run, stop="signal", nodes=["node1"], tasks=[1])
    change_limits(retry_every_s=0.001)
    plain, refused = os.fsync, set()

    def fsync(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        name = path.name.split(".tmp-")[0].lstrip(".")  # the file that the temporary one is to replace
        if path.is_file() and name not in refused:
            refused.add(name)
            raise OSError(errno.ENOSPC, "No space left on device")
        plain(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    assert supervise(run, slurm, Ranks(completes)) == 0
    assert refused >= {"owner.json", "config.yaml", "slurm-1", "attempts.jsonl", "result.json"}
    assert [line.attempt for line in run.attempts()] == [1, 2]
    assert run.result().state == "completed"


@pytest.mark.parametrize(("number", "follow_up"), [(errno.ENOSPC, False), (errno.ENOSPC, True), (errno.ESTALE, False)])
def test_a_disk_that_stays_full_or_away_gives_the_job_back_and_does_not_end_the_run(
    run: RunDir,
    slurm: FakeSlurm,
    monkeypatch: pytest.MonkeyPatch,
    change_limits: ChangeLimits,
    number: int,
    follow_up: bool,
) -> None:
    def full(*args: object) -> Supervisor:
        raise OSError(number, os.strerror(number))

    claim = Claim.of_job(run, ALLOCATION, "token")
    if follow_up:
        claim.note_follow_ups(["2"])
    change_limits(give_up_after_s=0.0)
    monkeypatch.setattr(entry, "Slurm", lambda: slurm)
    monkeypatch.setattr(entry, "build", full)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-3]")
    assert entry.run_supervisor(run, "slurm", None, None) == EXIT_STOPPED
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    assert slurm.show_job("1").restarts == (0 if follow_up else 1)
    assert run.result() is None


def test_a_supervisor_that_fails_and_cannot_write_so_ends_all_the_same(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    change_limits(give_up_after_s=0.0)
    monkeypatch.setattr(RunDir, "write_result", full)
    entry._write_own_failure(run, ValueError("x"))
    assert run.result() is None


@pytest.mark.parametrize(("has_ended", "state"), [(True, "FAILED"), (False, "REQUEUE_HOLD")])
def test_an_expedited_job_is_not_held_in_the_queue_when_its_run_has_ended(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, has_ended: bool, state: str
) -> None:
    """Slurm puts it back for its exit code. A run that continues needs that, and an ended one does not."""
    slurm = FakeSlurm()
    job = slurm.sbatch(["--requeue=expedite", "job.sh"])
    slurm.start(job)
    if has_ended:
        run.write_result(RunResult.from_json({"state": "failed"}))
    monkeypatch.setattr(entry, "Slurm", lambda: slurm)
    monkeypatch.setattr(entry, "guarded", lambda *_: EXIT_STOPPED)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    with pytest.raises(SystemExit):
        entry.supervise(str(run.path), "slurm")
    slurm.finish(job, exit_code=EXIT_STOPPED)
    assert slurm.show_job(job).state == state


def test_more_ranks_than_gpus_are_refused_before_any_is_started(run: RunDir, slurm: FakeSlurm) -> None:
    config, allocation = JobConfig(), Allocation(HOSTS, (2, 2, 2), 1, (2, 2, 1), job_id="1")
    with pytest.raises(RequestError, match=r"cluster\.tasks_per_gpu: 2 ranks on \w+ have 1 GPUs, each for 1"):
        Supervisor(run, config, allocation, Ranks(completes), slurm, AGENTS).run()
    shared = replace(allocation, tasks_per_gpu=2)
    assert Supervisor(run, config, shared, Ranks(completes), slurm, AGENTS).run() == 0


def test_a_job_without_the_gpus_of_the_config_says_so(
    run: RunDir, slurm: FakeSlurm, caplog: pytest.LogCaptureFixture
) -> None:
    config = JobConfig()
    config.cluster.gpus_per_node = 4
    assert Supervisor(run, config, ALLOCATION, Ranks(completes), slurm, AGENTS).run() == 0
    assert "cluster.gpus_per_node: the config asks for 4, and Slurm gives this job none" in caplog.text
