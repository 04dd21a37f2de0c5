"""The optional parts of a supervisor, each imported where it is made.

What carries out a key of the config may raise. The rest only watches or advises, and cannot end a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING

from toolkit.base.best_effort import best_effort, best_effort_part
from toolkit.config import JobConfig
from toolkit.config.validation import may_lose_nodes
from toolkit.files.run_files import AttemptRecord, Efficiency
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agent_launcher import AgentLauncher
from toolkit.nodes.start.agents import Agents
from toolkit.nodes.start.launcher import Launcher, RunningRanks
from toolkit.run.attempt import advice
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.facts import RankFailure, Verdict
from toolkit.slurm.commands import SlurmCommands, settings_of
from toolkit.slurm.container import Container

if TYPE_CHECKING:
    from toolkit.plugins.node_watch.batch_host_watch import DeadNodes
    from toolkit.plugins.node_watch.investigation import Investigation
    from toolkit.plugins.node_watch.job_usage import JobUsageRecorder
    from toolkit.plugins.staging.supervisor_side import NodeStaging
    from toolkit.plugins.trackers.beside_run import Senders
    from toolkit.run.supervise.context import Context

# -------------------------------------------------------------------------------------------- what a key asks for


def watch_command(config: JobConfig, run: RunDir, allocation: Allocation) -> Callable[[str, int], list[str]] | None:
    """Return what makes the command by which an agent watches the batch host; None where Slurm does."""
    if not may_lose_nodes(config, len(allocation.hosts)):
        return None
    from toolkit.plugins.node_watch.batch_host_watch import command

    return partial(command, run, allocation)


def launcher(
    config: JobConfig,
    run: RunDir,
    allocation: Allocation,
    slurm: SlurmCommands,
    agents: Agents,
    container: Container | None,
) -> Launcher:
    """Return what starts the ranks of a Slurm job: srun over MPI or in a container that is a step, else the agents."""
    if config.dist.backend == "mpi" or (container is not None and container.is_a_step):
        from toolkit.plugins.mpi.srun_launcher import SrunLauncher

        return SrunLauncher(config, run, slurm, agents, container)
    return AgentLauncher(run, allocation, agents, container, cache(partial(settings_of, slurm)))


def wait_for_other_runs(context: Context) -> Verdict | None:
    """Wait as ``--after`` asks. Return how the job ends without an attempt, or None."""
    if context.run.after() is None:
        return None
    from toolkit.plugins.sweep import waiting

    return waiting.wait_for_other_runs(context)


# ---------------------------------------------------------------------------------------- what watches and advises


@best_effort_part
def tracker_senders(run: RunDir, config: JobConfig) -> Senders | None:
    """Return what sends the curves while the run works, if ``trackers`` is set."""
    if not config.trackers:
        return None
    from toolkit.plugins.trackers.beside_run import Senders

    return Senders(run, config)


@best_effort_part
def node_staging(
    run: RunDir, config: JobConfig, allocation: Allocation, launcher: Launcher, note: Callable[[str], None]
) -> NodeStaging:
    """Return what has environment and data copied to the nodes. A start can do without."""
    from toolkit.plugins.staging.supervisor_side import NodeStaging

    return NodeStaging(run, config, allocation, launcher, note)


@best_effort_part
def usage_recorder(run: RunDir, config: JobConfig, allocation: Allocation) -> JobUsageRecorder:
    """Return what keeps in the run what its job uses."""
    from toolkit.plugins.node_watch.job_usage import JobUsageRecorder

    return JobUsageRecorder(run, allocation, config.cluster.price, os.environ)


@best_effort_part
def dead_node_finder(context: Context) -> DeadNodes:
    """Return what puts a `NodeFailed` for each dead node into the queue."""
    from toolkit.plugins.node_watch.batch_host_watch import DeadNodes

    return DeadNodes(context)


@best_effort_part
def hang_investigation(context: Context, attempt: Attempt, ranks: RunningRanks) -> Investigation:
    """Return what finds out which rank causes a hang, and detects hangs of scripts that report nothing."""
    from toolkit.plugins.node_watch.investigation import Investigation

    return Investigation(context, attempt, ranks)


@best_effort
def check_nodes(context: Context) -> None:
    """Mark the nodes that must not be used, before the first ranks start."""
    from toolkit.plugins.site.checks.preflight import mark_bad_nodes

    mark_bad_nodes(context)


@best_effort
def recurs(run: RunDir, attempt: int, failure: RankFailure) -> str | None:
    """Return ``always`` if no restart helps, ``on_node`` if none helps unless the node alone is at fault, or None."""
    from toolkit.plugins.report.why import runs

    return runs.recurs(run, attempt, failure)


@best_effort
def doubtful_nodes(run: RunDir) -> Mapping[str, str]:
    """Return the nodes that have ended attempts of several runs, with the reason."""
    from toolkit.plugins.site.node_history import doubtful_for

    return doubtful_for(run)


@best_effort
def note_faults(run: RunDir, hosts: Mapping[str, str]) -> None:
    """Note that nodes have ended an attempt."""
    from toolkit.plugins.site.node_history import note

    note(run, hosts)


@best_effort
def efficiency(run: RunDir, attempts: Sequence[AttemptRecord], has_completed: bool) -> Efficiency | None:
    """Return what the run asked for and used."""
    from toolkit.plugins.node_watch.efficiency import of_run

    return of_run(run.usage(), attempts, has_completed)


@best_effort
def notify(run: RunDir) -> None:
    """Call the user's command for a run that has a result."""
    from toolkit.run.supervise import notify as command

    command.notify(run)


@best_effort
def next_step(run: RunDir) -> str:
    """Return what to do about a run that has ended."""
    return advice.of(run)
