"""All that a supervisor consists of: the context, which its parts share, and the optional parts.

Each optional part is imported where it is made. What carries out a key of the config may raise. The rest only watches
or advises, and cannot end a run.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from toolkit import hang
from toolkit.base import logs, outages, signals, staged
from toolkit.base.best_effort import best_effort, best_effort_part
from toolkit.config import SCRIPT_JOB, JobConfig
from toolkit.config.validation import may_lose_nodes
from toolkit.files import rundir
from toolkit.files.polling import PollTimer
from toolkit.files.run_files import AttemptRecord, Efficiency
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agents import Agents, Events
from toolkit.nodes.start.launcher import AgentLauncher, Launcher, RunningRanks
from toolkit.nodes.start.user_script import restore_import_path
from toolkit.run.attempt import advice
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.journal import Journal
from toolkit.run.attempt.verdict import RankFailure, Verdict
from toolkit.run.job.nodes import Nodes
from toolkit.run.job.slurm_job import SlurmJob
from toolkit.run.records import ownership, user_requests
from toolkit.run.records.ownership import Claim
from toolkit.run.records.user_requests import Intent
from toolkit.run.requeue.requeue import JobRequeue
from toolkit.slurm.commands import SlurmCommands, settings_of
from toolkit.slurm.container import Container

if TYPE_CHECKING:
    from toolkit.plugins.node_watch.batch_host_watch import DeadNodes
    from toolkit.plugins.node_watch.investigation import Investigation
    from toolkit.plugins.node_watch.job_usage import JobUsageRecorder
    from toolkit.plugins.node_watch.script_output import ScriptOutput
    from toolkit.plugins.staging.supervisor_side import NodeStaging
    from toolkit.plugins.trackers import Senders

log = logs.get(__name__)


class Context:
    """The supervised run, and its current job."""

    claim: Claim  #: once the run is this job's

    def __init__(
        self,
        run: RunDir,
        config: JobConfig,
        allocation: Allocation,
        slurm: SlurmCommands | None,
        agents: Agents | None,
        container: Container | None,
    ) -> None:
        """Make all parts of a new supervisor. Without ``slurm`` it is of this machine."""
        self.run, self.config, self.allocation = run, config, allocation
        self.agents, self.container = agents, container
        spare, fewer = config.cluster.spare_nodes, config.retry.allow_fewer_nodes
        self.job = SlurmJob(slurm, allocation, config.cluster.save_before_limit_s)
        doubtful = doubtful_nodes(run)
        make_nodes = partial(Nodes, run, allocation, spare=spare, allow_fewer=fewer, doubtful=doubtful)
        self.nodes = outages.retry_write(make_nodes, run.path, "read")
        self.journal = outages.retry_write(lambda: Journal(run, allocation, self.nodes), run.path, "read")
        self.events: Events = SimpleQueue()
        self.poll_timer = PollTimer()  #: of the attempt's work on the run's files
        self.usage = usage_recorder(run, config, allocation)
        self.requeue = None if slurm is None else JobRequeue(run, allocation, slurm, self.nodes)

    @property
    def is_script(self) -> bool:
        """True for a script under ``toolkit exec``."""
        return self.config.job == SCRIPT_JOB

    def note_usage(self, attempt: Attempt, *, is_last: bool = False) -> None:
        """Have the journal write what the job uses, as far as the agents have reported."""
        if self.agents is not None:
            messages = dict(self.agents.usages)  # another thread adds to it
            used = self.usage.update(messages, attempt, self.job.row, is_last=is_last)
            self.journal.usage = used or self.journal.usage

    def note_ready(self, attempt: Attempt) -> None:
        """Note when the agents were ordered, and when that of rank 0's node had connected and had imported torch."""
        if self.agents is not None and attempt.start is not None and not attempt.start.marks:
            ready = dict(self.agents.ready)  # another thread adds to it
            main_host = attempt.rank_hosts[0]
            marks = {name: moment for (host, name), moment in ready.items() if host == main_host or name == "prepared"}
            attempt.note_marks(marks)

    def prepare_requeue(self) -> None:
        """Submit the follow-up jobs that the job needs, as far as Slurm has described it."""
        if self.requeue is not None:
            self.requeue.prepare(self.job.row, self.job.settings, self.claim)

    def asked(self) -> Intent | None:
        """Return what a user has asked of the run. None also where the file cannot be read at this moment."""
        try:
            return user_requests.read_intent(self.run)
        except OSError as error:  # the ranks, which may be about to save, must not end with the supervisor
            log.warning("%s: cannot tell whether a stop was requested: %s", self.run.path, error)
            return None

    def rank_command(self) -> list[str]:
        """Return the command that every rank runs."""
        module = ["toolkit.nodes.start.user_script"] if self.is_script else ["toolkit", "run"]
        module.append(str(self.run.config))
        return self.container.command(module) if self.container else [sys.executable, "-P", "-m", *module]

    def rank_environ(self, attempt: int) -> dict[str, str]:
        """Return the variables of every rank of ``attempt``. Its own numbers are set where it starts."""
        environ = dict(os.environ)
        environ.pop(ownership.TOKEN_VARIABLE, None)  # not for the ranks: a rank may submit runs
        environ.pop(staged.VARIABLE, None)  # a rank that submits this run has copies on its own node only
        environ.pop("MASTER_ADDR", None)  # a user's profile cannot know the store's address
        environ.update(
            {
                rundir.RUN_DIR_VARIABLE: str(self.run.path),
                "TOOLKIT_RUNS": str(self.run.path.parent.parent),
                "TOOLKIT_ATTEMPT": str(attempt),
                rundir.OWNER_VARIABLE: str(self.claim.owner.number),
                "TOOLKIT_SUPERVISED": "1",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(attempt - 1),
                "PYTHONUNBUFFERED": "1",
            }
        )
        if self.job.slurm is not None and self.job.settings.signals_all:
            environ[signals.ALL_VARIABLE] = "1"
        environ.setdefault("OMP_NUM_THREADS", str(self.allocation.cpus_per_task))
        environ.update(hang.debug_environment(self.run.attempt_logs(attempt), environ))
        # a process that is forked for a user script must have been started with the script's own import path
        return restore_import_path(environ, self.run.code) if self.is_script else environ


# -------------------------------------------------------------------------------------------- what a key asks for


def batch_host_watch_command(
    config: JobConfig, run: RunDir, allocation: Allocation
) -> Callable[[str, int], list[str]] | None:
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
    record = outages.retry_write(context.run.dependencies, context.run.path, "read")
    if record is None:
        return None
    from toolkit.plugins.sweep import waiting

    return waiting.wait_for_other_runs(context, record)


# ---------------------------------------------------------------------------------------- what watches and advises


@best_effort_part
def tracker_senders(run: RunDir, config: JobConfig) -> Senders | None:
    """Return what sends the curves while the run works, if ``trackers`` is set."""
    if not config.trackers:
        return None
    from toolkit.plugins.trackers import Senders

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


@best_effort_part
def script_output(context: Context, attempt: Attempt) -> ScriptOutput | None:
    """Return what reads from the output of a script how far it is."""
    if not context.is_script:
        return None
    from toolkit.plugins.node_watch.script_output import ScriptOutput

    return ScriptOutput(context.run, attempt.number, context.config.argv)


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
    """Send the notices that are due."""
    from toolkit.run.supervise import notify as notices

    def explain() -> list[str]:
        from toolkit.plugins.report.why.page import diagnosis_lines
        from toolkit.plugins.report.why.runs import cause_of

        found = cause_of(run)
        return [*(diagnosis_lines(found.to_json()) if found else ()), f"next: {advice.of(run)}"]

    notices.notify(run, explain)


def notify_meanwhile(run: RunDir, config: JobConfig, wait_s: float = 0.0) -> None:
    """The same next to the run, which waits for it ``wait_s`` at most: a job that is being ended has only seconds."""
    if set(config.notify.when) - {"end"}:
        sending = threading.Thread(target=notify, args=[run], daemon=True)
        sending.start()
        sending.join(wait_s)


@best_effort
def next_step(run: RunDir) -> str:
    """Return what to do about a run that has ended."""
    return advice.of(run)
