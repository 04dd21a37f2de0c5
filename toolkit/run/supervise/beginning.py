"""What comes before a supervisor starts anything.

The run becomes this job's; the attempt is closed that was left behind when its supervisor died, or its node.
"""

from __future__ import annotations

from contextlib import suppress

from toolkit import config as configs
from toolkit.base import fsio, logs, outages
from toolkit.base.errors import RequestError, ToolkitError
from toolkit.files import rundir
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.store import refuse_too_many_ranks
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.facts import Cause, Decision, Stop, Verdict
from toolkit.run.attempt.verdict import requeues_in_vain
from toolkit.run.supervise.context import Context

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
        cluster.components = used.as_asked(cluster.components)
        # No error: some sites do not have Slurm count their GPUs. The ranks will see.
        if cluster.gpus_per_node and not allocation.gpus_per_node:
            log.warning(
                "cluster.gpus_per_node: the config asks for %d, and Slurm gives this job none", cluster.gpus_per_node
            )
        # Ranks that see no GPU are refused. A job that has whole nodes, and whatever is in them, may train on CPUs.
        if allocation.gpus_per_node and (allocation.asks_for_gpus or cluster.gpus_per_node):
            cluster.gpus_per_node = allocation.gpus_per_node
            if not context.is_foreign and config.dist.backend in ("auto", "nccl"):
                _refuse_too_few_gpus(used)
        if used.components and not all(used.gpus):
            cluster.gpus_per_node = 0  # ranks of a component without GPUs are right to see none
        outages.persist(lambda: fsio.write_atomic(run.config, configs.dump_config(config)), run.config)
        # An sbatch script that Slurm starts again knows only its job id.
        key = allocation.job_key
        if key is not None:
            outages.persist(lambda: rundir.remember_job(run, key), run.path)
    outages.persist(run.clear_result, run.path)
    run.hold_room()


def _refuse_too_few_gpus(used: Allocation) -> None:
    """Refuse ranks that would share a GPU without ``cluster.tasks_per_gpu``. Raises RequestError."""
    gpus_of = used.gpus_of
    for host, ranks in used.ranks_of.items():
        if 0 < gpus_of[host] * used.tasks_per_gpu < len(ranks):
            raise RequestError(
                f"cluster.tasks_per_gpu: {len(ranks)} ranks on {host} have {gpus_of[host]} GPUs, each for "
                f"{used.tasks_per_gpu}, and NCCL refuses two ranks on one; ask for as many GPUs as ranks (#SBATCH "
                "--gpus-per-node), or have ranks share them over gloo (cluster.tasks_per_gpu)"
            )


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
    lost = gone | nodes.given_up(left.started)  # they may be back
    left.lose(lost)
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
    context.journal.note_gain(left)
    outages.persist(lambda: context.journal.add(left, Verdict(cause, decision, why)), run.path)
    in_vain, limit = requeues_in_vain(context.journal.history()), context.config.retry.max_requeues
    if in_vain > limit:
        raise ToolkitError(f"{why}; given up after {in_vain - 1} requeues without a new checkpoint")
