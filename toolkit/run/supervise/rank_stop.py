"""The one way in which ranks are asked to stop, for a user, a signal or the clock.

The store's agreement is proposed. The ranks commit and exit with 75, and the verdict judges that like any other end.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from queue import Empty

from toolkit.base import logs
from toolkit.base.process_limits import limits
from toolkit.files.run_files import RunState
from toolkit.nodes.agent.messages import AgentSignalled
from toolkit.nodes.start.agents import Events
from toolkit.nodes.start.launcher import RunningRanks, Store
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.verdict import StopReason
from toolkit.run.records.user_requests import Intent
from toolkit.run.supervise.supervisor_components import Context

#: What the verdict may take, at the end of a job, with questions to Slurm and a requeue.
VERDICT_S = 5.0

log = logs.get(__name__)


@dataclass(frozen=True)
class StopAsked:
    """The event that this process was asked to stop: by a signal, or by a user's request in the run's folder (None)."""

    by: signal.Signals | None

    def __str__(self) -> str:
        return "a user's request" if self.by is None else self.by.name


def why_stop(context: Context, by: signal.Signals | None) -> StopReason:
    """Return why this process was asked to stop."""
    wanted = context.asked()
    if wanted is Intent.CANCEL:
        return StopReason.CANCEL
    if wanted is Intent.STOP or by in (None, signal.SIGINT) or context.allocation.job_id is None:
        return StopReason.USER
    return StopReason.SIGNAL


def is_for_limit(context: Context, asked: StopAsked) -> bool:
    """True for Slurm's signal before the time limit. No user wants a stop then, and the clock is watched here."""
    return not context.asked() and context.job.takes_limit_signal(asked.by)


def is_to_stop(context: Context) -> bool:
    """True if a signal waits in the queue, or Slurm ends the job."""
    return is_stop_waiting(context.events) or not context.job.outcome().is_left_alone


def is_stop_waiting(events: Events) -> bool:
    """True if a signal waits in the queue, which keeps its events. Call it where nobody else takes them."""
    waiting = [events.get() for _ in range(events.qsize())]
    for event in waiting:  # put them back: answers of late nodes may be among them
        events.put(event)
    return any(isinstance(event, StopAsked) for event in waiting)


def stopped_in_pause(context: Context, attempt: Attempt, pause_s: float) -> bool:
    """Wait ``pause_s`` while there are no ranks; return whether the run is to stop."""
    deadline = time.monotonic() + pause_s
    while attempt.stop is None:
        try:
            event = context.events.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            break
        if isinstance(event, Exception):  # as in an attempt: the agents are served no more
            raise event
        if isinstance(event, AgentSignalled) and not context.job.outcome().is_left_alone:
            event = StopAsked(signal.SIGTERM)
        if isinstance(event, StopAsked) and not is_for_limit(context, event):
            attempt.note_stop(why_stop(context, event.by))
            log.warning("%s: the ranks are not started", event)
    return attempt.stop is not None


class RankStopper:
    """Asks the ranks of one attempt to stop."""

    def __init__(self, context: Context, attempt: Attempt, ranks: RunningRanks, store: Store) -> None:
        self._context, self._attempt, self._ranks, self._store = context, attempt, ranks, store
        #: When to ask whether Slurm is ending the job: it would kill this process, too.
        self._ask_slurm_at: float | None = None

    def ask(self, stop: StopReason, *, have_signal: bool = False) -> None:
        """Ask the ranks to stop, see `Attempt.note_stop`. ``have_signal``: they have SIGTERM already."""
        attempt, context = self._attempt, self._context
        # Without Slurm a cancel kills at once.
        if stop is StopReason.CANCEL and context.allocation.job_id is None:
            attempt.kill_within(0.0)
        if not attempt.note_stop(stop):
            return
        context.journal.set_status(RunState.STOPPING, attempt)  # now: if we are killed before the end, this tells why
        if attempt.exit_code is not None:  # the ranks and the store have ended; the verdict still needs the stop
            return
        # A user script knows no agreement: it gets a signal, and what time there is.
        if not context.is_script:
            self._store.propose("stop", by=f"the supervisor ({stop})")
        elif not have_signal:
            self._ranks.send_signal(signal.SIGTERM)
        if stop is StopReason.MOVE:  # it has time for the longest save; a hang is noticed as in training
            return
        if context.is_script and stop is not StopReason.CANCEL:
            attempt.kill_after(self._left_s(stop))
        else:
            attempt.kill_within(limits().stop_s)

    def _left_s(self, stop: StopReason) -> float:
        """Return how long a script may take to save: all the time until a limit or Slurm's kill.

        If neither is near, it is what the config reserves for the last save before a limit.
        """
        job, reserved_s = self._context.job, self._context.config.cluster.save_before_limit_s
        left_s = job.left_s() - VERDICT_S
        if job.was_ending():
            return max(left_s, self._until_kill_s())
        return left_s if stop is StopReason.CLOCK else min(left_s, max(reserved_s, limits().script_stop_s))

    def _until_kill_s(self) -> float:
        """Return the seconds from Slurm's SIGTERM until its SIGKILL, less the time that the verdict takes."""
        wait_s = self._context.job.settings.kill_wait_s
        return max(wait_s / 2, wait_s - VERDICT_S)

    def take_ranks_signal(self) -> None:
        """Stop because the agents and the ranks have got SIGTERM, if Slurm ends the job.

        A preemption with grace time signals these alone, and some ranks may not have started. Others stop by their own
        signal. A signal by scancel is for a script.
        """
        if self._attempt.stop is None and not self._context.job.outcome().is_left_alone:
            log.warning("Slurm ends the job, and has sent the ranks SIGTERM")
            self.ask(why_stop(self._context, signal.SIGTERM), have_signal=True)

    def take(self, asked: StopAsked) -> None:
        """Stop, except for the signal by which Slurm announces the time limit."""
        context = self._context
        if is_for_limit(context, asked):
            return
        if self._attempt.stop is None:
            log.warning("%s: asking the ranks to stop", StopAsked(None) if context.asked() else asked)
        if asked.by is signal.SIGTERM and context.job.slurm is not None:
            self._ask_slurm_at = time.monotonic() + self._until_kill_s()
        self.ask(why_stop(context, asked.by))

    def watch_the_clock(self) -> None:
        """Stop in time before the limit, without any signal configured."""
        attempt = self._attempt
        if attempt.stop is None and self._context.job.is_nearly_over_still(attempt.progress.save_s or 0.0):
            log.warning("the time limit is near: asking the ranks to stop")
            self.ask(StopReason.CLOCK)

    def advance_slurm_check(self, at: float) -> None:
        """Ask Slurm at this time at the latest, where it is to be asked: the ranks are gone by then."""
        if self._ask_slurm_at is not None:
            self._ask_slurm_at = min(self._ask_slurm_at, at)

    def leave_the_rest_to_slurm(self) -> None:
        """Wait no longer for ranks once Slurm is about to kill this process, whose verdict would then be lost.

        It does so KillWait after SIGTERM. (A rank whose SIGTERM came between fork and exec lives, and srun waits.)
        """
        if self._ask_slurm_at is None or time.monotonic() < self._ask_slurm_at:
            return
        self._ask_slurm_at = None
        if self._context.job.is_ending():
            log.warning("Slurm ends the job: not waiting for its ranks any longer")
            self._attempt.forget_stopped()  # whether the others have committed, too, will not be known
            self._ranks.abandon()
