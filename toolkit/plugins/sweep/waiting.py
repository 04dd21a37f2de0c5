"""Has a run wait for others when its job has started, before its first attempt."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from queue import Empty

from toolkit.base import logs, outages
from toolkit.base.process_limits import limits
from toolkit.files.run_files import DependencyRecord, RunState, dependency_sentence
from toolkit.plugins.sweep import awaited
from toolkit.plugins.sweep.awaited import Prerequisites
from toolkit.run.attempt.journal import write_ended
from toolkit.run.attempt.verdict import Cause, Decision, Verdict
from toolkit.run.job.slurm_job import JobOutcome
from toolkit.run.records import user_requests
from toolkit.run.records.user_requests import Intent
from toolkit.run.requeue.requeue import JobRequeue
from toolkit.run.supervise.rank_stop import StopAsked, is_for_limit
from toolkit.run.supervise.supervisor_components import Context
from toolkit.slurm import shared_queue
from toolkit.slurm.commands import Slurm

_SILENT = "Slurm does not report the states of the jobs that this one waits for"

log = logs.get(__name__)


def wait_for_other_runs(context: Context, record: DependencyRecord) -> Verdict | None:
    """Wait for the runs of ``record``, and return None when this run may start, or a user has ended it.

    Else return how the job ends without an attempt, which is a failure if one of the other runs did not complete. A job
    of Slurm does not wait for long: it goes back into the queue until the others' current jobs have ended. On this
    machine the process waits.
    """
    requeue = context.requeue
    lost_since: float | None = None
    while not context.asked():
        stands = _look(context, record)
        if stands is not None and stands.is_met:
            log.info("%s completed: this run starts", " and ".join(record.names()))
            outages.retry_write(lambda: context.run.after_path.unlink(missing_ok=True), context.run.path, "removed")
            return None
        if stands is not None and stands.ended:
            return _fail(context, stands.ended[0])
        # A result may be on its way through the shared file system when its job has ended.
        is_lost = stands is not None and bool(stands.lost)
        lost_since = (lost_since or time.monotonic()) if is_lost else None
        if stands is not None and lost_since is not None and time.monotonic() - lost_since >= limits().files_lag_s:
            return _fail(context, stands.lost[0])
        if requeue is not None and (stands is None or stands.jobs):
            return _wait_in_queue(context, requeue, record, stands)
        # A signal to end may come meanwhile.
        with contextlib.suppress(Empty):
            event = context.events.get(timeout=limits().look_at_awaited_every_s)
            if isinstance(event, StopAsked) and not is_for_limit(context, event):
                if requeue is not None:
                    return _wait_in_queue(context, requeue, record, stands)
                user_requests.record_intent(context.run, Intent.STOP)
        _note(context, RunState.QUEUED, record)
    return None


def _look(context: Context, record: DependencyRecord) -> Prerequisites | None:
    """Return the states of the other runs; None where Slurm does not answer."""
    if context.job.slurm is not None:
        look = partial(awaited.prerequisites, record, context.job.slurm.show_jobs)
        return outages.retry_slurm(look, _SILENT, wait_s=limits().give_up_after_s)
    # This process may wait for days: Slurm is asked seldom, and all of the user's processes share its answer.
    queue = shared_queue.of_user(Slurm())
    look = partial(awaited.prerequisites, record, partial(queue.show_jobs, every_s=limits().ask_slurm_every_s))
    return outages.retry_slurm(look, _SILENT, wait_s=0.0)


def _note(context: Context, state: RunState, record: DependencyRecord) -> None:
    why = dependency_sentence(record.names())
    with contextlib.suppress(OSError):  # a disk that fails for a moment must not end the run
        status = context.run.status()
        context.run.write_status(status.replace(state=state, why=why, updated=time.time()))


def _fail(context: Context, why: str) -> Verdict:
    line = f"{awaited.NEVER_STARTED}: {why}, then `toolkit resume {context.run.id}`"
    log.error("%s", line)
    outages.retry_write(lambda: write_ended(context.run, RunState.FAILED, line), context.run.path)
    return Verdict(Cause.CANCELLED, Decision.GIVE_UP, line)


def _wait_in_queue(
    context: Context, requeue: JobRequeue, record: DependencyRecord, stands: Prerequisites | None
) -> Verdict:
    """Give the nodes back until the others' current jobs have ended."""
    run, jobs = context.run, [] if stands is None else list(stands.jobs)
    log.info("%s: back into the queue after job %s", dependency_sentence(record.names()), ", ".join(jobs) or "?")
    context.prepare_requeue()
    _note(context, RunState.REQUEUED, record)
    seen = requeue.bring_back(jobs)
    if seen is JobOutcome.REQUEUED:
        return Verdict(Cause.STOPPED, Decision.REQUEUE, "not its turn yet")
    state = user_requests.end_state(context.asked()) if seen is JobOutcome.CANCELLED else RunState.STOPPED
    why = f"{state} while it waited" if seen is JobOutcome.CANCELLED else requeue.why_not_back
    why += f": it {dependency_sentence(record.names())}; `toolkit resume {run.id}` has it wait again"
    outages.retry_write(lambda: write_ended(run, state, why), run.path)
    return Verdict(Cause.STOPPED, Decision.FINISH, why)
