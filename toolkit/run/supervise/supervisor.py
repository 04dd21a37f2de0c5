"""The supervisor: the one process that owns a run's lifecycle.

It runs on the batch host or on this machine. It starts an attempt (a fresh store, then the ranks), has it watched to
its end, judges how it ended, records the verdict and restarts, requeues or finishes. Ranks own only training. The
supervisor imports no torch, so it is up in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time

from toolkit.base import logs
from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED
from toolkit.config import JobConfig
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent.die_with_parent import SIGNALS
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agents import Agents
from toolkit.nodes.start.launcher import Events, Launcher
from toolkit.run.attempt import advice
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.facts import Cause, Decision, Verdict
from toolkit.run.records import stop_request
from toolkit.run.records.ownership import Claim
from toolkit.run.supervise import parts
from toolkit.run.supervise.attempt_loop import run_attempt
from toolkit.run.supervise.beginning import close_interrupted, has_ended, take_run
from toolkit.run.supervise.conclusion import conclude, end_before_start, record
from toolkit.run.supervise.context import Context
from toolkit.run.supervise.node_care import NodeCare
from toolkit.run.supervise.stop_path import Signalled, stopped_in_pause
from toolkit.slurm.commands import SlurmCommands
from toolkit.slurm.container import Container

#: Pause before a restart after an attempt that made no step. It doubles after each further one, up to the second value.
#: A file system that is away for some seconds must not use up all restarts, which take only a second each.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0

REQUEST_EVERY_S = 0.5

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
        self._is_over = threading.Event()
        self._attempts_without_step = 0  #: attempts in a row that made no step
        self._context = context = Context(run, config, allocation, slurm, agents, container)
        self._events, self._journal, self._nodes = context.events, context.journal, context.nodes
        self._care = NodeCare(context)

    def run(self, earlier_death: str | None = None) -> int:
        """Make attempts until one finishes or no more may be made. Return the exit code of the job.

        ``earlier_death`` says how the supervisor before this one died, if it is known. Raises Overtaken when the run
        belongs to another job.
        """
        _install_handlers(self._events)
        self._context.claim = Claim.of_job(self._run, self._allocation, self._token)
        self._journal.read()
        if has_ended(self._context, earlier_death):
            return EXIT_DONE
        take_run(self._context)
        senders = parts.sending_to_trackers(self._run, self._config)
        try:
            verdict = self._start(earlier_death)
        finally:
            self._is_over.set()
            if self._agents is not None:
                self._agents.close()
            senders.close()
        # A user ended the run before it started again.
        if verdict is None:
            return end_before_start(self._context)
        # The run is over for good: cancel its follow-up jobs.
        if self._context.requeue is not None and verdict.decision is not Decision.REQUEUE:
            self._context.requeue.dismiss()
        if verdict.decision is not Decision.REQUEUE or self._run.result() is not None:  # Slurm may not take it back
            parts.notify(self._run)
        return _exit_code(verdict)

    # ------------------------------------------------------------------------------------------------- the beginning

    def _start(self, earlier_death: str | None) -> Verdict | None:
        """Make attempts; return None for a run that a user has ended."""
        # First, since agents of a killed supervisor wait for this one; they would not wait for a slow controller. Each
        # attempt's order has its own number.
        command, environ = self._context.rank_command(), self._context.rank_environ(attempt=0)
        self._launcher.open(command, environ, self._events)
        self._context.job.look()
        row = self._context.job.row
        self._context.claim.note_command(None if row is None else row.command)
        if self._context.job.is_ending():  # the batch script ignores signals: this process has not got Slurm's
            self._events.put(Signalled(signal.SIGTERM))
        close_interrupted(self._context, earlier_death)
        self._journal.announce()
        ended = parts.wait_for_other_runs(self._context)
        if ended is not None or self._context.asked():  # perhaps in the queue, or before a requeue by Slurm
            return ended
        threading.Thread(target=self._watch_for_request, daemon=True).start()
        # The agents import torch while this process does the rest.
        plan = self._nodes.plan()
        copying = parts.copying_to_nodes(
            self._run, self._config, self._allocation, self._launcher, self._journal.note_staging
        )
        copying.decide()
        self._launcher.prepare(() if plan is None else plan.hosts)
        copying.begin()
        self._context.prepare_requeue()
        parts.check_nodes(self._context)
        plan = self._nodes.plan()  # without nodes that are bad
        copying.wait(() if plan is None else plan.hosts, self._events)
        return self._run_attempts()

    def _watch_for_request(self) -> None:
        """Look for a user's request to end, and put it into the queue as a signal would be.

        No signal is sent: the process that Slurm could signal may be a batch script's shell, which would die of it.
        """
        while not self._is_over.wait(REQUEST_EVERY_S):
            with contextlib.suppress(OSError):  # a file server may be away
                if stop_request.asked(self._run, []) is not None:
                    self._events.put(Signalled(signal.SIGUSR1))
                    return

    # -------------------------------------------------------------------------------------------------- the attempts

    def _run_attempts(self) -> Verdict:
        while (plan := self._nodes.plan()) is not None:
            self._nodes.note_used(plan)
            attempt = self._new_attempt(plan)
            # Attempts that make no step are spaced out; a stop or a signal during the pause ends the run.
            tries = self._attempts_without_step
            pause_s = min(FIRST_PAUSE_S * 2 ** (tries - 1), LONGEST_PAUSE_S) if tries else 0.0
            if stopped_in_pause(self._context, attempt, pause_s):
                attempt.end(EXIT_STOPPED)
            else:
                run_attempt(self._context, attempt, self._launcher, self._care)
            verdict = self._conclude(attempt)
            if verdict.decision is not Decision.RESTART:
                return verdict
        # The checks have found bad nodes, or nodes have died together with the last supervisor. Record an attempt
        # without ranks, so that the history has a line for this requeue.
        bad = self._nodes.out
        attempt = self._new_attempt(self._allocation)
        attempt.lose(bad)
        attempt.close()
        why = "; ".join(f"{host}: {reason}" for host, reason in bad.items())
        verdict = Verdict(Cause.NODE_FAILURE, Decision.REQUEUE, f"too few good nodes to start on: {why}")
        record(self._context, attempt, verdict)
        return verdict

    def _new_attempt(self, plan: Allocation) -> Attempt:
        number = self._journal.next_number()
        if number == 2 and (note := advice.of_restarts(self._context.run, number)):
            log.warning("%s", note)
        start = None if self._context.is_foreign else self._journal.begin(self._context.job.row)
        return Attempt(number, time.time(), plan, start)

    def _conclude(self, attempt: Attempt) -> Verdict:
        verdict = conclude(self._context, attempt, self._care)
        # Attempts without a step lengthen the pause before the next one.
        made_a_step = (attempt.progress.step or 0) > (attempt.progress.step_start or 0)
        self._attempts_without_step = 0 if made_a_step or self._context.is_foreign else self._attempts_without_step + 1
        return verdict


def _install_handlers(events: Events) -> None:
    """Replace submitit's handlers, which requeue inside the handler. SimpleQueue.put may interrupt itself safely."""
    for number in SIGNALS:
        signal.signal(number, lambda n, _: events.put(Signalled(signal.Signals(n))))
    signal.signal(signal.SIGCONT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _exit_code(verdict: Verdict) -> int:
    if verdict.cause is Cause.COMPLETED:
        return EXIT_DONE
    return EXIT_FAILED if verdict.decision is Decision.GIVE_UP else EXIT_STOPPED
