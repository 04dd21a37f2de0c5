"""The verdict, as a table."""

from __future__ import annotations

import pytest

from toolkit.cluster.commands import JobRow
from toolkit.launch.ending import Cause, Decision, Facts, RankFailure, first_failure, judge
from toolkit.launch.supervisor import how_slurm_sees_it

KILLED = RankFailure(3, "node2", "killed by SIGKILL", 11.0, by_signal=True)
RAISED = RankFailure(1, "node1", "ValueError: boom", 10.5, traceback="Traceback ...")
PEER = RankFailure(0, "node1", "RuntimeError: Connection closed by peer", 10.9, traceback="Traceback ...")
EXITED = RankFailure(2, "node2", "exit code 1", 10.0)


@pytest.mark.parametrize(
    ("facts", "cause", "decision"),
    [
        (Facts(0), Cause.COMPLETED, Decision.FINISH),
        (Facts(1, (RAISED,), max_failures=2), Cause.CRASHED, Decision.RESTART),
        (Facts(1, (RAISED,), crashes_before=1, max_failures=2), Cause.CRASHED, Decision.RESTART),
        (Facts(1, (RAISED,), crashes_before=2, max_failures=2), Cause.CRASHED, Decision.GIVE_UP),
        (Facts(1, (RAISED,), max_failures=0), Cause.CRASHED, Decision.GIVE_UP),
        (Facts(137, (KILLED,), slurm="running", max_failures=2), Cause.CRASHED, Decision.RESTART),
        (Facts(143, (KILLED,), slurm="preempted", max_failures=2), Cause.PREEMPTED, Decision.REQUEUE),
        (Facts(143, (KILLED,), told="signal", slurm="preempted"), Cause.PREEMPTED, Decision.REQUEUE),
        (Facts(143, (KILLED,), told="signal", slurm="timeout"), Cause.TIMEOUT, Decision.GIVE_UP),
        (Facts(143, (KILLED,), told="signal", slurm="cancelled", max_failures=9), Cause.CANCELLED, Decision.GIVE_UP),
        (Facts(143, (KILLED,), slurm="cancelled", max_failures=9), Cause.CANCELLED, Decision.GIVE_UP),
        (Facts(143, (KILLED,), told="cancel", slurm="preempted", max_failures=9), Cause.CANCELLED, Decision.GIVE_UP),
        (Facts(143, (), told="signal", slurm=None), Cause.CANCELLED, Decision.GIVE_UP),
        (Facts(0, (RAISED,), max_failures=1), Cause.CRASHED, Decision.RESTART),
    ],
)
def test_cause_and_decision_follow_from_the_facts(facts: Facts, cause: Cause, decision: Decision) -> None:
    ending = judge(facts)
    assert (ending.cause, ending.decision) == (cause, decision)
    assert ending.line


def test_whoever_was_killed_comes_before_those_who_lost_their_peer() -> None:
    assert first_failure((PEER, KILLED, EXITED)) is KILLED
    assert first_failure((PEER, RAISED, EXITED)) is RAISED
    assert first_failure((EXITED,)) is EXITED
    assert first_failure(()) is None


def test_the_line_of_a_crash_names_rank_host_and_budget() -> None:
    line = judge(Facts(1, (PEER, RAISED), crashes_before=4, max_failures=4)).line
    assert "rank 1 on node1: ValueError: boom" in line
    assert "given up after 5 failures" in line


def row(**fields: object) -> JobRow:
    return JobRow(job_id="7", **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (None, None),
        (row(state="RUNNING"), "running"),
        (row(state="RUNNING", preempt_time=5.0), "preempted"),
        (row(state="COMPLETING", preempt_time=5.0), "preempted"),
        (row(state="COMPLETING", start_time=0.0, end_time=60.0, time_limit_s=60.0), "timeout"),
        (row(state="RUNNING", start_time=0.0, end_time=60.0, time_limit_s=60.0), "running"),
        (row(state="COMPLETING", start_time=0.0, end_time=30.0, time_limit_s=60.0), "cancelled"),
        (row(state="CANCELLED"), "cancelled"),
    ],
)
def test_a_job_that_ends_neither_preempted_nor_out_of_time_was_cancelled(job: JobRow | None, expected: str) -> None:
    assert how_slurm_sees_it(job) == expected
