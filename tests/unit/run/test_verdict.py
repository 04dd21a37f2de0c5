"""The verdict on an attempt, as a table. Rows of scontrol: from Slurm 22.05.8 and 24.11.5 (times in seconds)."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.files.run_files import FirstFailure, RunProgress
from toolkit.metrics import goodput
from toolkit.run.attempt.verdict import (
    Budgets,
    Cause,
    Decision,
    Facts,
    PastAttempt,
    RankFailure,
    StopReason,
    first_failure,
    judge,
    unfit_nodes,
)
from toolkit.run.job.slurm_job import JobOutcome, outcome_of_row
from toolkit.slurm.jobs import JobRow

KILLED = RankFailure(3, "node2", "killed by SIGKILL", 11.0, by_signal=True)
RAISED = RankFailure(1, "node1", "ValueError: boom", 10.5, traceback="Traceback ...")
PEER = RankFailure(0, "node1", "RuntimeError: Connection closed by peer", 10.9, traceback="Traceback ...")
EXITED = RankFailure(2, "node2", "exit code 1", 10.0)
OOM = RankFailure(2, "node2", "killed by SIGKILL (Out Of Memory)", 10.0, by_signal=True, out_of_memory=True)
CUDA_OOM = RankFailure(2, "node2", "OutOfMemoryError: CUDA out of memory", 10.0, traceback="T", out_of_memory=True)


def row(**fields: object) -> JobRow:
    return JobRow(job_id="7", **fields)  # type: ignore[arg-type]


RECORDED = {
    "running": (row(state="RUNNING", start_time=0, end_time=31535999, time_limit_s=31536000), JobOutcome.RUNNING),
    "running, unlimited": (row(state="RUNNING", start_time=0), JobOutcome.RUNNING),
    "22.05 in the grace of a preemption": (
        row(state="RUNNING", start_time=-0.6, preempt_time=1.4),
        JobOutcome.PREEMPTED,
    ),
    "22.05 at its end": (row(state="RUNNING", start_time=-0.6, preempt_time=1.4, end_time=9.4), JobOutcome.PREEMPTED),
    "22.05 requeued after the grace": (row(state="COMPLETING", start_time=16.4, restarts=1), JobOutcome.REQUEUED),
    "24.11 in the grace": (row(state="RUNNING", start_time=-0.3, preempt_time=1.7, end_time=9.7), JobOutcome.PREEMPTED),
    "preempted, requeue forbidden": (
        row(state="COMPLETING", preempt_time=16.0, start_time=-1.0, end_time=16.0, can_requeue=False),
        JobOutcome.PREEMPTED,
    ),
    "preempted by cancelling, grace 0": (
        row(state="COMPLETING", preempt_time=1.0, start_time=-1.0, end_time=1.0),
        JobOutcome.PREEMPTED,
    ),
    "scancel": (
        row(state="COMPLETING", start_time=-0.3, end_time=0.7, time_limit_s=31536000),
        JobOutcome.CANCELLED,
    ),
    "scancel in the grace of a preemption": (
        row(state="COMPLETING", preempt_time=1.6, start_time=-0.4, end_time=4.6),
        JobOutcome.CANCELLED,
    ),
    "scontrol requeue": (row(state="COMPLETING", start_time=0.8, restarts=1), JobOutcome.REQUEUED),
    "scontrol requeue, seen late": (row(state="PENDING", restarts=1), JobOutcome.REQUEUED),
    "time limit": (
        row(state="COMPLETING", reason="TimeLimit", start_time=-0.8, end_time=87.2, time_limit_s=60.0),
        JobOutcome.TIMEOUT,
    ),
    "time limit, no reason given": (
        row(state="COMPLETING", start_time=0, end_time=60.0, time_limit_s=60.0),
        JobOutcome.TIMEOUT,
    ),
    "node lost": (row(state="COMPLETING", start_time=40.7, restarts=1, node_list="node1"), JobOutcome.REQUEUED),
    "first component requeued alone": (
        row(state="PENDING", restarts=1, others=(row(state="RUNNING"),)),
        JobOutcome.NODE_FAILED,
    ),
    "all components requeued": (row(state="PENDING", restarts=1, others=(row(state="PENDING"),)), JobOutcome.REQUEUED),
    "over: PREEMPTED": (row(state="PREEMPTED", preempt_time=1.0, end_time=1.0), JobOutcome.PREEMPTED),
    "over: TIMEOUT": (row(state="TIMEOUT"), JobOutcome.TIMEOUT),
    "over: NODE_FAIL": (row(state="NODE_FAIL"), JobOutcome.NODE_FAILED),
    "over: CANCELLED": (row(state="CANCELLED"), JobOutcome.CANCELLED),
    "over: DEADLINE": (row(state="DEADLINE"), JobOutcome.TIMEOUT),
    "over: BOOT_FAIL": (row(state="BOOT_FAIL"), JobOutcome.NODE_FAILED),
    "over: FAILED": (row(state="FAILED", exit_code=1), JobOutcome.CANCELLED),
    "held after a requeue": (row(state="REQUEUE_HOLD", reason="JobHeldUser"), JobOutcome.REQUEUED),
    "held as a special exit": (row(state="SPECIAL_EXIT", reason="JobHeldUser"), JobOutcome.REQUEUED),
    "its nodes could not be configured": (row(state="RECONFIG_FAIL"), JobOutcome.REQUEUED),
    "its reservation was deleted": (row(state="RESV_DEL_HOLD", reason="ReservationDeleted"), JobOutcome.REQUEUED),
    "its nodes are switched on": (row(state="CONFIGURING", start_time=0), JobOutcome.RUNNING),
    "another cluster has it": (row(state="REVOKED"), JobOutcome.RUNNING),
    "a state of a newer Slurm": (row(state="HIBERNATING"), JobOutcome.UNKNOWN),
    "nobody knows": (None, JobOutcome.UNKNOWN),
}


@pytest.mark.parametrize(("job", "expected"), RECORDED.values(), ids=RECORDED.keys())
def test_a_row_of_scontrol_tells_the_cases_apart(job: JobRow | None, expected: JobOutcome) -> None:
    assert outcome_of_row(job, restart_count=0) is expected


def test_a_restart_that_was_ours_is_no_requeue() -> None:
    job = row(state="RUNNING", restarts=2, start_time=0)
    assert outcome_of_row(job, restart_count=2) is JobOutcome.RUNNING


DONE = Facts(0, has_result=True)
UNSTARTED = RankFailure(1, "node2", "could not be started: Slurmd could not connect IO", 10.0, at_launch=True)
CLEAN = Facts(75, stopped_cleanly=True, step_start=100, step_end=150)
MOVING = replace(
    CLEAN, stop=StopReason.MOVE, slurm=JobOutcome.RUNNING, vacated_nodes=("node2: drained: new fan by root",)
)
DEAD = Facts(143, (KILLED,), step_start=100, step_end=150)
VERDICTS = {
    "all ranks done": (DONE, Cause.COMPLETED, Decision.FINISH),
    "done although a stop was asked for": (replace(DONE, stop=StopReason.CLOCK), Cause.COMPLETED, Decision.FINISH),
    "exit code 0 without a result": (Facts(0, slurm=JobOutcome.RUNNING), Cause.CRASHED, Decision.RESTART),
    "cancelled before rank 0 had a result": (Facts(0, slurm=JobOutcome.CANCELLED), Cause.CANCELLED, Decision.GIVE_UP),
    "some node could not start its ranks": (
        Facts(0, (UNSTARTED,), slurm=JobOutcome.RUNNING, lost_nodes=("node2",), can_go_on=True),
        Cause.NODE_FAILURE,
        Decision.RESTART,
    ),
    "a user script is done": (Facts(0, is_script=True, slurm=JobOutcome.RUNNING), Cause.COMPLETED, Decision.FINISH),
    "a user script is done, no Slurm": (Facts(0, is_script=True), Cause.COMPLETED, Decision.FINISH),
    "a user script saved and ended with 0 in a preemption": (
        Facts(0, is_script=True, stop=StopReason.SIGNAL, slurm=JobOutcome.PREEMPTED),
        Cause.PREEMPTED,
        Decision.REQUEUE,
    ),
    "the same at Slurm's own SIGTERM, of which we have heard nothing": (
        Facts(0, is_script=True, slurm=JobOutcome.PREEMPTED),
        Cause.PREEMPTED,
        Decision.REQUEUE,
    ),
    "a user script saved and ended with 0 before the limit": (
        Facts(0, is_script=True, stop=StopReason.CLOCK, slurm=JobOutcome.RUNNING),
        Cause.TIMEOUT,
        Decision.REQUEUE,
    ),
    "a user script saved and ended with 0 at toolkit stop": (
        Facts(0, is_script=True, stop=StopReason.USER, slurm=JobOutcome.RUNNING),
        Cause.STOPPED,
        Decision.FINISH,
    ),
    "preempted, committed in the grace": (
        replace(CLEAN, slurm=JobOutcome.PREEMPTED),
        Cause.PREEMPTED,
        Decision.REQUEUE,
    ),
    "preempted, killed": (replace(DEAD, slurm=JobOutcome.PREEMPTED), Cause.PREEMPTED, Decision.REQUEUE),
    "preempted, TERM at the batch host": (
        replace(CLEAN, stop=StopReason.SIGNAL, slurm=JobOutcome.PREEMPTED),
        Cause.PREEMPTED,
        Decision.REQUEUE,
    ),
    "requeued by Slurm or an administrator": (
        replace(DEAD, stop=StopReason.SIGNAL, slurm=JobOutcome.REQUEUED),
        Cause.PREEMPTED,
        Decision.REQUEUE,
    ),
    "node lost, requeued by Slurm": (
        replace(DEAD, stop=StopReason.SIGNAL, slurm=JobOutcome.REQUEUED, lost_nodes=("node2",)),
        Cause.NODE_FAILURE,
        Decision.REQUEUE,
    ),
    "stopped before the limit": (
        replace(CLEAN, stop=StopReason.CLOCK, slurm=JobOutcome.RUNNING),
        Cause.TIMEOUT,
        Decision.REQUEUE,
    ),
    "killed at the limit": (
        replace(DEAD, stop=StopReason.SIGNAL, slurm=JobOutcome.TIMEOUT),
        Cause.TIMEOUT,
        Decision.REQUEUE,
    ),
    "scancel, committed": (
        replace(CLEAN, stop=StopReason.SIGNAL, slurm=JobOutcome.CANCELLED),
        Cause.CANCELLED,
        Decision.GIVE_UP,
    ),
    "scancel, killed": (replace(DEAD, slurm=JobOutcome.CANCELLED), Cause.CANCELLED, Decision.GIVE_UP),
    "toolkit cancel in a preemption": (
        replace(DEAD, stop=StopReason.CANCEL, slurm=JobOutcome.PREEMPTED),
        Cause.CANCELLED,
        Decision.GIVE_UP,
    ),
    "toolkit stop": (replace(CLEAN, stop=StopReason.USER, slurm=JobOutcome.RUNNING), Cause.STOPPED, Decision.FINISH),
    "toolkit stop, preempted at the same time": (
        replace(CLEAN, stop=StopReason.USER, slurm=JobOutcome.PREEMPTED),
        Cause.STOPPED,
        Decision.FINISH,
    ),
    "Ctrl-C on this machine": (replace(CLEAN, stop=StopReason.USER), Cause.STOPPED, Decision.FINISH),
    "a signal at one rank only": (replace(CLEAN, slurm=JobOutcome.RUNNING), Cause.STOPPED, Decision.REQUEUE),
    "a signal at one rank of a local run": (CLEAN, Cause.STOPPED, Decision.FINISH),
    "TERM while the controller is away": (
        replace(DEAD, stop=StopReason.SIGNAL, slurm=JobOutcome.UNKNOWN),
        Cause.CANCELLED,
        Decision.GIVE_UP,
    ),
    "a stop with the controller away, committed": (
        replace(CLEAN, slurm=JobOutcome.UNKNOWN),
        Cause.STOPPED,
        Decision.REQUEUE,
    ),
    "moved to a spare": (MOVING, Cause.MOVED, Decision.RESTART),
    "moved while the controller is away": (replace(MOVING, slurm=JobOutcome.UNKNOWN), Cause.MOVED, Decision.RESTART),
    "preempted while it was moved": (replace(MOVING, slurm=JobOutcome.PREEMPTED), Cause.PREEMPTED, Decision.REQUEUE),
    "cancelled while it was moved": (replace(MOVING, slurm=JobOutcome.CANCELLED), Cause.CANCELLED, Decision.GIVE_UP),
    "at its end while it was moved": (replace(DONE, stop=StopReason.MOVE), Cause.COMPLETED, Decision.FINISH),
    "a node lost while another was left": (
        replace(DEAD, stop=StopReason.MOVE, slurm=JobOutcome.RUNNING, lost_nodes=("node2",), can_go_on=True),
        Cause.NODE_FAILURE,
        Decision.RESTART,
    ),
    "a rank killed while it was moved": (
        replace(DEAD, stop=StopReason.MOVE, slurm=JobOutcome.RUNNING),
        Cause.CRASHED,
        Decision.RESTART,
    ),
    "a rank raised": (Facts(1, (RAISED,)), Cause.CRASHED, Decision.RESTART),
    "a rank was killed": (replace(DEAD, slurm=JobOutcome.RUNNING), Cause.CRASHED, Decision.RESTART),
    "no progress": (Facts(137, (PEER, RAISED), hang=KILLED), Cause.HANG, Decision.RESTART),
    "preempted while it was taken for hung": (
        Facts(137, (PEER,), hang=KILLED, slurm=JobOutcome.PREEMPTED),
        Cause.PREEMPTED,
        Decision.REQUEUE,
    ),
    "all exit codes 0 but one rank complained": (Facts(0, (RAISED,)), Cause.CRASHED, Decision.RESTART),
    "cgroup killed it": (Facts(137, (OOM, PEER), slurm=JobOutcome.RUNNING), Cause.OUT_OF_MEMORY, Decision.GIVE_UP),
    "CUDA ran out": (Facts(1, (CUDA_OOM, PEER)), Cause.OUT_OF_MEMORY, Decision.GIVE_UP),
    "srun lost a node, Slurm has not noticed": (
        replace(DEAD, slurm=JobOutcome.RUNNING, lost_nodes=("node2",)),
        Cause.NODE_FAILURE,
        Decision.REQUEUE,
    ),
    "a node lost in a job that is told to end": (
        replace(DEAD, stop=StopReason.SIGNAL, slurm=JobOutcome.RUNNING, lost_nodes=("node2",), can_go_on=True),
        Cause.NODE_FAILURE,
        Decision.REQUEUE,
    ),
    "one killed, one without memory": (
        Facts(1, (KILLED, CUDA_OOM), slurm=JobOutcome.RUNNING),
        Cause.OUT_OF_MEMORY,
        Decision.GIVE_UP,
    ),
    "a result, and a lost node": (
        replace(DONE, slurm=JobOutcome.NODE_FAILED, lost_nodes=("node2",)),
        Cause.NODE_FAILURE,
        Decision.REQUEUE,
    ),
}


@pytest.mark.parametrize(("facts", "cause", "decision"), VERDICTS.values(), ids=VERDICTS.keys())
def test_cause_and_decision_follow_from_the_facts(facts: Facts, cause: Cause, decision: Decision) -> None:
    ending = judge(facts)
    assert (ending.cause, ending.decision) == (cause, decision)
    assert ending.line


@pytest.mark.parametrize("stop", StopReason)
def test_each_reason_to_stop_has_a_verdict(stop: StopReason) -> None:
    rows = [facts for facts, _, _ in VERDICTS.values() if facts.stop is stop]
    assert rows, (
        f"{stop}: say in a row of VERDICTS what follows; without a case in judge() the job is requeued for ever"
    )


@pytest.mark.parametrize("stop", [None, *StopReason])
@pytest.mark.parametrize("cleanly", [True, False])
def test_what_was_cancelled_is_never_brought_back(stop: StopReason | None, cleanly: bool) -> None:
    facts = replace(CLEAN if cleanly else DEAD, stop=stop, slurm=JobOutcome.CANCELLED)
    assert judge(facts).decision is Decision.GIVE_UP
    assert judge(replace(facts, stop=StopReason.CANCEL, slurm=JobOutcome.REQUEUED)).decision is Decision.GIVE_UP


def crashed(step_end: int | None) -> PastAttempt:
    return PastAttempt("crashed", "restart", step_end)


def test_memory_of_a_gpu_is_not_asked_of_slurm() -> None:
    host = RankFailure(2, "node2", "killed by SIGKILL", 10.0, out_of_memory=True)
    assert "cluster.mem_gb" in judge(Facts(1, (host,))).line
    line = judge(Facts(1, (CUDA_OOM, PEER))).line
    assert "a smaller batch" in line
    assert "mem_gb" not in line


@pytest.mark.parametrize(
    ("history", "step_end", "decision"),
    [
        ([], None, Decision.RESTART),
        ([crashed(None)], None, Decision.GIVE_UP),  # a wrong import, twice
        ([crashed(150)], 150, Decision.RESTART),
        ([crashed(150), crashed(150)], 150, Decision.GIVE_UP),  # twice no further than the first time
        ([crashed(150), crashed(149)], 151, Decision.RESTART),
        ([crashed(i) for i in range(1, 5)], 10, Decision.GIVE_UP),  # max_failures: new steps, but none was saved
        (
            [crashed(None), PastAttempt("preempted", "requeue", None)],
            None,
            Decision.GIVE_UP,
        ),  # a preemption changes nothing
        ([PastAttempt("preempted", "requeue", None)] * 9, None, Decision.RESTART),  # and does not count by itself
        ([PastAttempt("node_failure", "requeue", 90), crashed(90)], 90, Decision.GIVE_UP),
        ([crashed(90), crashed(89)], 90, Decision.GIVE_UP),  # the last reports may differ by a step
        ([crashed(90), crashed(89)], 89, Decision.GIVE_UP),
        ([crashed(90), crashed(85)], 85, Decision.RESTART),  # the run has been further: this can be chance
        ([crashed(90), crashed(80)], 85, Decision.RESTART),  # at different steps: this can be chance
        ([crashed(90), crashed(90), PastAttempt("crashed", "restart", 80)], 90, Decision.GIVE_UP),
        ([crashed(90), crashed(None)], None, Decision.RESTART),  # the run has been able to start
        ([crashed(90), PastAttempt("timeout", "requeue", 70)], 60, Decision.GIVE_UP),
    ],
)
def test_failures_have_a_budget_and_so_have_attempts_without_progress(
    history: list[PastAttempt], step_end: int | None, decision: Decision
) -> None:
    assert judge(Facts(1, (RAISED,), step_end=step_end, history=history)).decision is decision


def test_a_failure_in_the_step_after_a_checkpoint_is_at_the_checkpoints_step() -> None:
    """No step is reported then, only the step from which the attempt began."""
    again = replace(crashed(None), step_start=90)
    facts = Facts(1, (RAISED,), step_start=90, history=[crashed(90), again])
    assert judge(facts).decision is Decision.GIVE_UP
    assert judge(replace(facts, step_start=None)).decision is Decision.RESTART


def test_time_limits_are_free_while_steps_are_gained() -> None:
    links = [PastAttempt("timeout", "requeue", 100 * (i + 1)) for i in range(20)]
    assert judge(replace(CLEAN, stop=StopReason.CLOCK, step_end=2100, history=links)).decision is Decision.REQUEUE
    stuck = [*links, PastAttempt("timeout", "requeue", 2000)]
    ending = judge(replace(CLEAN, stop=StopReason.CLOCK, step_end=2000, history=stuck))
    assert (ending.cause, ending.decision) == (Cause.TIMEOUT, Decision.GIVE_UP)
    assert "cluster.time_min" in ending.line


def test_a_foreign_script_tells_no_steps_and_has_all_its_failures_and_time_limits() -> None:
    facts = Facts(1, (RAISED,), is_script=True, history=[crashed(None)] * 3)
    assert judge(facts).decision is Decision.RESTART
    assert judge(replace(facts, history=[crashed(None)] * 4)).decision is Decision.GIVE_UP
    links = [PastAttempt("timeout", "requeue", None)] * 20
    assert judge(replace(CLEAN, stop=StopReason.CLOCK, is_script=True, history=links)).decision is Decision.REQUEUE


def test_requeues_have_a_budget() -> None:
    history = [PastAttempt("preempted", "requeue", i) for i in range(3)]
    facts = replace(CLEAN, slurm=JobOutcome.PREEMPTED, history=history)
    assert judge(replace(facts, budgets=Budgets(max_requeues=4))).decision is Decision.REQUEUE
    ending = judge(replace(facts, budgets=Budgets(max_requeues=3)))
    assert (ending.cause, ending.decision) == (Cause.PREEMPTED, Decision.GIVE_UP)
    assert ending.line.endswith("given up after 3 requeues without a new checkpoint (retry.max_requeues: 3)")


def test_requeues_are_free_while_steps_are_saved() -> None:
    """However few steps those are: a run does not choose how often it is preempted."""
    saved, in_vain = (
        PastAttempt("preempted", "requeue", 10, gained_s=gained_s, lost_s=300.0) for gained_s in (1.0, 0.0)
    )
    facts = replace(CLEAN, slurm=JobOutcome.PREEMPTED, budgets=Budgets(max_requeues=2), lost_s=300.0)
    assert judge(replace(facts, history=[saved] * 200)).decision is Decision.REQUEUE
    assert judge(replace(facts, history=[saved, in_vain, in_vain], gained_s=1.0)).decision is Decision.REQUEUE
    assert judge(replace(facts, history=[in_vain, saved, in_vain])).decision is Decision.REQUEUE
    assert judge(replace(facts, history=[saved, in_vain, in_vain])).decision is Decision.GIVE_UP
    assert judge(replace(facts, budgets=Budgets(max_requeues=0), gained_s=1.0)).decision is Decision.GIVE_UP


def test_whoever_was_killed_comes_before_those_who_lost_their_peer() -> None:
    assert first_failure((PEER, KILLED, EXITED)) is KILLED
    assert first_failure((PEER, RAISED, EXITED)) is RAISED
    assert first_failure((EXITED,)) is EXITED
    assert first_failure(()) is None


def test_the_first_failure_of_a_hang_is_the_rank_that_the_others_waited_for() -> None:
    behind = RankFailure(13, "node07", "waiting for data, 212 s; 31 others in all_reduce", 9.0)
    ending = judge(Facts(137, (KILLED, RAISED), hang=behind))
    assert ending.first_failure is behind
    what = "rank 13 on node07: waiting for data, 212 s; 31 others in all_reduce"
    assert ending.line == f"{what}; restart after failure 1 of 4"
    assert ending.suspect is None  # it waits for what its program asked for
    assert judge(Facts(137, (KILLED,), hang=replace(behind, blames_node=True))).suspect == "node07"
    assert judge(Facts(137, (KILLED,), hang=behind, history=[crashed(None)] * 4)).cause is Cause.HANG


MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0
#: An attempt that failed and left no new checkpoint, one that gained more than it lost, and one that gained less.
VAIN = PastAttempt("crashed", "restart", 990, step_saved=900, lost_s=HOUR)
RICH = PastAttempt("crashed", "restart", 1290, step_saved=1200, gained_s=10 * HOUR, lost_s=HOUR)
POOR = PastAttempt("crashed", "restart", 1290, step_saved=1200, gained_s=MINUTE, lost_s=10 * MINUTE)


def fail(history: list[PastAttempt], past: PastAttempt, budgets: Budgets = Budgets()) -> tuple[Decision, str]:  # noqa: B008  # a value
    """Return the verdict on one more failure after ``history``."""
    facts = Facts(
        1,
        (RAISED,),
        step_end=past.step_end,
        step_saved=past.step_saved,
        gained_s=past.gained_s,
        lost_s=past.lost_s,
        history=history,
        budgets=budgets,
    )
    ending = judge(facts)
    what, _, budget = ending.line.partition("; ")
    assert what == "rank 1 on node1: ValueError: boom"
    return ending.decision, budget


def at(step_end: int, past: PastAttempt = VAIN) -> PastAttempt:
    return replace(past, step_end=step_end)


def test_a_failure_is_free_if_the_attempt_gained_more_than_it_lost() -> None:
    free = "restart from step 1200, free: the attempt gained more time than it lost"
    assert fail([], RICH) == (Decision.RESTART, free)
    assert fail([at(1000 + i, RICH) for i in range(50)], RICH) == (Decision.RESTART, free)
    assert fail([], POOR)[1] == "restart after failure 1 of 4"
    assert fail([at(1250 + 10 * i, POOR) for i in range(4)], POOR) == (
        Decision.GIVE_UP,
        "given up after 5 failures (retry.max_failures: 4)",
    )


def test_failures_that_cost_more_are_counted_since_the_run_made_up_for_them() -> None:
    early = [at(980), at(985)]
    assert fail([*early, RICH], at(1280))[1] == "restart after failure 1 of 4 since step 1200"
    assert fail([*early, RICH, at(1280)], at(1270))[1] == "restart after failure 2 of 4 since step 1200"
    late = [at(1250 + 5 * i) for i in range(4)]
    assert fail([*early, RICH, *late], at(1230)) == (
        Decision.GIVE_UP,
        "given up after 5 failures since step 1200 (retry.max_failures: 4)",
    )


def test_a_gain_smaller_than_earlier_losses_is_free_and_resets_nothing() -> None:
    little = replace(RICH, gained_s=90 * MINUTE, lost_s=MINUTE)
    history = [at(980), at(985), little]
    assert fail(history[:2], little)[0] is Decision.RESTART
    assert fail(history, at(1280))[1] == "restart after failure 3 of 4"
    assert fail([*history, little], at(1280))[1] == "restart after failure 1 of 4 since step 1200"


def test_a_preempted_attempts_gain_pays_for_failures_and_its_loss_is_no_fault() -> None:
    preempted = replace(RICH, cause="preempted", decision="requeue")
    assert fail([at(980), preempted], at(1280))[1] == "restart after failure 1 of 4 since step 1200"
    in_vain = replace(VAIN, cause="preempted", decision="requeue", lost_s=DAY)
    assert fail([at(980), in_vain, RICH], at(1280))[1] == "restart after failure 1 of 4 since step 1200"


def test_without_any_failure_allowed_none_is_free() -> None:
    assert fail([], RICH, Budgets(max_failures=0)) == (Decision.GIVE_UP, "given up (retry.max_failures: 0)")


def attempt_of(
    since: int, saved_before: int, life_s: float, start_up_s: float, step_s: float, every: int
) -> PastAttempt:
    """Return an attempt that begins at step ``since`` and is killed after ``life_s``. It saves every ``every``
    steps."""
    made = int(max(0.0, life_s - start_up_s) / step_s)
    step_end = since + made if made else None
    saved = max(saved_before, (since + made) // every * every)
    report = RunProgress(step_start=since, step=step_end, spent={"training": made * step_s})
    gained_s = goodput.gained_s(report, saved, saved_before)
    place = {"step_start": None if life_s < start_up_s else since, "step_saved": saved}
    return PastAttempt("crashed", "restart", step_end, **place, gained_s=gained_s, lost_s=life_s - gained_s)  # type: ignore[arg-type]


def until_given_up(nodes: int, dice: random.Random, minutes: int = 30, days: float = 30) -> float | None:
    """Return the seconds until a randomly failing job is given up. None if it lives for ``days``.

    It fails 0.28 times a day and 100 nodes, the rate that the field has published, and saves every ``minutes``.
    It needs 5 min to start and makes a step in 10 s.
    """
    history: list[PastAttempt] = []
    now_s, saved = 0.0, 0
    while now_s < days * DAY:
        life_s = dice.expovariate(0.28 * nodes / 100 / DAY)
        past = attempt_of(saved, saved, life_s, start_up_s=5 * MINUTE, step_s=10.0, every=6 * minutes)
        now_s, saved = now_s + life_s, past.step_saved or 0
        facts = Facts(1, (RAISED,), step_start=past.step_start, step_end=past.step_end, step_saved=past.step_saved)
        facts = replace(facts, gained_s=past.gained_s, lost_s=past.lost_s, history=history)
        if judge(facts).decision is Decision.GIVE_UP:
            return now_s
        history.append(past)
    return None


@pytest.mark.parametrize("months", [20, pytest.param(100, marks=pytest.mark.soak)])
def test_a_job_on_1000_nodes_is_not_given_up_for_the_failures_that_such_a_job_has(months: int) -> None:
    """Before, it was given up after 38 hours."""
    for seed in range(months):
        assert until_given_up(1000, random.Random(seed)) is None, seed


@pytest.mark.parametrize(
    ("start_up_s", "life_s", "is_ended"),
    [(10 * MINUTE, 10 * MINUTE + 1, True), (3.0, 33.0, False), (3.0, 6.5, True), (0.0, 30.0, False)],
    ids=["one step for 10 minutes", "half a minute for 3 s", "as much lost as gained", "nothing lost"],
)
def test_a_job_that_keeps_crashing_continues_only_while_it_gains_more_than_it_loses(
    start_up_s: float, life_s: float, is_ended: bool
) -> None:
    history: list[PastAttempt] = []
    for _ in range(200):
        since = history[-1].step_saved or 0 if history else 0
        past = attempt_of(since, since, life_s, start_up_s, step_s=1.0, every=1 if is_ended else 10)
        if fail(history, past)[0] is Decision.GIVE_UP:
            break
        history.append(past)
    assert len(history) == (4 if is_ended else 200)


LOST_AT_MOST_S = 100
FAILURES = st.tuples(st.integers(0, 20) | st.just(0), st.integers(1, LOST_AT_MOST_S) | st.just(LOST_AT_MOST_S))


@settings(max_examples=300, deadline=None)
@given(st.lists(FAILURES, min_size=10, max_size=60), st.integers(1, 5))
def test_in_any_pattern_failures_before_the_last_cost_no_more_than_was_gained(
    pattern: list[tuple[int, int]], max_failures: int
) -> None:
    history: list[PastAttempt] = []
    for index, (gained_s, lost_s) in enumerate(pattern):
        past = PastAttempt("crashed", "restart", 1 + index, step_saved=index, gained_s=gained_s, lost_s=lost_s)
        decision, _ = fail(history, past, Budgets(max_failures=max_failures))
        history.append(past)
        gained, lost = sum(past.gained_s for past in history), sum(past.lost_s for past in history)
        assert lost <= gained + (max_failures + 1) * LOST_AT_MOST_S
        if decision is Decision.GIVE_UP:
            return


HOSTS = ("node1", "node1", "node2", "node2")


def test_a_node_that_cannot_start_ranks_is_unfit_unless_most_nodes_cannot() -> None:
    facts = Facts(0, (UNSTARTED,), slurm=JobOutcome.RUNNING)
    assert unfit_nodes(facts, HOSTS) == {"node2"}
    everywhere = (UNSTARTED, replace(UNSTARTED, rank=0, host="node1"))
    assert unfit_nodes(replace(facts, failures=everywhere), HOSTS) == set()
    assert unfit_nodes(facts, ("node2",)) == set()
    line = judge(replace(facts, failures=everywhere)).line
    what = "rank 1 on node2: could not be started: Slurmd could not connect IO"
    assert line == f"{what}; restart after failure 1 of 4"


def test_no_node_is_unfit_in_a_job_that_ends_or_after_two_requeues_in_vain() -> None:
    facts = Facts(0, (UNSTARTED,), slurm=JobOutcome.RUNNING)
    for disturbed in (replace(facts, slurm=JobOutcome.PREEMPTED), replace(facts, stop=StopReason.SIGNAL)):
        assert unfit_nodes(disturbed, HOSTS) == set()
    in_vain = PastAttempt("node_failure", "requeue", None)
    assert unfit_nodes(replace(facts, history=[in_vain]), HOSTS) == {"node2"}
    assert unfit_nodes(replace(facts, history=[in_vain] * 2), HOSTS) == set()


def blamed(host: str, step_end: int | None = None) -> list[PastAttempt]:
    """Return two attempts that ``host`` ended. After the second it was put out of use."""
    first = PastAttempt("crashed", "restart", step_end, suspect=host)
    return [first, PastAttempt("node_failure", "restart", step_end, suspect=host)]


def test_an_attempt_for_which_a_node_is_condemned_is_no_fault_of_the_run() -> None:
    """Before, the attempt that condemned the node also ended the run. The spare was never used."""
    facts = Facts(137, (KILLED,), slurm=JobOutcome.RUNNING, history=blamed("node2")[:1])
    assert judge(facts).decision is Decision.GIVE_UP
    ending = judge(replace(facts, condemned="node2", can_go_on=True))
    assert (ending.cause, ending.decision, ending.suspect) == (Cause.NODE_FAILURE, Decision.RESTART, "node2")
    assert "caused by node node2" in ending.line


def test_what_a_condemned_node_ended_before_counts_no_more() -> None:
    facts = Facts(1, (RAISED,), slurm=JobOutcome.RUNNING, history=blamed("node2"))
    assert judge(facts).line.endswith("restart after failure 1 of 4")
    assert judge(replace(facts, history=[*blamed("node2"), crashed(None)])).decision is Decision.GIVE_UP


def test_a_second_node_in_a_row_is_not_believed_to_be_the_cause() -> None:
    history = [*blamed("node2"), PastAttempt("crashed", "restart", None, suspect="node3")]
    facts = Facts(137, (replace(KILLED, host="node3"),), condemned="node3", can_go_on=True, history=history)
    assert judge(facts).decision is Decision.GIVE_UP
    progress = [*blamed("node2"), PastAttempt("crashed", "restart", 10, suspect="node3")]
    assert judge(replace(facts, history=progress)).cause is Cause.NODE_FAILURE


def test_a_node_reused_for_lack_of_others_does_not_excuse_the_run_for_ever() -> None:
    again = PastAttempt("crashed", "restart", None, suspect="node2")
    facts = Facts(137, (KILLED,), history=[*blamed("node2"), again])
    assert judge(facts).decision is Decision.GIVE_UP


def test_a_device_error_comes_before_the_others_exceptions_and_casts_suspicion() -> None:
    device = replace(RAISED, rank=2, host="node2", time=12.0, blames_node=True)
    ending = judge(Facts(1, (PEER, RAISED, device)))
    assert (ending.first_failure, ending.suspect) == (device, "node2")
    assert judge(Facts(1, (PEER, RAISED))).suspect is None


def test_a_run_is_said_to_go_on_from_a_checkpoint_only_if_there_is_one() -> None:
    preempted = Facts(143, slurm=JobOutcome.PREEMPTED, step_start=0, step_end=40)
    assert judge(preempted).line == "preempted at step 40; no checkpoint was found on disk"
    assert judge(replace(preempted, step_saved=30)).line == "preempted at step 40; continues from the last checkpoint"
    assert judge(replace(preempted, is_script=True)).line.endswith("; the script is started again")
    assert judge(replace(preempted, is_script=True, stop=StopReason.USER)).line == "stopped as asked at step 40"


@pytest.mark.parametrize(
    ("stop", "slurm", "has_advice"),
    [
        (StopReason.USER, JobOutcome.RUNNING, True),
        (StopReason.CLOCK, JobOutcome.RUNNING, True),
        (StopReason.SIGNAL, JobOutcome.PREEMPTED, False),
        (StopReason.SIGNAL, JobOutcome.RUNNING, False),
    ],
)
def test_a_script_that_was_killed_while_it_saved_is_said_to_be_so(
    stop: StopReason, slurm: JobOutcome, has_advice: bool
) -> None:
    line = judge(Facts(137, is_script=True, stop=stop, slurm=slurm, killed_after_s=295.4)).line
    assert "; killed 295 s after SIGTERM: what it was saving may be incomplete" in line
    assert ("cluster.save_before_limit_s gives it more time" in line) == has_advice


def test_a_move_says_which_node_was_left_and_why_and_costs_nothing() -> None:
    line = "moved off node2: drained: new fan by root; stopped at step 150, checkpoint saved"
    assert judge(MOVING).line == line
    moves = [PastAttempt("moved", "restart", 150, step_start=150, step_saved=150, lost_s=20.0)] * 9
    budgets = Budgets(max_failures=1, max_requeues=0, no_progress_attempts=1)
    assert judge(replace(MOVING, history=moves, budgets=budgets)).decision is Decision.RESTART
    later = Facts(137, (KILLED,), step_start=150, step_end=160, history=moves, budgets=replace(budgets, max_failures=1))
    assert "failure 1 of 1" in judge(later).line


NODES = ("node1", "node2", "node3", "node4")


@pytest.mark.parametrize(
    ("links", "suspect"),
    [
        ((("node2", "node3"), ("node4", "node3")), "node3"),
        ((("node2", "node3"), ("node2", "node4"), ("node1", "node2")), "node2"),
        ((("node2", "node3"), ("node3", "node2")), "node3"),
        ((("node3", "node1"),), "node3"),
        ((("node1", "node2"), ("node3", "node4")), None),
        ((("node1", "node2"), ("node2", "node3"), ("node3", "node1")), None),
        ((), None),
    ],
    ids=["one has two", "one has three", "both ways", "the batch host", "two apart", "a ring", "none"],
)
def test_a_node_at_an_end_of_all_failed_connections_is_suspect_and_both_are_named(
    links: tuple[tuple[str, str], ...], suspect: str | None
) -> None:
    ending = judge(Facts(1, (RAISED,), cut_links=links, hosts=NODES))
    assert ending.suspect == suspect
    assert all(f"{host} to {peer}" in ending.line for host, peer in links)
    assert ("no connection from" in ending.line) == bool(links)


def test_a_line_names_a_few_of_many_connections() -> None:
    links = tuple((f"node{n}", "node9") for n in range(8))
    hosts = [f"node{n}" for n in range(10)]
    line = judge(Facts(1, (RAISED,), cut_links=links, hosts=hosts)).line
    assert "node3 to node9 and 4 more; " in line
    assert "node4" not in line


GAIN = [*[at(900 + i) for i in range(10)], replace(RICH, cause="preempted", decision="requeue", gained_s=99 * DAY)]


def test_a_large_gain_pays_for_two_usual_failures_and_not_for_all_that_follow() -> None:
    assert fail(GAIN, at(1280))[1] == "restart after failure 0 of 4 since step 900"
    assert fail([*GAIN, at(1280), at(1270)], at(1260))[1] == "restart after failure 2 of 4 since step 900"


def test_a_failure_much_shorter_than_usual_counts_in_spite_of_a_gain() -> None:
    short = replace(VAIN, lost_s=60.0)
    assert fail([*GAIN, at(1280, short)], at(1270, short))[1] == "restart after failure 2 of 4 since step 1200"


def test_the_first_failure_is_kept_where_a_lost_node_requeues_the_job() -> None:
    lost = Facts(1, (PEER, KILLED), slurm=JobOutcome.NODE_FAILED, lost_nodes=("node2",))
    assert (judge(lost).decision, judge(lost).first_failure) == (Decision.REQUEUE, KILLED)
    # A preemption kills the ranks, too.
    assert judge(replace(lost, slurm=JobOutcome.PREEMPTED, lost_nodes=())).first_failure is None


BAD_SHAPE = RankFailure(1, "node1", "ValueError: 5 rows", 10.5, traceback="Traceback ...", where="train.py:9 in step")


def before(how: str = BAD_SHAPE.how, where: str | None = BAD_SHAPE.where, **more: object) -> PastAttempt:
    """Return an attempt that an exception ended."""
    failure = FirstFailure(1, "node1", how, where)
    known: dict[str, Any] = {"step_start": 100, "step_end": 150, "lost_s": 9.0, **more}
    return PastAttempt("crashed", "restart", failure=failure, **known)


@pytest.mark.parametrize(
    ("failure", "history", "step_end", "decision"),
    [
        (BAD_SHAPE, [], 150, Decision.RESTART),  # once may be chance
        (BAD_SHAPE, [before()], 150, Decision.GIVE_UP),
        (BAD_SHAPE, [before(step_end=None, step_start=None)], None, Decision.GIVE_UP),  # no start, in a run with steps
        (BAD_SHAPE, [before()], 151, Decision.RESTART),  # a step between
        (BAD_SHAPE, [before()], 120, Decision.RESTART),  # at another step
        (BAD_SHAPE, [before(), PastAttempt("preempted", "requeue", 150)], 150, Decision.RESTART),  # not the one before
        (BAD_SHAPE, [before(where="train.py:8 in step")], 150, Decision.RESTART),
        (BAD_SHAPE, [before(how="KeyError: 5")], 150, Decision.RESTART),
        (replace(BAD_SHAPE, how="ValueError: at 0xfe"), [before(how="ValueError: at 0x1")], 150, Decision.GIVE_UP),
        (replace(BAD_SHAPE, where=None), [before(where=None)], 150, Decision.RESTART),  # an exit code says nothing
        *(
            (replace(BAD_SHAPE, how=how), [before(how=how)], 150, Decision.RESTART)
            for how in (
                "RuntimeError: Connection closed by peer",
                "DistBackendError: NCCL error",
                "OSError: [Errno 116] Stale file handle",
                "RuntimeError: CUDA error: unspecified launch failure",
                "TimeoutError: timed out",
            )
        ),
    ],
)
def test_the_same_error_at_the_same_line_is_not_tried_a_third_time(
    failure: RankFailure, history: list[PastAttempt], step_end: int | None, decision: Decision
) -> None:
    saved = PastAttempt("preempted", "requeue", 150, step_start=0)
    start = None if step_end is None else 100
    facts = Facts(1, (PEER, failure), step_start=start, step_end=step_end, history=[saved, *history])
    verdict = judge(replace(facts, budgets=Budgets(no_progress_attempts=9)))
    assert verdict.decision is decision, verdict.line
    assert ("same error at the same line" in verdict.line) is (decision is Decision.GIVE_UP)


@pytest.mark.parametrize(("took_s", "decision"), [(20.0, Decision.GIVE_UP), (4000.0, Decision.RESTART)])
def test_a_script_that_fails_alike_twice_at_once_is_given_up(took_s: float, decision: Decision) -> None:
    past = before(step_start=None, step_end=None, lost_s=took_s)
    facts = Facts(1, (BAD_SHAPE,), is_script=True, lost_s=took_s, history=[past])
    assert judge(facts).decision is decision


def test_what_the_jobs_own_code_gave_wrongly_is_not_tried_again() -> None:
    verdict = judge(Facts(1, (replace(BAD_SHAPE, comes_again=True),)))
    assert (verdict.decision, verdict.line.endswith("would fail again unchanged")) == (Decision.GIVE_UP, True)
