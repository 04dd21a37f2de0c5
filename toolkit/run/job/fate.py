"""What Slurm makes of the job, by one row of scontrol."""

from __future__ import annotations

from enum import StrEnum

from toolkit.slurm.jobs import JobRow


class JobFate(StrEnum):
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
        return self in (JobFate.RUNNING, JobFate.UNKNOWN, JobFate.ABSENT)


_BY_STATE = {
    "PREEMPTED": JobFate.PREEMPTED,
    "TIMEOUT": JobFate.TIMEOUT,
    "DEADLINE": JobFate.TIMEOUT,
    "NODE_FAIL": JobFate.NODE_FAILED,
    "BOOT_FAIL": JobFate.NODE_FAILED,
    "REQUEUED": JobFate.REQUEUED,
    "PENDING": JobFate.REQUEUED,
}
#: States in which nothing ends the job yet, except the grace time of a preemption.
RUNNING_STATES = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING")
#: Slurm's times are whole seconds, and a preemption's two times are taken one after the other.
SAME_MOMENT_S = 1.5


def fate_of_row(row: JobRow | None, restart_count: int) -> JobFate:
    """Return how Slurm sees the job, by one row.

    ``restart_count`` is the one that this job was started with. A preempted job stays RUNNING through its grace time
    with PreemptTime set. At the end Slurm requeues it, and the row already describes the next start: one restart more
    and no PreemptTime. A preemption that cancels leaves PreemptTime and EndTime equal; an ``scancel`` during the grace
    time leaves a later EndTime. COMPLETING for none of these reasons, and not out of time, is a cancellation.
    """
    if row is None:
        return JobFate.UNKNOWN
    # The order matters: the row of a next start, then plain states, then COMPLETING by its times.
    if row.restarts > restart_count:
        return JobFate.REQUEUED
    if row.state in RUNNING_STATES:
        return JobFate.RUNNING if row.preempt_time is None else JobFate.PREEMPTED
    if row.state in _BY_STATE:
        return _BY_STATE[row.state]
    if row.preempt_time is not None and (row.end_time or 0.0) - row.preempt_time <= SAME_MOMENT_S:
        return JobFate.PREEMPTED
    is_timeout = row.reason == "TimeLimit"
    if row.end_time is not None and row.start_time is not None and row.time_limit_s is not None:
        is_timeout |= row.end_time - row.start_time >= row.time_limit_s
    return JobFate.TIMEOUT if is_timeout else JobFate.CANCELLED
