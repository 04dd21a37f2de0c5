"""Prepares the run's files before a supervisor starts anything: the run becomes this job's."""

from __future__ import annotations

from contextlib import suppress

from toolkit import config as configs
from toolkit.base import fsio, logs, outages
from toolkit.files import rundir
from toolkit.nodes.start.store import refuse_too_many_ranks
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
