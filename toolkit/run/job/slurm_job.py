"""The job as Slurm sees it: its state and its outcome, its time limit, and the site's settings."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Sequence
from enum import StrEnum
from functools import partial

from toolkit.base import hostlist, logs, outages
from toolkit.base.process_limits import limits
from toolkit.nodes.allocation import Allocation
from toolkit.slurm.commands import Settings, SlurmCommands, settings_of
from toolkit.slurm.jobs import JobRow
from toolkit.slurm.reachable import TIMEOUT_S, unreachable
from toolkit.slurm.states import Phase, phase

log = logs.get(__name__)


class JobOutcome(StrEnum):
    """How Slurm sees the job when its ranks have ended."""

    ABSENT = "absent"  #: no Slurm: local processes
    UNKNOWN = "unknown"  #: the controller does not answer, which says nothing about the job
    RUNNING = "running"  #: the job is the supervisor's to requeue
    PREEMPTED = "preempted"
    REQUEUED = "requeued"  #: Slurm, or an administrator, has requeued it already
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"  #: by a user or an administrator; never to be requeued
    NODE_FAILED = "node_failed"

    @property
    def is_left_alone(self) -> bool:
        """True if Slurm is not ending the job, as far as is known."""
        return self in (JobOutcome.RUNNING, JobOutcome.UNKNOWN, JobOutcome.ABSENT)


_BY_STATE = {
    "PREEMPTED": JobOutcome.PREEMPTED,
    "TIMEOUT": JobOutcome.TIMEOUT,
    "DEADLINE": JobOutcome.TIMEOUT,
    "NODE_FAIL": JobOutcome.NODE_FAILED,
    "BOOT_FAIL": JobOutcome.NODE_FAILED,
    "REVOKED": JobOutcome.RUNNING,  #: on another cluster of the federation
}
#: States in which nothing ends the job yet, except the grace time of a preemption.
RUNNING_STATES = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "CONFIGURING", "POWER_UP_NODE")
#: Slurm's times are whole seconds, and a preemption's two times are taken one after the other.
SAME_MOMENT_S = 1.5


def outcome_of_row(row: JobRow | None, restart_count: int) -> JobOutcome:
    """Return how Slurm sees the job, by one row.

    ``restart_count`` is the one that this job was started with. A preempted job stays RUNNING through its grace time
    with PreemptTime set. At the end Slurm requeues it, and the row already describes the next start: one restart more
    and no PreemptTime. A preemption that cancels leaves PreemptTime and EndTime equal; an ``scancel`` during the grace
    time leaves a later EndTime. COMPLETING for none of these reasons, and not out of time, is a cancellation. A job
    of several components is requeued if all of them are.
    """
    if row is None:
        return JobOutcome.UNKNOWN
    # The order matters: the row of a next start, then plain states, then COMPLETING by its times.
    if row.restarts > restart_count:
        return JobOutcome.NODE_FAILED if row.is_half_requeued else JobOutcome.REQUEUED
    if row.state in RUNNING_STATES:
        return JobOutcome.RUNNING if row.preempt_time is None else JobOutcome.PREEMPTED
    if row.state in _BY_STATE:
        return _BY_STATE[row.state]
    # In the queue, also where Slurm or a user holds it there; a state of a newer Slurm says nothing.
    known = phase(row.state)
    if known in (Phase.PENDING, Phase.UNKNOWN):
        return JobOutcome.REQUEUED if known is Phase.PENDING else JobOutcome.UNKNOWN
    if row.preempt_time is not None and (row.end_time or 0.0) - row.preempt_time <= SAME_MOMENT_S:
        return JobOutcome.PREEMPTED
    is_timeout = row.reason == "TimeLimit"
    if row.end_time is not None and row.start_time is not None and row.time_limit_s is not None:
        is_timeout |= row.end_time - row.start_time >= row.time_limit_s
    return JobOutcome.TIMEOUT if is_timeout else JobOutcome.CANCELLED


#: Clocks that differ by less count as equal: Slurm tells whole seconds, and asking takes time, too.
CLOCKS_AGREE_S = 3.0
#: Slurm's ``--signal`` may come this much earlier than asked for (sbatch(1) says 60 s), and clocks differ.
SIGNAL_EARLY_S = 75.0
#: Kept free before the time limit beside two saves and a step: this share of the limit, within these bounds.
CLOCK_SLACK_SHARE, CLOCK_SLACK_MIN_S, CLOCK_SLACK_MAX_S = 0.05, 10.0, 60.0


class SlurmJob:
    """The job of ``allocation``. ``row`` is its state when last looked at; None if unknown.

    A run without Slurm has a SlurmJob as well, of which nothing is ever known.
    """

    def __init__(self, slurm: SlurmCommands | None, allocation: Allocation, save_before_limit_s: float) -> None:
        """Take the job. Slurm sends SIGUSR2 ``save_before_limit_s`` before the limit; 0 for never."""
        self.slurm, self._allocation, self._signal_delay_s = slurm, allocation, save_before_limit_s
        self.row: JobRow | None = None
        self._judged: JobRow | None = None  #: that of the last answer of `state`
        self.settings = Settings()
        self._ahead_s = 0.0  #: ahead of the controller's clock, by which a job's times are
        self._has_its_signal = False
        self.has_answered_late = False  #: the row came only after the start, and the supervisor has not used it yet

    def look(self) -> None:
        """Ask Slurm for the job's row, the site's settings and the time. A thread repeats it until Slurm answers."""
        self.row = self.show()
        self._ask_about_site()
        if self.row is None and self.slurm is not None and self._allocation.job_id is not None:
            threading.Thread(target=self._look_until_known, daemon=True).start()

    def _look_until_known(self) -> None:
        while (row := self.show()) is None:
            time.sleep(limits().ask_of_job_every_s)
        self._ask_about_site()
        self.row, self.has_answered_late = row, True

    def _ask_about_site(self) -> None:
        if self.slurm is not None:
            clock = outages.retry_slurm(self.slurm.clock, "Slurm does not report its time", wait_s=0.0)
            self._ahead_s = 0.0 if clock is None else time.time() - clock
            if abs(self._ahead_s) > CLOCKS_AGREE_S:
                log.warning("this node's clock is %.0f s ahead of the controller's", self._ahead_s)
            self.settings = settings_of(self.slurm)

    def show(self, wait_s: float = 0.0) -> JobRow | None:
        """Return the job's row; None without Slurm, or if the controller has not answered for ``wait_s``."""
        slurm, job_id = self.slurm, self._allocation.job_id
        if slurm is None or job_id is None:
            return None
        return outages.retry_slurm(lambda: slurm.show_job(job_id), "Slurm does not report the job's state", wait_s)

    def outcome(self, wait_s: float = 0.0) -> JobOutcome:
        """Return what Slurm is about to do with this start of the job."""
        if self.slurm is None:
            return JobOutcome.ABSENT
        self._judged = self.show(wait_s)
        return outcome_of_row(self._judged, self._allocation.restart_count)

    def was_ending(self) -> bool:
        """True if Slurm was ending this start of the job at the last look."""
        return self.slurm is not None and not outcome_of_row(self.row, self._allocation.restart_count).is_left_alone

    def is_ending(self) -> bool:
        """True if Slurm reports that it ends this start of the job."""
        row = self.show()
        return row is not None and (row.state not in RUNNING_STATES or row.restarts > self._allocation.restart_count)

    def is_stopped(self) -> bool:
        """True if Slurm reports that the job's steps are stopped, by ``scancel --signal=STOP``."""
        row = self.show()
        return row is not None and row.state == "STOPPED"

    def was_preempted(self, job_id: str | None) -> bool:
        """True if that is another job than this one, and a preemption has ended it."""
        if self.slurm is None or job_id in (None, self._allocation.job_id):
            return False
        row = outages.retry_slurm(
            partial(self.slurm.show_job, job_id), "Slurm does not report how it ended", wait_s=0.0
        )
        return outcome_of_row(row, 0) is JobOutcome.PREEMPTED

    def lost_nodes(self, hosts: Sequence[str]) -> set[str]:
        """Return those of ``hosts`` that the job had lost when :meth:`state` found it RUNNING, also if they are back.

        Slurm takes a dead node; ``--no-kill`` keeps the others. Each step on a node that it has taken is refused.
        """
        parts = () if self._judged is None else (self._judged, *self._judged.others)
        kept = {host for part in parts for host in hostlist.expand(part.node_list)}
        return {*hosts} - kept if kept else set()

    def unreachable(self, hosts: Sequence[str], timeout_s: float = TIMEOUT_S) -> set[str]:
        """Return those of ``hosts`` whose slurmd does not answer within ``timeout_s``."""
        return unreachable(hosts, self.settings.slurmd_port, here=self._allocation.hosts[0], timeout_s=timeout_s)

    def takes_limit_signal(self, number: signal.Signals | None) -> bool:
        """True for the signal of ``cluster.save_before_limit_s``, if it comes at its time.

        The first such signal counts, and no later one. Slurm may send it a minute early, and at once where the delay is
        as long as the limit.
        """
        row, delay_s = self.row, self._signal_delay_s
        is_expected = number is signal.SIGUSR2 and delay_s > 0 and not self._has_its_signal
        if not is_expected or row is None or row.end_time is None or row.time_limit_s is None:
            return False
        if self._slurms_time() <= row.end_time - delay_s - SIGNAL_EARLY_S:
            return False
        self._has_its_signal = True
        log.info("SIGUSR2: Slurm reports that the limit is %d s away, or up to a minute more", delay_s)
        return True

    def left_s(self) -> float:
        """Return the seconds until Slurm ends the job, by its current answer; infinity where that is not known."""
        self.row = self.show() or self.row
        return math.inf if self.row is None or self.row.end_time is None else self.row.end_time - self._slurms_time()

    def is_nearly_over(self, save_s: float, early_s: float = 0.0) -> bool:
        """True if the job must stop for its time limit within ``early_s``. A save takes ``save_s``."""
        row = self.row
        if row is None or row.end_time is None or row.time_limit_s is None:
            return False
        slack_s = min(max(CLOCK_SLACK_SHARE * row.time_limit_s, CLOCK_SLACK_MIN_S), CLOCK_SLACK_MAX_S)
        margin_s = max(slack_s + 2 * save_s, self._signal_delay_s)
        return self._slurms_time() + early_s > row.end_time - min(margin_s, row.time_limit_s / 2)

    def is_nearly_over_still(self, save_s: float) -> bool:
        """Like `is_nearly_over`, by Slurm's current answer, too: the limit may have been raised meanwhile."""
        if not self.is_nearly_over(save_s):
            return False
        self.row = self.show() or self.row
        return self.is_nearly_over(save_s)

    def _slurms_time(self) -> float:
        """Return the time by the controller's clock."""
        return time.time() - self._ahead_s
