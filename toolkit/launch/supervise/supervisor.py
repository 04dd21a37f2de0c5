"""The supervisor: the one process that owns a run's lifecycle, on the batch host or on this machine.

It starts an attempt (a fresh store, then the ranks), has it watched to its end, judges how it ended, records the
verdict and restarts, requeues or finishes. Ranks own only training. The supervisor imports no torch, so it is up in a
fraction of a second.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import replace
from queue import SimpleQueue

from toolkit import config as configs
from toolkit import fsio, logs, rundir
from toolkit.agent.die_with_parent import SIGNALS
from toolkit.config import FOREIGN_JOB, JobConfig
from toolkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
from toolkit.launch import outages
from toolkit.launch.job import node_history
from toolkit.launch.job.allocation import Allocation
from toolkit.launch.job.fate import JobFate
from toolkit.launch.job.nodes import Nodes
from toolkit.launch.job.requeue import JobRequeue
from toolkit.launch.job.slurm_job import SlurmJob
from toolkit.launch.record import stop_request
from toolkit.launch.record.job_usage import UsageRecorder
from toolkit.launch.record.journal import Journal, write_ended
from toolkit.launch.record.notify import notify
from toolkit.launch.record.ownership import Claim
from toolkit.launch.start.agents import Agents
from toolkit.launch.start.gpu_speeds import LEAST_GPUS, slow_gpus
from toolkit.launch.start.launcher import Events, Launcher
from toolkit.launch.start.preflight import check_nodes
from toolkit.launch.start.staging import NodeStaging
from toolkit.launch.start.store import refuse_too_many_ranks
from toolkit.launch.supervise import budgets, left_over
from toolkit.launch.supervise.attempt import Attempt
from toolkit.launch.supervise.attempt_loop import AttemptLoop
from toolkit.launch.supervise.context import Context
from toolkit.launch.supervise.facts import Cause, Decision, Verdict
from toolkit.launch.supervise.judging import judge_attempt
from toolkit.launch.supervise.other_runs import wait_for_other_runs
from toolkit.launch.supervise.stop_path import Signalled, is_being_ended, stopped_in_pause, why_stop
from toolkit.launch.watch.hang_investigation import remove_unused
from toolkit.launch.watch.node_care import NodeCare
from toolkit.run_files import RunState
from toolkit.rundir import RunDir
from toolkit.slurm.commands import SlurmCommands
from toolkit.slurm.container import Container
from toolkit.slurm.network import job_address, wildcard

#: Pause before a restart after an attempt that made no step. It doubles after each further one, up to the second value.
#: A file system that is away for some seconds must not use up all restarts, which take only a second each.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0

log = logs.get(__name__)


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
        self._events: Events = SimpleQueue()
        self._in_vain = 0  #: attempts in a row that made no step
        self._job = SlurmJob(slurm, allocation, config.cluster.signal_delay_s)
        spare, fewer = config.cluster.spare_nodes, config.retry.allow_fewer_nodes
        self._nodes = Nodes(run, allocation, spare=spare, allow_fewer=fewer)
        self._journal = Journal(run, allocation, self._nodes)
        usage = UsageRecorder(run, allocation, config.cluster.price, os.environ)
        self._requeue = None if slurm is None else JobRequeue(run, allocation, slurm, self._nodes)
        self._context = Context(
            *(run, config, allocation, agents, container, self._job, self._nodes, self._journal, self._events, usage),
            requeue=self._requeue,
        )
        self._care = NodeCare(self._context)

    def run(self, earlier_death: str | None = None) -> int:
        """Make attempts until one finishes or no more may be made; return the exit code of the job.

        ``earlier_death`` says how the supervisor before this one died, if it is known. Raises Overtaken when the run
        belongs to another job.
        """
        _install_handlers(self._events)
        # Look for ranks of a dead supervisor first: they may still train, and can be taken over.
        left = None if earlier_death is None else left_over.find_running(self._run, self._allocation)
        claim = None if left is None else Claim.of_dead(self._run, self._allocation)
        self._context.claim = claim or Claim.of_job(self._run, self._allocation, self._token)
        self._journal.read()
        if self._has_ended(earlier_death):
            return EXIT_DONE
        refuse_too_many_ranks(self._allocation.without(self._config.cluster.spare_nodes).world_size)
        # The run is this job's: record its size and id, and remove the result of an earlier start.
        if self._job.slurm is not None:
            _record_size(self._run, self._config, self._allocation)
            # An sbatch script that Slurm starts again knows only its job id.
            key = self._allocation.job_key
            if key is not None:
                outages.persist(lambda: rundir.remember_job(self._run, key), self._run.path)
        outages.persist(self._run.clear_result, self._run.path)
        # Go on with the ranks that still run, else start anew.
        self._job.look()
        try:
            verdict = None if left is None or claim is None else self._take_over(left)
            verdict = verdict or self._start(earlier_death)
        finally:
            if self._agents is not None:
                self._agents.close()
        # A user ended the run before it started again.
        if verdict is None:
            state = stop_request.end_state(self._context.asked())
            outages.persist(lambda: write_ended(self._run, state, f"{state} before it started again"), self._run.path)
            notify(self._run)
            return EXIT_STOPPED if state is RunState.STOPPED else EXIT_FAILED
        # The run is over for good: cancel its follow-up jobs.
        if self._requeue is not None and verdict.decision is not Decision.REQUEUE:
            self._requeue.dismiss()
        notify(self._run)
        return _exit_code(verdict)

    def _has_ended(self, earlier_death: str | None) -> bool:
        """True if the run was over already, and Slurm has restarted its job by mistake.

        Slurm 24.11 does so after a preemption with grace time. It remembers that the job is to be requeued when it
        ends. Our own requeue does not clear that, so Slurm acts on it at the next end, days later. A user who wants the
        run to go on calls `toolkit resume`, which removes the result first. An unreadable result may be that of a
        cancelled run.
        """
        result = self._run.result()
        restarted = self._allocation.restart_count > 0 or earlier_death is not None
        # Whether one that was stopped or cancelled goes on is decided by the request for it.
        if not restarted or result is None or result.state.is_cut_short:
            return False
        log.info("run %s has ended before (%s): nothing to do in this restart", self._run.id, result.state)
        self._run.write_status(self._run.status().replace(state=result.state))
        return True

    # ------------------------------------------------------------------------------------------------- the beginning

    def _start(self, earlier_death: str | None) -> Verdict | None:
        """Start anew; return None for a run that a user has ended."""
        left_over.close(self._context, earlier_death)
        self._journal.announce()
        ended = wait_for_other_runs(self._context, self._requeue)
        if ended is not None or self._context.asked():  # perhaps in the queue, or before a requeue by Slurm
            return ended
        # The agents import torch while this process does the rest. Each attempt's order has its own number.
        plan, command, environ = self._nodes.plan(), self._context.rank_command(), self._context.rank_environ(attempt=0)
        staging = NodeStaging(self._run, self._config, self._allocation, self._launcher, self._journal)
        staging.decide()
        self._launcher.prepare(() if plan is None else plan.hosts, command, environ, self._events)
        staging.begin()
        self._context.prepare_requeue()
        self._check_nodes()
        plan = self._nodes.plan()  # without nodes that are bad
        staging.wait(() if plan is None else plan.hosts, self._events)
        return self._run_attempts()

    def _take_over(self, attempt: Attempt) -> Verdict | None:
        """Go on with the ranks of a dead supervisor, and after them. Return None where not all ranks are there."""
        context = self._context
        command, environ = context.rank_command(), context.rank_environ(attempt=0)
        ranks = self._launcher.take_over(attempt.number, attempt.plan, command, environ, self._events)
        if ranks is None:
            context.claim.renew()  # ranks that are left must not write any more
            return None
        log.warning("attempt %d: taken over with all its ranks at step %s", attempt.number, attempt.progress.step)
        self._journal.take_over(attempt)
        self._nodes.note_used(attempt.plan)
        self._context.prepare_requeue()
        loop = AttemptLoop(context, attempt, *ranks, self._care)
        # The dead supervisor may have begun a stop, and a user may have asked for one since.
        stop, attempt.stop = attempt.stop, None
        if context.asked():
            stop = why_stop(context, signal.SIGTERM)
        if stop is not None:  # the ranks may not have been told
            loop.stops.ask(stop)
        loop.run()
        # From here on like any other attempt.
        verdict = self._conclude(attempt)
        return self._run_attempts() if verdict.decision is Decision.RESTART else verdict

    def _check_nodes(self) -> None:
        """Mark the nodes that the preflight finds bad as unusable.

        A job that was requeued for bad nodes twice, in vain, takes what it gets: it may well run.
        """
        if not self._config.cluster.preflight or self._job.slurm is None or self._agents is None:
            return
        # Spare nodes are checked too, with no ranks on them.
        job, spare = self._allocation, self._config.cluster.spare_nodes
        checked = replace(job, tasks=(*job.without(spare).tasks, *[0] * spare))
        report = check_nodes(self._run.path, checked, self._agents, self._events)
        if not report.is_fine and is_being_ended(self._context):
            return  # what ends the job ended the checks, too: they say nothing about the nodes
        for line in report.summary():
            log.log(logging.INFO if report.is_fine else logging.WARNING, "preflight: %s", line)
        if budgets.fruitless_requeues(self._journal.history()) >= budgets.MAX_FRUITLESS_REQUEUES:
            return
        self._nodes.doubt(report.slow)
        # Slow GPUs only matter where a spare can take their place.
        if spare and job.gpus_per_node * len(job.hosts) >= LEAST_GPUS:
            self._nodes.doubt(slow_gpus(self._agents, job.hosts, self._events))
        # A node that did not answer is bad only if its slurmd does not answer either.
        dead = self._job.unreachable(report.unknown) if report.unknown else set()
        bad = {**report.bad, **dict.fromkeys(dead, "nothing was heard of it, and its slurmd does not answer")}
        for host, why in bad.items():
            self._nodes.condemn(host, why)

    # -------------------------------------------------------------------------------------------------- the attempts

    def _run_attempts(self) -> Verdict:
        while (plan := self._nodes.plan()) is not None:
            self._nodes.note_used(plan)
            attempt = self._new_attempt(plan)
            # Attempts that make no step are spaced out; a stop or a signal during the pause ends the run.
            pause_s = min(FIRST_PAUSE_S * 2 ** (self._in_vain - 1), LONGEST_PAUSE_S) if self._in_vain else 0.0
            if stopped_in_pause(self._context, attempt, pause_s):
                attempt.exit_code = EXIT_STOPPED
            else:
                self._run_ranks(attempt)
            verdict = self._conclude(attempt)
            if verdict.decision is not Decision.RESTART:
                return verdict
        # The checks have found bad nodes, or nodes have died together with the last supervisor. Record an attempt
        # without ranks, so that the history has a line for this requeue.
        bad = self._nodes.out
        attempt = self._new_attempt(self._allocation)
        attempt.lost_nodes, attempt.ended = set(bad), time.time()
        why = "; ".join(f"{host}: {reason}" for host, reason in bad.items())
        verdict = Verdict(Cause.NODE_FAILURE, Decision.REQUEUE, f"too few good nodes to start on: {why}")
        self._record(attempt, verdict)
        return verdict

    def _new_attempt(self, plan: Allocation) -> Attempt:
        start = None if self._context.is_foreign else self._journal.begin(self._job.row)
        return Attempt(self._journal.next_number(), time.time(), plan, start)

    def _run_ranks(self, attempt: Attempt) -> None:
        plan, number, command = attempt.plan, attempt.number, self._context.rank_command()
        # Each start has its own claim, so that ranks of an earlier one can write no more.
        self._context.claim.renew()
        self._journal.set_status(RunState.STARTING, attempt)
        hosts = ", ".join(f"{host} x{count}" for host, count in zip(plan.hosts, plan.tasks, strict=True))
        log.info("attempt %d: %d ranks on %s", number, plan.world_size, hosts)
        environ = self._context.rank_environ(number)
        # The ranks meet at this address, so all their nodes must reach it.
        host = job_address(self._allocation.hosts[0], plan.hosts, environ)
        store = self._launcher.start_store(number, plan.world_size, host, environ, self._events)
        if host != wildcard():  # else each rank uses the address from which srun started it
            environ["MASTER_ADDR"] = host
        running = self._launcher.start(number, plan, command, environ, self._events, store)
        AttemptLoop(self._context, attempt, running, store, self._care).run()

    def _conclude(self, attempt: Attempt) -> Verdict:
        """Judge an attempt whose ranks have ended, and record the verdict."""
        attempt.ended = time.time()
        self._journal.note_gain(attempt)
        verdict = judge_attempt(self._context, attempt)
        # Attempts without a step lengthen the pause before the next one.
        made_a_step = (attempt.progress.step or 0) > (attempt.progress.step_start or 0)
        self._in_vain = 0 if made_a_step or self._context.is_foreign else self._in_vain + 1
        self._record(attempt, verdict)
        if verdict.cause is Cause.MOVED:
            self._care.give_back(attempt)
        # Last: a job that is being ended has only seconds.
        remove_unused(self._run.attempt_logs(attempt.number))
        return verdict

    # ------------------------------------------------------------------------------------------------- what is written

    def _record(self, attempt: Attempt, verdict: Verdict) -> None:
        log.info("attempt %d: %s (%s): %s", attempt.number, verdict.cause, verdict.decision, verdict.line)
        self._context.note_usage(attempt, is_last=True)
        outages.persist(lambda: self._journal.add(attempt, verdict), self._run.path)
        if self._job.slurm is not None:
            node_history.note(self._run, attempt.nodes_at_fault(verdict.suspect))
        if verdict.decision is Decision.RESTART:
            self._journal.set_status(RunState.RESTARTING, attempt, why=verdict.line)
            return
        state, why = _state(verdict), verdict.line
        self._journal.set_status(state, attempt, why=why, ended=time.time())
        # Ask Slurm to take the job back. If it does not, the run ends here, with the reason in its result.
        if verdict.decision is Decision.REQUEUE:
            seen = JobFate.UNKNOWN if self._requeue is None else self._requeue.requeue()
            if seen is JobFate.REQUEUED:
                return
            if seen is JobFate.CANCELLED:
                state, why = stop_request.end_state(self._context.asked()), f"{why}; cancelled before it was requeued"
            else:
                why = f"{why}; but Slurm did not take it back: `toolkit resume` goes on with it"
                state = RunState.STOPPED
            self._journal.set_status(state, attempt, why=why, ended=time.time())
        outages.persist(lambda: self._journal.write_result(attempt, state, why), self._run.path)


def _install_handlers(events: Events) -> None:
    """Replace submitit's handlers, which requeue inside the handler. SimpleQueue.put may interrupt itself safely."""
    for number in SIGNALS:
        signal.signal(number, lambda n, _: events.put(Signalled(signal.Signals(n))))
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _state(verdict: Verdict) -> RunState:
    """Return the run's state after a verdict that ends the job."""
    if verdict.decision is Decision.REQUEUE:
        return RunState.REQUEUED
    if verdict.cause in (Cause.COMPLETED, Cause.STOPPED, Cause.CANCELLED):
        return RunState(verdict.cause)
    return RunState.FAILED


def _exit_code(verdict: Verdict) -> int:
    if verdict.cause is Cause.COMPLETED:
        return EXIT_DONE
    return EXIT_FAILED if verdict.decision is Decision.GIVE_UP else EXIT_STOPPED


def _record_size(run: RunDir, config: JobConfig, allocation: Allocation) -> None:
    """Write the allocation's size into the run's config."""
    cluster = config.cluster
    used = allocation.without(cluster.spare_nodes)
    if config.job != FOREIGN_JOB and not configs.is_loop(config.job, run.code):
        configs.check_batch(config, used.world_size)
    cluster.nodes = len(used.hosts)
    cluster.tasks_per_node = max(allocation.tasks)
    cluster.cpus_per_task = allocation.cpus_per_task
    cluster.gpus_per_node = allocation.gpus_per_node
    outages.persist(lambda: fsio.write_atomic(run.config, configs.dump_config(config)), run.config)
