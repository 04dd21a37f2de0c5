"""What the parts of a supervisor share."""

from __future__ import annotations

import os
import sys
from queue import SimpleQueue

from toolkit import hang
from toolkit.base import logs, signals, staged
from toolkit.config import FOREIGN_JOB, JobConfig
from toolkit.files import rundir
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agents import Agents
from toolkit.nodes.start.foreign import without_snapshot
from toolkit.nodes.start.launcher import Events
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.journal import Journal
from toolkit.run.job.nodes import Nodes
from toolkit.run.job.slurm_job import SlurmJob
from toolkit.run.records import ownership, stop_request
from toolkit.run.records.ownership import Claim
from toolkit.run.records.stop_request import Intent
from toolkit.run.requeue.requeue import JobRequeue
from toolkit.run.supervise import parts
from toolkit.slurm.commands import SlurmCommands
from toolkit.slurm.container import Container

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
        self.job = SlurmJob(slurm, allocation, config.cluster.signal_delay_s)
        self.nodes = Nodes(run, allocation, spare=spare, allow_fewer=fewer, doubtful=parts.doubtful_nodes(run))
        self.journal = Journal(run, allocation, self.nodes)
        self.events: Events = SimpleQueue()
        self.usage = parts.usage_recorder(run, config, allocation)
        self.requeue = None if slurm is None else JobRequeue(run, allocation, slurm, self.nodes)

    @property
    def is_foreign(self) -> bool:
        """True for a script under ``toolkit exec``."""
        return self.config.job == FOREIGN_JOB

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
            return stop_request.asked(self.run)
        except OSError as error:  # the ranks, which may be about to save, must not end with the supervisor
            log.warning("%s: it cannot be seen whether a stop was asked for: %s", self.run.path, error)
            return None

    def rank_command(self) -> list[str]:
        """Return the command that every rank runs."""
        module = ["toolkit.nodes.start.foreign"] if self.is_foreign else ["toolkit", "run"]
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
        # a process that is forked for a foreign script must have been started with the script's own import path
        return without_snapshot(environ, self.run.code) if self.is_foreign else environ
