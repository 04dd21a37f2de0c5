"""The end of an attempt: its verdict, and all that is written and asked of Slurm because of it."""

from __future__ import annotations

import time

from toolkit import logs
from toolkit.launch import outages
from toolkit.launch.job import node_history
from toolkit.launch.job.fate import JobFate
from toolkit.launch.record import stop_request
from toolkit.launch.record.journal import write_ended
from toolkit.launch.record.notify import notify
from toolkit.launch.supervise.attempt import Attempt
from toolkit.launch.supervise.context import Context
from toolkit.launch.supervise.facts import Cause, Decision, Verdict
from toolkit.launch.supervise.judging import judge_attempt
from toolkit.launch.watch.hang_investigation import remove_unused
from toolkit.launch.watch.node_care import NodeCare
from toolkit.run_files import RunState

log = logs.get(__name__)


def conclude(context: Context, attempt: Attempt, care: NodeCare) -> Verdict:
    """Judge an attempt whose ranks have ended, and record the verdict."""
    attempt.ended = time.time()
    context.journal.note_gain(attempt)
    verdict = judge_attempt(context, attempt)
    record(context, attempt, verdict)
    if verdict.cause is Cause.MOVED:
        care.give_back(attempt)
    # Last: a job that is being ended has only seconds.
    remove_unused(context.run.attempt_logs(attempt.number))
    return verdict


def record(context: Context, attempt: Attempt, verdict: Verdict) -> None:
    """Write how an attempt has ended, and what follows. Where the run is to be requeued, ask Slurm for it."""
    run, journal = context.run, context.journal
    log.info("attempt %d: %s (%s): %s", attempt.number, verdict.cause, verdict.decision, verdict.line)
    context.note_usage(attempt, is_last=True)
    outages.persist(lambda: journal.add(attempt, verdict), run.path)
    if context.job.slurm is not None:
        node_history.note(run, attempt.nodes_at_fault(verdict.suspect))
    if verdict.decision is Decision.RESTART:
        journal.set_status(RunState.RESTARTING, attempt, why=verdict.line)
        return
    state, why = _state(verdict), verdict.line
    journal.set_status(state, attempt, why=why, ended=time.time())
    # Ask Slurm to take the job back. If it does not, the run ends here, with the reason in its result.
    if verdict.decision is Decision.REQUEUE:
        seen = JobFate.UNKNOWN if context.requeue is None else context.requeue.requeue()
        if seen is JobFate.REQUEUED:
            return
        if seen is JobFate.CANCELLED:
            state, why = stop_request.end_state(context.asked()), f"{why}; cancelled before it was requeued"
        else:
            why = f"{why}; but Slurm did not take it back: `toolkit resume` goes on with it"
            state = RunState.STOPPED
        journal.set_status(state, attempt, why=why, ended=time.time())
    outages.persist(lambda: journal.write_result(attempt, state, why), run.path)


def end_before_start(context: Context) -> RunState:
    """Write the result of a run that a user ended before it started again; return its state."""
    state = stop_request.end_state(context.asked())
    outages.persist(lambda: write_ended(context.run, state, f"{state} before it started again"), context.run.path)
    notify(context.run)
    return state


def _state(verdict: Verdict) -> RunState:
    """Return the run's state after a verdict that ends the job."""
    if verdict.decision is Decision.REQUEUE:
        return RunState.REQUEUED
    if verdict.cause in (Cause.COMPLETED, Cause.STOPPED, Cause.CANCELLED):
        return RunState(verdict.cause)
    return RunState.FAILED
