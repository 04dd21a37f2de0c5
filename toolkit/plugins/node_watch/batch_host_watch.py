"""Watches the batch host from another node. Requeues the job when that host is gone.

Only for jobs with ``--no-kill``, which would stay RUNNING for ever without a supervisor. An agent that has lost the
supervisor, or receives nothing from it, starts this process. It uses three signs: the supervisor's status file changes
every five seconds at least; the supervisor accepts connections (slurmd would, too, on a batch host that has rebooted,
and there it took Slurm two minutes to miss the job); the job's node list, which a dead node leaves when Slurm has
noticed.

SIGTERM does not end this process: Slurm sends one at the beginning of a preemption's grace time. When the job is over,
this process ends by the job's state, or by Slurm's SIGKILL after KillWait.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from toolkit.base import hostlist, logs, outages
from toolkit.base.errors import DamagedFileError, SlurmError
from toolkit.files.run_files import RunState
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.launcher import NodeFailed
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.job import nodes
from toolkit.run.job.slurm_job import JobOutcome, outcome_of_row
from toolkit.run.records import user_requests
from toolkit.run.records.user_requests import Intent
from toolkit.run.requeue.requeue import EXCLUDE_S, requeue_job, to_exclude
from toolkit.run.supervise.node_care import NodePoller
from toolkit.run.supervise.supervisor_components import Context
from toolkit.slurm.commands import Slurm, SlurmCommands
from toolkit.slurm.jobs import JobRow
from toolkit.slurm.reachable import TIMEOUT_S

LOOK_EVERY_S = 2.0
#: A supervisor that has written nothing for this long is checked by a connection.
SILENT_S = 12.0
#: After this many unanswered checks in a row the batch host counts as gone.
LOOKS = 2
ASK_SLURM_EVERY_S = 30.0
#: After a SIGTERM, looks come this often and each asks Slurm: KillWait may be 5 s.
LAST_LOOKS_EVERY_S = 1.0

log = logs.get(__name__)


def accepts_connection(host: str, port: int, timeout_s: float = TIMEOUT_S) -> bool:
    """True if ``host`` accepts a connection on ``port``."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


@dataclass(frozen=True)
class WatchedJob:
    """The job start whose batch host is watched."""

    run: RunDir
    job_id: str
    restart_count: int
    batch_host: str
    address: str  #: where its supervisor listens for the agents
    port: int
    supervisor: int  #: its pid
    nodes: int  #: of the job, spare ones included


class BatchHostWatch:
    """Watches one batch host, look by look; the clock and the network are arguments."""

    def __init__(
        self,
        watched: WatchedJob,
        slurm: SlurmCommands,
        clock: Callable[[], float] = time.monotonic,
        answers: Callable[[str, int], bool] = accepts_connection,
    ) -> None:
        self._watched, self._slurm, self._clock, self._answers = watched, slurm, clock, answers
        self._updated: float | None = None
        self._changed = clock()
        self._unanswered = 0
        self._asked_slurm = clock()
        self.is_ending = False  #: the job, perhaps: it was sent a SIGTERM

    @property
    def pause_s(self) -> float:
        return LAST_LOOKS_EVERY_S if self.is_ending else LOOK_EVERY_S

    def hurry(self) -> None:
        """Look more often after a SIGTERM, for what may be its reason."""
        self.is_ending = True

    def look(self) -> str | None:
        """Return why the job must be requeued, or None. Raises WatchOver when there is nothing to watch any more."""
        status = self._watched.run.status()
        if status.state is not None and status.state.is_over:
            raise WatchEndedError(status.state)
        if status.pid not in (None, self._watched.supervisor):
            raise WatchEndedError("another supervisor has taken over: it has agents that watch")
        # A status that changes is proof enough that the supervisor lives.
        if status.updated != self._updated:
            self._updated, self._changed, self._unanswered = status.updated, self._clock(), 0
        return self._problem_by_silence() or self._problem_by_slurm()

    def _problem_by_silence(self) -> str | None:
        if self._clock() - self._changed < SILENT_S:
            return None
        # The file system may hide the status of a supervisor that lives: ask the supervisor itself.
        does_answer = self._answers(self._watched.address, self._watched.port)
        self._unanswered = 0 if does_answer else self._unanswered + 1
        if self._unanswered < LOOKS:
            return None
        silent_s = self._clock() - self._changed
        host = self._watched.batch_host
        return f"the supervisor on the batch host {host} has been silent for {silent_s:.0f} s and does not answer"

    def _problem_by_slurm(self) -> str | None:
        if self._clock() - self._asked_slurm < ASK_SLURM_EVERY_S and not self.is_ending:
            return None
        self._asked_slurm = self._clock()
        try:
            row = self._slurm.show_job(self._watched.job_id)
        except SlurmError as error:
            log.warning("Slurm does not report the job's state: %s", error)
            return None
        # The order matters: a batch host that has left the list explains a job that is over.
        if row is None or row.restarts > self._watched.restart_count:
            raise WatchEndedError("the job is over")
        if has_lost(row, self._watched.batch_host):
            return f"the batch host {self._watched.batch_host} has left the job's node list"
        if row.is_over or (self.is_ending and row.state != "RUNNING"):
            raise WatchEndedError(f"the job is {row.state}")
        return None


def has_lost(row: JobRow, batch_host: str) -> bool:
    """True if Slurm has given the batch host up. The job runs on.

    If that host comes back at once, 22.05 takes the job for a failed launch and ends it.
    """
    is_here = not row.node_list or batch_host in hostlist.expand(row.node_list)
    return not is_here and (row.state == "RUNNING" or row.reason == "JobLaunchFailure")


class WatchEndedError(Exception):
    """Raised when there is nothing to watch any more."""


def watch_batch_host(watched: WatchedJob, slurm: SlurmCommands) -> None:
    """Look until the job is over or has been requeued. A requeue ends this process as well."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
    watch = BatchHostWatch(watched, slurm)
    while True:
        try:
            why = watch.look()
        except WatchEndedError as over:
            log.info("%s", over)
            return
        if why is not None:
            log.error("%s: requeueing job %s", why, watched.job_id)
            # Before the requeue, which ends this process, too.
            try:
                nodes.remember(watched.run, watched.batch_host, why)
            except (OSError, DamagedFileError) as error:  # a full disk: the job must be requeued all the same
                log.error("%s: node %s cannot be noted: %s", watched.run.path, watched.batch_host, error)
            requeue(watched, slurm, is_ending=watch.is_ending)
            return
        if signal.sigtimedwait(_END_SIGNALS, watch.pause_s) is not None:
            watch.hurry()


_END_SIGNALS = {signal.SIGTERM}


def requeue(watched: WatchedJob, slurm: SlurmCommands, *, is_ending: bool = False) -> None:
    """Put the job back into the queue, without its batch host.

    A host that was only cut off, and is chosen again while it still has the earlier job, refuses ("Duplicate jobid").
    Slurm then drains the node and holds the job until an administrator releases it. Where the job ``is_ending``, Slurm
    kills this process within KillWait, and the requeue comes first: without it the job would be over.
    """
    look = partial(_how_it_stands, watched, slurm)
    row = outages.retry_slurm(lambda: slurm.show_job(watched.job_id), "Slurm does not report the job's state")
    # A job that may not be requeued is ended, and its follow-up job takes over.
    if row is not None and not row.can_requeue:
        # It would run on without a supervisor, and its follow-up job wait for it: end it. The status tells the
        # follow-up job that it is needed, for Slurm calls the end a cancellation.
        if outages.retry_slurm(look, "Slurm does not report the job's state") is JobOutcome.CANCELLED:
            log.info("job %s has been cancelled: leaving it as it is", watched.job_id)
        else:
            why = f"the batch host {watched.batch_host} is gone"
            status = watched.run.status().replace(state=RunState.REQUEUED, why=why, updated=time.time())
            outages.retry_write(lambda: watched.run.write_status(status), watched.run.path)
            outages.retry_slurm(lambda: slurm.cancel(watched.job_id), "the job cannot be ended")
        return
    # This process has the variables of the agents' step; the choice of nodes needs the job's.
    like_our_job = {**os.environ, "SLURM_JOB_NUM_NODES": str(watched.nodes)}
    for of_our_step in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_CPUS_PER_TASK"):
        like_our_job.pop(of_our_step, None)
    bad = {watched.batch_host: nodes.BadNode("gone", time.time())}
    with suppress(DamagedFileError):  # the job must be requeued all the same
        bad |= nodes.remembered(watched.run)
    excluded = None if is_ending or row is None else to_exclude(watched.run, row, slurm, bad, like_our_job)
    seen, _ = requeue_job(look, slurm, watched.job_id)
    if seen is not JobOutcome.REQUEUED:
        log.info("job %s is %s: leaving it as it is", watched.job_id, seen)
    # Only now: Slurm refuses an exclusion while the job runs.
    elif excluded:
        exclude = partial(slurm.exclude_nodes, watched.job_id, excluded)
        outages.retry_slurm(exclude, "the bad nodes cannot be excluded", EXCLUDE_S)


def _how_it_stands(watched: WatchedJob, slurm: SlurmCommands) -> JobOutcome:
    """Return how the job stands. If its batch host came back too late, its end only looks like a cancellation."""
    if user_requests.read_intent(watched.run) is Intent.CANCEL:
        return JobOutcome.CANCELLED
    row = slurm.show_job(watched.job_id)
    seen = outcome_of_row(row, watched.restart_count)
    is_lost = row is not None and has_lost(row, watched.batch_host)
    return JobOutcome.NODE_FAILED if is_lost and seen is JobOutcome.CANCELLED else seen


def command(run: RunDir, job: Allocation, address: str, port: int) -> list[str]:
    """Return the command that an agent starts. This process, the supervisor, listens at ``address`` and ``port``."""
    module = [sys.executable, "-P", "-m", "toolkit.plugins.node_watch.batch_host_watch"]
    watched = [run.path, job.job_id, job.restart_count, job.hosts[0], address, port, os.getpid(), len(job.hosts)]
    return [*module, *map(str, watched)]


def main() -> None:
    """Run the watch. Arguments: RUN_DIR JOB_ID RESTARTS BATCH_HOST ADDRESS PORT SUPERVISOR NODES."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # agents ignore it, and an ignored signal cannot be waited for
    run_dir, job_id, restarts, batch_host, address, *numbers = sys.argv[1:]
    logs.setup("batch host watch")
    run = RunDir(Path(run_dir))
    watch_batch_host(WatchedJob(run, job_id, int(restarts), batch_host, address, *map(int, numbers)), Slurm())


#: Each question is a line in the log of a node's slurmd.
ASK_EVERY_S = 1.0
#: A node is dead when it has been silent for ``DEAD_S`` longer than between two heartbeats, and longer than in any
#: silence of this job that has ended by itself. Links may be away for that long: a restart is quicker, but the node is
#: lost to the job.
DEAD_S, QUESTION_S = 2.0, 0.5
#: The same where its loss would cost more than a restart, or the fault may be elsewhere.
PATIENT_S = 6.0


class DeadNodes:
    """Asks silent nodes repeatedly, and puts the dead ones into the queue as NodeFailed.

    Slurm itself needs SlurmdTimeout for it, 300 s by default. Nodes are asked about only where another can take over: a
    network that is away for half a minute must not end a run that would be requeued for it.
    """

    def __init__(self, context: Context, clock: Callable[[], float] = time.monotonic) -> None:
        self._context, self._clock, self._longest_s = context, clock, 0.0
        self._answered: dict[str, float] = {}  #: when a host last answered a question
        self._poller = NodePoller(self.ask, ASK_EVERY_S, clock, first=0.0)

    def look(self, attempt: Attempt) -> None:
        """Have silent nodes asked about: a dead one never reports the end of its ranks. Call it all the time."""
        context = self._context
        if context.agents is None or context.job.slurm is None:
            return
        elsewhere = {*attempt.plan.hosts} - {context.allocation.hosts[0]}
        silent = context.agents.unsure_hosts & elsewhere - attempt.lost_nodes
        self._poller.look(context.nodes.dispensable(silent))

    def ask(self, hosts: Collection[str]) -> Mapping[str, str]:
        """Ask ``hosts`` until each has given a sign of life or is dead. Return the dead ones."""
        agents, job = self._context.agents, self._context.job
        assert agents is not None
        assert job.slurm is not None
        signs = {host: self._last_sign(host) for host in hosts}
        silent, is_connected = job.unreachable([*hosts], QUESTION_S), False
        while silent := silent & agents.unsure_hosts:
            left_s = max(map(self._last_sign, silent)) + self._patience_s(silent) - self._clock()
            # If Slurm's controller does not answer either, this node may be the one that is cut off.
            if not is_connected and not (is_connected := job.slurm.available()):
                return {}
            if left_s <= 0:
                break
            silent = job.unreachable(sorted(silent), min(left_s, QUESTION_S))
        for host in sorted(silent):
            self._context.events.put(NodeFailed(host))
        # TCP answers long before it sends again. A network that was silent for a moment will be so again, and longer.
        for host in signs.keys() - silent:
            if agents.last_sign(host) == math.inf:  # it was given up meanwhile
                continue
            self._answered[host] = self._clock()
            self._longest_s = max(self._longest_s, self._answered[host] - signs[host])
        return dict.fromkeys(silent, "does not answer")

    def _last_sign(self, host: str) -> float:
        agents = self._context.agents
        assert agents is not None
        return max(agents.last_sign(host), self._answered.get(host, 0.0))

    def _patience_s(self, silent: set[str]) -> float:
        """Return after which silence nodes are dead. Of too many, or all, a switch or our own link may be away."""
        context, agents = self._context, self._context.agents
        assert agents is not None
        others = agents.heard_hosts - agents.unsure_hosts - silent - {context.allocation.hosts[0]}
        if others and context.nodes.can_lose(silent):
            return min(DEAD_S + max(agents.heartbeat_s, self._longest_s), PATIENT_S)
        return PATIENT_S


if __name__ == "__main__":
    main()
