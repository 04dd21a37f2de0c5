"""The supervisor: the one process that owns a run's lifecycle.

It runs on the batch host or on this machine. It starts an attempt (a fresh store, then the ranks), has it watched to
its end, judges how it ended, records the verdict and restarts, requeues or finishes. Ranks own only training. The
supervisor imports no torch, so it is up in a fraction of a second.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from toolkit import config as configs
from toolkit.base import fsio, logs, outages
from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, RequestError, ToolkitError
from toolkit.base.process_limits import limits
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.polling import PollTimer
from toolkit.files.run_files import RunState
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent.die_with_parent import SIGNALS
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agents import Agents
from toolkit.nodes.start.launcher import Launcher, refuse_too_many_ranks
from toolkit.run.attempt import advice
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.journal import write_ended
from toolkit.run.attempt.verdict import (
    Cause,
    Decision,
    StopReason,
    Verdict,
    requeue_within,
    requeues_without_save,
)
from toolkit.run.records import user_requests
from toolkit.run.records.ownership import Claim
from toolkit.run.supervise import supervisor_components
from toolkit.run.supervise.attempt_loop import RequestsSeen, run_attempt
from toolkit.run.supervise.conclude import carry_out, conclude
from toolkit.run.supervise.node_care import NodeCare
from toolkit.run.supervise.rank_stop import StopAsked, stopped_in_pause
from toolkit.run.supervise.supervisor_components import Context
from toolkit.slurm.commands import SlurmCommands
from toolkit.slurm.container import Container

log = logs.get(__name__)
T = TypeVar("T")


class Supervisor:
    """Carries one run to its end. ``launcher``, ``agents`` and ``slurm`` are its interfaces to the outside."""

    def __init__(
        self,
        run: RunDir,
        config: JobConfig,
        allocation: Allocation,
        launcher: Launcher,
        slurm: SlurmCommands | None,
        agents: Agents | None = None,
        container: Container | None = None,
        token: str | None = None,
    ) -> None:
        self._run, self._config, self._allocation = run, config, allocation
        self._launcher, self._agents, self._token = launcher, agents, token
        self._is_over, self._request_timer = threading.Event(), PollTimer()
        self._context = context = Context(run, config, allocation, slurm, agents, container)
        self._events, self._journal, self._nodes = context.events, context.journal, context.nodes
        self._care = NodeCare(context)

    def run(self, earlier_death: str | None = None) -> int:
        """Make attempts until one finishes or no more may be made. Return the exit code of the job.

        ``earlier_death`` says how the supervisor before this one died, if it is known. Raises Overtaken when the run
        belongs to another job.
        """
        # These replace submitit's handlers, which requeue inside the handler. SimpleQueue.put may interrupt itself.
        for number in SIGNALS:
            signal.signal(number, lambda n, _: self._events.put(StopAsked(signal.Signals(n))))
        signal.signal(signal.SIGCONT, self._hurry)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if self._has_ended(earlier_death):
            return EXIT_DONE
        take_run(self._context)
        senders = supervisor_components.tracker_senders(self._run, self._config)
        try:
            self._take_over(earlier_death)
            verdict = supervisor_components.wait_for_other_runs(self._context)
            # A user may have ended the run in the queue, or before a requeue by Slurm.
            if verdict is None and self._context.asked() is None:
                self._prepare_nodes()
                verdict = self._run_attempts()
        finally:
            self._is_over.set()
            if self._agents is not None:
                self._agents.close()
            senders.close()
        if verdict is None:
            return end_before_start(self._context)
        # The run is over for good: cancel its follow-up jobs.
        if self._context.requeue is not None and verdict.decision is not Decision.REQUEUE:
            self._context.requeue.dismiss()
        if verdict.decision is not Decision.REQUEUE or self._run.result() is not None:  # Slurm may not take it back
            supervisor_components.notify(self._run)
        if verdict.cause is Cause.COMPLETED:
            return EXIT_DONE
        return EXIT_FAILED if verdict.decision is Decision.GIVE_UP else EXIT_STOPPED

    def _hurry(self, *_: object) -> None:
        """Look at the run's files soon: a command has left a request. This runs in a signal handler."""
        self._context.poll_timer.hurry()
        self._request_timer.hurry()

    def _has_ended(self, earlier_death: str | None) -> bool:
        """Take the run for this job, and read what is there. True if it was over already, see :func:`has_ended`."""

        def read(what: Callable[[], T]) -> T:
            return outages.retry_write(what, self._run.path, "read")

        self._context.claim = read(lambda: Claim.of_job(self._run, self._allocation, self._token))
        read(self._journal.read)
        return read(lambda: has_ended(self._context, earlier_death))

    def _take_over(self, earlier_death: str | None) -> None:
        """Take over from an earlier supervisor, if there was one: its agents, its attempt, its status."""
        # First, since agents of a killed supervisor wait for this one; they would not wait for a slow controller. Each
        # attempt's order has its own number.
        command, environ = self._context.rank_command(), self._context.rank_environ(attempt=0)
        self._launcher.listen(command, environ, self._events)
        self._context.job.look()
        if self._context.job.was_ending():  # the batch script ignores signals: this process has not got Slurm's
            self._events.put(StopAsked(signal.SIGTERM))
        close_interrupted(self._context, earlier_death)
        self._journal.announce()
        supervisor_components.notify_meanwhile(self._run, self._config)  # of an attempt whose supervisor could not

    def _prepare_nodes(self) -> None:
        """Have the nodes checked, what ranks need copied there, and follow-up jobs submitted."""
        threading.Thread(target=self._watch_for_requests, daemon=True).start()
        # The agents import torch while this process does the rest.
        plan = self._nodes.plan()
        copying = supervisor_components.node_staging(
            self._run, self._config, self._allocation, self._launcher, self._journal.note_staging
        )
        copying.decide()
        self._launcher.start_agents(() if plan is None else plan.hosts)
        copying.begin()
        self._context.prepare_requeue()
        supervisor_components.check_nodes(self._context)
        plan = self._nodes.plan()  # without nodes that are bad
        copying.wait(() if plan is None else plan.hosts, self._events)

    def _watch_for_requests(self) -> None:
        """Look for users' requests. Slurm may not pass on the signal that says when to look."""
        while not self._is_over.wait(limits().status_every_s):
            if not self._request_timer.is_due(None):
                continue
            with suppress(OSError):  # a file server may be away
                seen = user_requests.scan_requests(self._run)
                self._context.poll_timer.has_viewer = self._request_timer.has_viewer = seen.has_viewer
                if seen.ids:
                    self._events.put(RequestsSeen(seen.ids))
                if seen.is_end_asked:
                    self._events.put(StopAsked(None))
                    return

    def _run_attempts(self) -> Verdict:
        without_step = 0  # attempts in a row
        while (plan := self._nodes.plan()) is not None:
            self._nodes.note_used(plan)
            attempt = self._new_attempt(plan)
            # Attempts that make no step are spaced out; a stop or a signal during the pause ends the run.
            pause_s = 0.0
            if without_step:
                pause_s = min(limits().first_pause_s * 2 ** (without_step - 1), limits().longest_pause_s)
            if stopped_in_pause(self._context, attempt, pause_s):
                attempt.end(EXIT_STOPPED)
            else:
                run_attempt(self._context, attempt, self._launcher, self._care)
            verdict = conclude(self._context, attempt, self._care)
            if verdict.decision is not Decision.RESTART:
                return verdict
            made_a_step = (attempt.progress.step or 0) > (attempt.progress.step_start or 0)
            without_step = 0 if made_a_step or self._context.is_script else without_step + 1
        # The checks have found bad nodes, or nodes have died together with the last supervisor. Record an attempt
        # without ranks, so that the history has a line for this requeue.
        bad = self._nodes.out
        attempt = self._new_attempt(self._allocation)
        attempt.lose(bad)
        attempt.close()
        why = "too few good nodes to start on: " + "; ".join(f"{host}: {reason}" for host, reason in bad.items())
        limit = self._config.retry.max_requeues
        verdict = requeue_within(limit, self._journal.history(), Cause.NODE_FAILURE, why)
        carry_out(self._context, attempt, verdict)
        return verdict

    def _new_attempt(self, plan: Allocation) -> Attempt:
        number = self._journal.next_number()
        if number == 2 and (note := advice.restart_note(self._context.run, number)):
            log.warning("%s", note)
        start = None if self._context.is_script else self._journal.start_times(self._context.job.row)
        return Attempt(number, time.time(), plan, start)


def has_ended(context: Context, earlier_death: str | None) -> bool:
    """True if the run was over already, and Slurm has restarted its job by mistake.

    Slurm 24.11 does so after a preemption with grace time. It remembers that the job is to be requeued when it ends.
    Our own requeue does not clear that, so Slurm acts on it at the next end, days later. A user who wants the run to
    continue calls `toolkit resume`, which removes the result first.
    """
    run, result = context.run, context.run.result()
    restarted = context.allocation.restart_count > 0 or earlier_death is not None
    # Whether one that was stopped or cancelled continues is decided by the request for it.
    if not restarted or result is None or result.state.is_cut_short:
        return False
    log.info("run %s has already ended (%s): nothing to do in this restart", run.id, result.state)
    with suppress(OSError):  # a full disk must not have the job of a run that is over requeued
        run.write_status(run.status().replace(state=result.state))
    supervisor_components.notify(run)  # its supervisor may have been killed before it could
    return True


def take_run(context: Context) -> None:
    """Record the job's size and id in the run. Remove the result of an earlier start."""
    run, config, allocation = context.run, context.config, context.allocation
    cluster = config.cluster
    used = allocation.without_spares(cluster.spare_nodes)
    refuse_too_many_ranks(used.world_size)
    if context.job.slurm is not None:
        if not context.is_script and not configs.is_loop(config.job, run.code):
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
            if not context.is_script and config.dist.backend in ("auto", "nccl"):
                _refuse_too_few_gpus(used)
        if used.components and not all(used.gpus):
            cluster.gpus_per_node = 0  # ranks of a component without GPUs are right to see none
        outages.retry_write(lambda: fsio.write_atomic(run.config, configs.dump_config(config)), run.config)
        if (key := allocation.job_key) is not None:  # an sbatch script that Slurm starts again knows only its job id
            outages.retry_write(lambda: rundir.remember_job(run, key), run.path)
    outages.retry_write(run.clear_result, run.path)
    run.reserve_space()


def _refuse_too_few_gpus(used: Allocation) -> None:
    """Raise RequestError for ranks that would share a GPU without ``cluster.tasks_per_gpu``."""
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
    status = outages.retry_write(run.interrupted_status, run.path, "read")
    if status is None:
        return
    left = Attempt.of_status(status, context.allocation)
    gone = job.unreachable(left.plan.hosts) if job.slurm else set()
    lost = gone | nodes.newly_bad(left.started)  # they may be back
    left.lose(lost)
    decision = Decision.REQUEUE
    is_here = status.cluster in ("", context.allocation.cluster)  # another cluster's number is another job here
    # The most certain reason first: what the guard saw, lost nodes, a stop or preemption, and else a node failure.
    if earlier_death is not None:
        cause, why, decision = Cause.CRASHED, earlier_death, Decision.RESTART
        nodes.note_used(left.plan)  # the state of its ranks is in these nodes' memory
    elif lost:
        cause, why = Cause.NODE_FAILURE, f"lost {', '.join(sorted(lost))}"
    elif status.stop not in (None, StopReason.MOVE) or (is_here and job.was_preempted(status.job_id)):
        cause, why = Cause.PREEMPTED, "ended before its supervisor could record the result"
    else:  # its guard may have given up, and said why
        cause = Cause.NODE_FAILURE
        why = status.why or "the supervisor disappeared without a result (node failure, power loss or SIGKILL)"
    log.warning("attempt %d: %s", left.number, why)
    for host in gone:
        nodes.condemn(host, f"lost in attempt {left.number}")
    context.journal.note_gain(left)
    outages.retry_write(lambda: context.journal.add(left, Verdict(cause, decision, why)), run.path)
    in_vain, limit = requeues_without_save(context.journal.history()), context.config.retry.max_requeues
    if in_vain > limit:
        raise ToolkitError(f"{why}; given up after {in_vain - 1} requeues without a new checkpoint")


def end_before_start(context: Context) -> int:
    """Write the result of a run that a user ended before it started again. Return the job's exit code."""
    state = user_requests.end_state(context.asked())
    outages.retry_write(lambda: write_ended(context.run, state, f"{state} before it started again"), context.run.path)
    supervisor_components.notify(context.run)
    return EXIT_STOPPED if state is RunState.STOPPED else EXIT_FAILED
