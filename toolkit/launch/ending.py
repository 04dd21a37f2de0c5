"""What the end of an attempt means: a pure function from what was seen to (cause, decision, one line)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Cause(StrEnum):
    """Why an attempt ended."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    PREEMPTED = "preempted"
    TIMEOUT = "timeout"
    CRASHED = "crashed"
    OUT_OF_MEMORY = "out_of_memory"
    NODE_FAILURE = "node_failure"
    HANG = "hang"
    CANCELLED = "cancelled"


class Decision(StrEnum):
    """What happens next."""

    FINISH = "finish"
    REQUEUE = "requeue"
    RESTART = "restart"
    GIVE_UP = "give_up"


@dataclass(frozen=True)
class RankFailure:
    """One rank that did not end well, as srun, the kernel or the rank itself told it.

    ``how`` is ``signal 9``, ``exit 1`` or an exception's type and message; ``time`` is in seconds since the epoch.
    """

    rank: int | None
    host: str
    how: str
    time: float
    by_signal: bool = False
    traceback: str = ""


@dataclass(frozen=True)
class Facts:
    """Everything that the decision may depend on."""

    exit_code: int
    failures: tuple[RankFailure, ...] = ()
    #: the supervisor was told to end: "cancel" by `toolkit cancel` or Ctrl-C, "signal" by whoever sent SIGTERM
    told: str | None = None
    #: what scontrol says of the job, in our words: running, preempted, timeout, cancelled; None when nobody can say
    slurm: str | None = None
    crashes_before: int = 0
    max_failures: int = 0


@dataclass(frozen=True)
class Ending:
    """The verdict, with one line for a reader."""

    cause: Cause
    decision: Decision
    line: str
    first_failure: RankFailure | None = field(default=None)


def first_failure(failures: tuple[RankFailure, ...]) -> RankFailure | None:
    """The failure that caused the others.

    A rank that dies takes its peers with it: their collectives raise within milliseconds, often before anybody has
    reported the death. So a rank that a signal killed comes first, then the earliest exception, then the earliest
    bare exit code.
    """
    return min(failures, key=lambda f: (not f.by_signal, not f.traceback, f.time), default=None)


def judge(facts: Facts) -> Ending:
    """Cause and decision of an attempt's end. Whoever was cancelled is never brought back."""
    if facts.told == "cancel" or facts.slurm == "cancelled":
        return Ending(Cause.CANCELLED, Decision.GIVE_UP, "cancelled; `toolkit resume` goes on from the last checkpoint")
    if facts.exit_code == 0 and not facts.failures:
        return Ending(Cause.COMPLETED, Decision.FINISH, "completed")
    if facts.slurm == "preempted":
        return Ending(Cause.PREEMPTED, Decision.REQUEUE, "preempted by Slurm; resumes from the last checkpoint")
    if facts.slurm == "timeout":
        return Ending(Cause.TIMEOUT, Decision.GIVE_UP, "out of time; raise cluster.time_min and `toolkit resume` it")
    if facts.told:
        return Ending(Cause.CANCELLED, Decision.GIVE_UP, "ended by SIGTERM; `toolkit resume` goes on")
    return _judge_crash(facts)


def _judge_crash(facts: Facts) -> Ending:
    first = first_failure(facts.failures)
    what = _describe(first) if first else f"the ranks ended with exit code {facts.exit_code}"
    crashes = facts.crashes_before + 1
    if crashes > facts.max_failures:
        line = f"{what}; given up after {crashes} failures (retry.max_failures: {facts.max_failures})"
        return Ending(Cause.CRASHED, Decision.GIVE_UP, line, first)
    line = f"{what}; restart {crashes} of {facts.max_failures}"
    return Ending(Cause.CRASHED, Decision.RESTART, line, first)


def _describe(failure: RankFailure) -> str:
    who = "the store host" if failure.rank is None else f"rank {failure.rank}"
    return f"{who} on {failure.host}: {failure.how}"
