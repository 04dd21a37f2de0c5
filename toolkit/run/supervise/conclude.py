"""How an attempt is concluded: what its ranks have left is read, it is judged, and the verdict is carried out.

The rules of the verdict are in `toolkit.run.attempt.verdict`. Here stands what they are given, and what follows.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from dataclasses import replace

from toolkit import hang
from toolkit.base import logs, outages, tracebacks
from toolkit.base.process_limits import limits
from toolkit.files import rundir
from toolkit.files.run_files import STOPPED_PHASE, RunState
from toolkit.run.attempt import error_files
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.verdict import (
    Budgets,
    Cause,
    Decision,
    Facts,
    RankFailure,
    Verdict,
    first_failure,
    has_completed,
    has_worked,
    judge,
    unfit_nodes,
)
from toolkit.run.job.slurm_job import JobOutcome
from toolkit.run.records import user_requests
from toolkit.run.records.user_requests import Intent
from toolkit.run.supervise import supervisor_components
from toolkit.run.supervise.attempt_loop import note_cut_link
from toolkit.run.supervise.node_care import NodeCare
from toolkit.run.supervise.supervisor_components import Context

#: Torch may be imported from a slow file server.
IMPORTS_S, LOOK_EVERY_S = 60.0, 0.1

#: Ends at which faulthandler prints the stacks.
_OF_FAULTHANDLER = re.compile("killed by SIG(?:ABRT|BUS|FPE|ILL|SEGV)")

log = logs.get(__name__)


def conclude(context: Context, attempt: Attempt, care: NodeCare) -> Verdict:
    """Judge an attempt whose ranks have ended, and carry out the verdict. Raises Overtaken.

    The ranks of an owner that was overtaken end because of that, and their end is not the run's: another one serves it.
    """
    context.claim.check()
    attempt.close()
    context.journal.note_gain(attempt)
    verdict = judge_attempt(context, attempt)
    if verdict.cause is Cause.COMPLETED and context.is_script:
        error = error_files.exception_at_end(context.run, attempt, context.config.secrets)
        if error:  # odd, with exit code 0
            hint = "its exit code was 0. A pipe (`| tee`) hides that of the program: `set -o pipefail`"
            verdict = replace(verdict, line=f"{verdict.line}, but {error}; {hint}")
    carry_out(context, attempt, verdict)
    if verdict.cause is Cause.MOVED:
        care.release_drained(attempt)
    # Last: a job that is being ended has only seconds.
    hang.remove_unused(context.run.attempt_logs(attempt.number))
    return verdict


def judge_attempt(context: Context, attempt: Attempt) -> Verdict:
    """Return the verdict, after checking what the ranks have left, the nodes and Slurm.

    A rank that hung, or was killed by a signal of unknown origin, makes its node suspect. The first time has no effect;
    the second excludes the node. If enough nodes are left then, the attempt does not count as the run's failure.
    """
    outages.retry_write(lambda: add_error_files(context, attempt), context.run.path, "read")
    # Blame no node for ranks that ended unreported if most nodes have such ranks.
    unreported = {failure.host for failure in attempt.failures if failure.blames_node and not failure.traceback}
    if len(unreported) > len({*attempt.rank_hosts}) / 2:
        attempt.replace_failures(replace(f, blames_node=f.blames_node and bool(f.traceback)) for f in attempt.failures)
    attempt.explain_by_stopped()
    note_lack_of_torch(context, attempt)
    note_recurring(context, attempt)
    job, nodes = context.job, context.nodes
    # A completed run needs no answer from Slurm. A cancelled one counts as cancelled, whatever Slurm says.
    outcome = JobOutcome.ABSENT
    if context.is_script or not has_completed(_facts(context, attempt, outcome)):
        is_cancelled = context.asked() is Intent.CANCEL
        outcome = JobOutcome.CANCELLED if is_cancelled else context.job.outcome(limits().give_up_after_s)
    if job.slurm is not None and attempt.silent_nodes:
        attempt.lose(job.unreachable(sorted(attempt.silent_nodes)))
    if outcome is JobOutcome.RUNNING:
        attempt.lose(job.lost_nodes(attempt.plan.hosts))
    # Slurm may have requeued the job for a node that did not answer then, and does now.
    if outcome is JobOutcome.REQUEUED:
        attempt.lose(job.unreachable(attempt.plan.hosts) | nodes.newly_bad(attempt.started))
    for node in attempt.lost_nodes:
        nodes.condemn(node, f"lost in attempt {attempt.number}")
    # Nodes that could not start ranks count as lost.
    for node in unfit_nodes(_facts(context, attempt, outcome), attempt.rank_hosts):
        nodes.condemn(node, f"ranks of attempt {attempt.number} could not be started there")
        attempt.lose([node])
    facts = _facts(context, attempt, outcome)
    verdict = judge(facts)
    if rundir.TRACE_VARIABLE in os.environ:  # `toolkit resume-check` kills ranks, which is no fault of a node
        verdict = replace(verdict, suspect=None)
    host = verdict.suspect
    if host is None or context.job.slurm is None:  # without Slurm there is no other node
        return verdict
    # A node that was suspected too often is excluded, and the attempt is judged again.
    count = 1 + sum(past.suspect == host for past in facts.history)
    return judge(replace(facts, condemned=host)) if context.nodes.suspect(host, count) else verdict


def add_error_files(context: Context, attempt: Attempt) -> None:
    """Read what failing ranks wrote about themselves: it tells more than an exit code, and is timed at its cause."""
    if context.is_script:
        attempt.replace_failures(error_files.complete_failures(context.run, attempt, context.config.secrets))
    reported: dict[int, RankFailure] = {}
    hosts = attempt.rank_hosts
    for failure in error_files.read_error_files(context.run.attempt_logs(attempt.number)):
        rank = failure.rank
        assert rank is not None
        if rank >= len(hosts):
            continue
        # torch's format has no host
        reported[rank] = replace(failure, host=hosts[rank]) if failure.host == "?" else failure
        if failure.unreached is not None:
            note_cut_link(context, attempt, hosts[rank], failure.unreached)
    # A rank's report replaces its exit code, but not the signal that killed it.
    kept = [failure for failure in attempt.failures if failure.rank not in reported or failure.by_signal]
    failures = [*kept, *reported.values()]
    first = first_failure(failures)
    if first is not None and first.by_signal and first.rank is not None and _OF_FAULTHANDLER.match(first.how):
        with suppress(OSError):
            tail = tracebacks.tail_of_file(context.run.rank_log(attempt.number, first.rank))
            failures[failures.index(first)] = replace(first, where=tracebacks.signal_frame(tail))
    attempt.replace_failures(failures)


def note_lack_of_torch(context: Context, attempt: Attempt) -> None:
    """Note that ranks could not be started where torch cannot be imported, if it can on another node of the attempt.

    The first node to fail may be known before another one has imported torch, which is waited for.
    """
    known = {} if context.agents is None else context.agents.has_torch
    hosts = {*attempt.plan.hosts}
    lacking = {failure.host for failure in attempt.failures if known.get(failure.host) is False} & hosts
    others = hosts - lacking
    deadline = time.monotonic() + IMPORTS_S
    # A signal or a user's request is more urgent.
    while lacking and not any(map(known.get, others)) and context.events.empty() and context.asked() is None:
        if others <= known.keys() or time.monotonic() >= deadline:
            break
        time.sleep(LOOK_EVERY_S)
    if any(map(known.get, others)):
        batch_host = attempt.rank_hosts.index  # the store is started there, with the node's first rank
        attempt.replace_failures(
            replace(failure, at_launch=True, rank=batch_host(failure.host) if failure.rank is None else failure.rank)
            if failure.host in lacking and failure.rank not in attempt.heard
            else failure
            for failure in attempt.failures
        )


def note_recurring(context: Context, attempt: Attempt) -> None:
    """Note the errors of a run that has never worked for which no restart helps.

    What a node may lack counts where rank 0 lacks it, and so does another node if there are several.
    """
    if has_worked(_facts(context, attempt, JobOutcome.ABSENT)):
        return
    kinds: dict[str, str | None] = {}
    recurring: dict[str, list[RankFailure]] = {"always": [], "on_node": []}
    for failure in attempt.failures:
        is_of_device = failure.blames_node and failure.traceback
        if failure.by_signal or failure.is_consequence or failure.at_launch or is_of_device:
            continue
        if failure.how not in kinds:
            kinds[failure.how] = supervisor_components.recurs(context.run, attempt.number, failure)
        recurring.get(kinds[failure.how] or "", []).append(failure)
    on_nodes = {failure.host for failure in recurring["on_node"]}
    is_common = len(on_nodes) >= min(2, len(context.allocation.hosts))
    is_common &= any(failure.rank == 0 for failure in recurring["on_node"])
    lasting = recurring["always"] + (recurring["on_node"] if is_common else [])
    attempt.replace_failures(
        replace(f, comes_again=True, blames_node=False) if f in lasting else f for f in attempt.failures
    )


def _facts(context: Context, attempt: Attempt, outcome: JobOutcome) -> Facts:
    assert attempt.exit_code is not None
    retry = context.config.retry
    return Facts(
        exit_code=attempt.exit_code,
        failures=tuple(attempt.failures),
        stopped_cleanly=_has_stopped_cleanly(context, attempt),
        stop=attempt.stop,
        killed_after_s=attempt.killed_after_s,
        vacated_nodes=tuple(f"{host}: {bad.why}" for host, bad in attempt.vacated_nodes.items()),
        slurm=outcome,
        lost_nodes=tuple(sorted(attempt.lost_nodes)),
        can_go_on=context.nodes.plan() is not None,
        has_result=attempt.result is not None,
        hang=attempt.hang,
        cut_links=tuple(sorted(attempt.cut_links)),
        hosts=attempt.plan.hosts,
        step_start=attempt.progress.step_start,
        step_end=attempt.progress.step,
        step_saved=attempt.step_saved,
        gained_s=attempt.gained_s,
        lost_s=attempt.lost_s,
        is_script=context.is_script,
        history=context.journal.history(),
        budgets=Budgets(retry.max_failures, retry.max_requeues, retry.no_progress_attempts),
    )


def _has_stopped_cleanly(context: Context, attempt: Attempt) -> bool:
    """True if all ranks have stopped, and what they had made is saved.

    The user's code may end with the same exit code. Rank 0 reports a stop when it is committed. Its last report may
    have been lost; then the checkpoint tells. Of a script nothing more is known.
    """
    if not attempt.stopped or attempt.failures or attempt.lost_nodes:
        return False
    saved, progress = attempt.step_saved or 0, attempt.progress
    is_saved = saved >= (progress.step or 0) and saved > (progress.step_start or 0)
    return context.is_script or progress.phase == STOPPED_PHASE or is_saved


def carry_out(context: Context, attempt: Attempt, verdict: Verdict) -> None:
    """Write how an attempt has ended. Then have the run come back if the verdict says so, else write its result."""
    run, journal = context.run, context.journal
    log.info("attempt %d: %s (%s): %s", attempt.number, verdict.cause, verdict.decision, verdict.line)
    context.note_usage(attempt, is_last=True)
    if verdict.decision is not Decision.RESTART:
        run.release_space()
    outages.retry_write(lambda: journal.add(attempt, verdict), run.path)
    if context.job.slurm is not None:
        supervisor_components.note_faults(run, attempt.nodes_at_fault(verdict.suspect))
    if verdict.decision is Decision.RESTART:
        journal.set_status(RunState.RESTARTING, attempt, why=verdict.line)
        supervisor_components.notify_meanwhile(run, context.config)
        return
    why = verdict.line
    if verdict.decision is Decision.REQUEUE:
        state = RunState.REQUEUED
    elif verdict.cause in (Cause.COMPLETED, Cause.STOPPED, Cause.CANCELLED):
        state = RunState(verdict.cause)
    else:
        state = RunState.FAILED
    journal.set_status(state, attempt, why=why, ended=time.time())
    # If Slurm does not bring the job back, the run ends here, with the reason in its result.
    if verdict.decision is Decision.REQUEUE:
        supervisor_components.notify_meanwhile(run, context.config, limits().notice_before_requeue_s)
        outcome = JobOutcome.UNKNOWN if context.requeue is None else context.requeue.bring_back()
        if outcome is JobOutcome.REQUEUED:
            return
        if outcome is JobOutcome.CANCELLED:
            state, why = user_requests.end_state(context.asked()), f"{why}; cancelled before it was requeued"
        else:
            why = f"{why}; but {'it has no job' if context.requeue is None else context.requeue.why_not_back}"
            state = RunState.STOPPED
        journal.set_status(state, attempt, why=why, ended=time.time())
    has_completed = state is RunState.COMPLETED

    def write() -> None:
        # What the run has used is on the same disk: it is read again as often as the result is written.
        journal.write_result(
            attempt, state, why, supervisor_components.efficiency(run, journal.closed_attempts, has_completed)
        )

    outages.retry_write(write, run.path)
    if not has_completed and (step := supervisor_components.next_step(run)):
        log.info("next: %s", step)
