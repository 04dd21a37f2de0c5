"""What comes before a supervisor starts anything.

The run becomes this job's; the attempt is closed that was left behind when its supervisor died, or its node; the runs
are waited for that must complete before it (`toolkit.run.records.awaited`).
"""

from __future__ import annotations

import contextlib
import time
from contextlib import suppress
from functools import partial
from queue import Empty

from toolkit import config as configs
from toolkit.base import fsio, logs, outages
from toolkit.base.errors import ToolkitError
from toolkit.files import rundir
from toolkit.files.run_files import AfterRecord, RunState
from toolkit.nodes.start.store import refuse_too_many_ranks
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.facts import Cause, Decision, Stop, Verdict
from toolkit.run.attempt.journal import write_ended
from toolkit.run.attempt.verdict import requeues_in_vain
from toolkit.run.job.slurm_job import JobFate
from toolkit.run.records import after, awaited, stop_request
from toolkit.run.records.awaited import Outlook
from toolkit.run.records.stop_request import Intent
from toolkit.run.records.submitted_run import ASK_SLURM_EVERY_S, FILES_LAG_S
from toolkit.run.requeue.requeue import JobRequeue
from toolkit.run.supervise.context import Context
from toolkit.run.supervise.stop_path import Signalled, is_slurms_signal
from toolkit.slurm import shared_queue
from toolkit.slurm.commands import Slurm

LOOK_EVERY_S = 1.0
_SILENT = "Slurm does not say how the jobs stand that are waited for"

log = logs.get(__name__)


def has_ended(context: Context, earlier_death: str | None) -> bool:
    """True if the run was over already, and Slurm has restarted its job by mistake.

    Slurm 24.11 does so after a preemption with grace time. It remembers that the job is to be requeued when it ends.
    Our own requeue does not clear that, so Slurm acts on it at the next end, days later. A user who wants the run to go
    on calls `toolkit resume`, which removes the result first. An unreadable result may be that of a cancelled run.
    """
    run, result = context.run, context.run.result()
    restarted = context.allocation.restart_count > 0 or earlier_death is not None
    # Whether one that was stopped or cancelled goes on is decided by the request for it.
    if not restarted or result is None or result.state.is_cut_short:
        return False
    log.info("run %s has ended before (%s): nothing to do in this restart", run.id, result.state)
    with suppress(OSError):  # a full disk must not have the job of a run that is over requeued
        run.write_status(run.status().replace(state=result.state))
    return True


def take_run(context: Context) -> None:
    """Record the job's size and id in the run. Remove the result of an earlier start."""
    run, config, allocation = context.run, context.config, context.allocation
    cluster = config.cluster
    used = allocation.without(cluster.spare_nodes)
    refuse_too_many_ranks(used.world_size)
    if context.job.slurm is not None:
        if not context.is_foreign and not configs.is_loop(config.job, run.code):
            configs.check_batch(config, used.world_size)
        cluster.nodes = len(used.hosts)
        cluster.tasks_per_node = max(allocation.tasks)
        cluster.cpus_per_task = allocation.cpus_per_task
        # No error: some sites do not have Slurm count their GPUs. The ranks will see.
        if cluster.gpus_per_node and not allocation.gpus_per_node:
            log.warning(
                "cluster.gpus_per_node: the config asks for %d, and Slurm gives this job none", cluster.gpus_per_node
            )
        # Ranks that see no GPU are refused. A job that has whole nodes, and whatever is in them, may train on CPUs.
        if allocation.gpus_per_node and (allocation.asks_for_gpus or cluster.gpus_per_node):
            cluster.gpus_per_node = allocation.gpus_per_node
        outages.persist(lambda: fsio.write_atomic(run.config, configs.dump_config(config)), run.config)
        # An sbatch script that Slurm starts again knows only its job id.
        key = allocation.job_key
        if key is not None:
            outages.persist(lambda: rundir.remember_job(run, key), run.path)
    outages.persist(run.clear_result, run.path)


def close_interrupted(context: Context, earlier_death: str | None) -> None:
    """Write the line of an attempt whose supervisor died without writing it. A preempted one would have had TERM.

    ``earlier_death`` says how that supervisor died, if it was one of this start of the job. Raises ToolkitError when
    the run has been requeued too often without a new checkpoint.
    """
    run, job, nodes = context.run, context.job, context.nodes
    status = run.left_over()
    if status is None:
        return
    left = Attempt.of_status(status, context.allocation)
    gone = job.unreachable(left.plan.hosts) if job.slurm else set()
    left.lost_nodes = lost = gone | nodes.given_up(left.started)  # they may be back
    decision = Decision.REQUEUE
    is_here = status.cluster in ("", context.allocation.cluster)  # another cluster's number is another job here
    # The most certain reason first: what the guard saw, lost nodes, a stop or preemption, and else a node failure.
    if earlier_death is not None:
        cause, why, decision = Cause.CRASHED, earlier_death, Decision.RESTART
        nodes.note_used(left.plan)  # the state of its ranks is in these nodes' memory
    elif lost:
        cause, why = Cause.NODE_FAILURE, f"lost {', '.join(sorted(lost))}"
    elif status.stop not in (None, Stop.MOVE) or (is_here and job.was_preempted(status.job_id)):
        cause, why = Cause.PREEMPTED, "taken away before its supervisor could say how it ended"
    elif status.why is not None:  # its guard has given up
        cause, why = Cause.NODE_FAILURE, status.why
    else:
        cause, why = Cause.NODE_FAILURE, "ended without a word: a node failure, a power cut, or SIGKILL"
    log.warning("attempt %d: %s", left.number, why)
    for host in gone:
        nodes.condemn(host, f"lost in attempt {left.number}")
    # The attempt ended, as far as is known, when its supervisor wrote last.
    left.left_over = status
    left.ended = time.time() if status.updated is None else status.updated
    context.journal.note_gain(left)
    outages.persist(lambda: context.journal.add(left, Verdict(cause, decision, why)), run.path)
    in_vain, limit = requeues_in_vain(context.journal.history()), context.config.retry.max_requeues
    if in_vain > limit:
        raise ToolkitError(f"{why}; given up after {in_vain - 1} requeues without a new checkpoint")


def wait_for_other_runs(context: Context) -> Verdict | None:
    """Wait for the other runs, and return None when this run may start.

    Also return None if a user has ended the run. Else return how the job ends without an attempt, which is a failure if
    one of the other runs did not complete. A job of Slurm does not wait for long: it goes back into the queue until the
    others' present jobs have ended. On this machine the process waits.
    """
    record, requeue = after.record_of(context.run), context.requeue
    lost_since: float | None = None
    while record is not None and not context.asked():
        stands = _look(context, record)
        if stands is not None and stands.is_met:
            log.info("%s completed: this run starts", " and ".join(after.names(record)))
            after.end(context.run)
            return None
        if stands is not None and stands.ended:
            return _fail(context, stands.ended[0])
        # A result may be on its way through the shared file system when its job has ended.
        is_lost = stands is not None and bool(stands.lost)
        lost_since = (lost_since or time.monotonic()) if is_lost else None
        if stands is not None and lost_since is not None and time.monotonic() - lost_since >= FILES_LAG_S:
            return _fail(context, stands.lost[0])
        if requeue is not None and (stands is None or stands.jobs):
            return _give_back(context, requeue, record, stands)
        # A signal to end may come meanwhile.
        with contextlib.suppress(Empty):
            event = context.events.get(timeout=LOOK_EVERY_S)
            if isinstance(event, Signalled) and not is_slurms_signal(context, event.number):
                if requeue is not None:
                    return _give_back(context, requeue, record, stands)
                stop_request.ask(context.run, Intent.STOP)
        _note(context, RunState.QUEUED, record)
    return None


def _look(context: Context, record: AfterRecord) -> Outlook | None:
    """Return how the other runs stand; None where Slurm does not answer."""
    if context.job.slurm is not None:
        show_jobs = context.job.slurm.show_jobs
        look = partial(awaited.outlook, record, show_jobs)
        return outages.ask(look, _SILENT, wait_s=outages.GIVE_UP_AFTER_S)
    # This process may wait for days: Slurm is asked seldom, and all of the user's processes share its answer.
    queue = shared_queue.of_user(Slurm())
    look = partial(awaited.outlook, record, partial(queue.show_jobs, every_s=ASK_SLURM_EVERY_S))
    return outages.ask(look, _SILENT, wait_s=0.0)


def _note(context: Context, state: RunState, record: AfterRecord) -> None:
    """Write into the status that the run waits, and for which runs."""
    status = context.run.status()
    why = after.sentence(after.names(record))
    with contextlib.suppress(OSError):  # a disk that fails for a moment must not end the run
        context.run.write_status(status.replace(state=state, why=why, updated=time.time()))


def _fail(context: Context, why: str) -> Verdict:
    line = f"{after.NEVER_STARTED}: {why}, then `toolkit resume {context.run.id}`"
    log.error("%s", line)
    outages.persist(lambda: write_ended(context.run, RunState.FAILED, line), context.run.path)
    return Verdict(Cause.CANCELLED, Decision.GIVE_UP, line)


def _give_back(context: Context, requeue: JobRequeue, record: AfterRecord, stands: Outlook | None) -> Verdict:
    """Give the nodes back, until the jobs have ended that the others have at present."""
    run, jobs = context.run, [] if stands is None else list(stands.jobs)
    log.info("%s: back into the queue after job %s", after.sentence(after.names(record)), ", ".join(jobs) or "?")
    context.prepare_requeue()
    _note(context, RunState.REQUEUED, record)
    seen = requeue.requeue(jobs)
    if seen is JobFate.REQUEUED:
        return Verdict(Cause.STOPPED, Decision.REQUEUE, "not its turn yet")
    state = stop_request.end_state(context.asked()) if seen is JobFate.CANCELLED else RunState.STOPPED
    why = f"{state} while it waited" if seen is JobFate.CANCELLED else "Slurm did not take it back while it waited"
    why += f": it {after.sentence(after.names(record))}; `toolkit resume {run.id}` has it wait again"
    outages.persist(lambda: write_ended(run, state, why), run.path)
    return Verdict(Cause.STOPPED, Decision.FINISH, why)
