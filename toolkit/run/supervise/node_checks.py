"""What the supervisor makes of the checks of the nodes, before the first ranks start."""

from __future__ import annotations

import logging
from dataclasses import replace

from toolkit import registry
from toolkit.base import logs
from toolkit.nodes.start.preflight import check_nodes
from toolkit.run.attempt import budgets
from toolkit.run.supervise.context import Context
from toolkit.run.supervise.stop_path import is_being_ended

log = logs.get(__name__)


def mark_bad_nodes(context: Context) -> None:
    """Mark the nodes that the preflight finds bad as unusable.

    A job that was requeued for bad nodes twice, in vain, takes what it gets: it may well run.
    """
    agents, nodes = context.agents, context.nodes
    if not context.config.cluster.preflight or context.job.slurm is None or agents is None:
        return
    # Spare nodes are checked too, with no ranks on them.
    job, spare = context.allocation, context.config.cluster.spare_nodes
    checked = replace(job, tasks=(*job.without(spare).tasks, *[0] * spare))
    report = check_nodes(context.run.path, checked, agents, context.events)
    if not report.is_fine and is_being_ended(context):
        return  # what ends the job ended the checks, too: they say nothing about the nodes
    for line in report.summary():
        log.log(logging.INFO if report.is_fine else logging.WARNING, "preflight: %s", line)
    if budgets.fruitless_requeues(context.journal.history()) >= budgets.MAX_FRUITLESS_REQUEUES:
        return
    nodes.doubt(report.slow)
    # Slow GPUs only matter where a spare can take their place.
    if spare and (slow_gpus := registry.find("hooks", "slow_gpus")) is not None:
        nodes.doubt(slow_gpus(agents, job, context.events))
    # A node that did not answer is bad only if its slurmd does not answer either.
    dead = context.job.unreachable(report.unknown) if report.unknown else set()
    bad = {**report.bad, **dict.fromkeys(dead, "nothing was heard of it, and its slurmd does not answer")}
    for host, why in bad.items():
        nodes.condemn(host, why)
