"""The facts that the verdict about an attempt's end depends on, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from toolkit.files.run_files import FirstFailure
from toolkit.run.job.slurm_job import JobFate


class Cause(StrEnum):
    """Why an attempt ended."""

    COMPLETED = "completed"
    MOVED = "moved"
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


#: Behind an exception that a script may have caught: what it printed after that.
THEN_PRINTED = "; then it printed: "


class Stop(StrEnum):
    """Why the supervisor ended the ranks, or asked them to stop."""

    CANCEL = "cancel"  #: `toolkit cancel`
    USER = "user"  #: `toolkit stop`, or without Slurm any signal, such as Ctrl-C
    CLOCK = "clock"  #: the time limit is near
    MOVE = "move"  #: a spare node is to replace one that is drained or sick
    SIGNAL = "signal"  #: TERM, USR1 or USR2, from Slurm, a site or a user; the row may say why


@dataclass(frozen=True)
class RankFailure:
    """One rank that did not end well. srun, the kernel or the rank itself has reported it.

    ``how`` is ``killed by SIGKILL``, ``exit code 1`` or an exception's type and message; ``time`` is in seconds since
    the epoch.
    """

    rank: int | None
    host: str
    how: str
    time: float
    by_signal: bool = False
    traceback: str = ""
    out_of_memory: bool = False
    comes_again: bool = False  #: a wrong config, missing data, or the job's own code: no restart helps
    where: str | None = None  #: ``train.py:42 in forward``: the frame from which its exception comes
    at_launch: bool = False  #: Slurm could not start it, or its node cannot import torch
    blames_node: bool = False  #: a device, driver or network error of the node, or an end before the first report
    exit_code: int | None = None  #: of an end that the rank itself has not explained
    is_consequence: bool = False  #: its own words say that another process ended first
    unreached: str | None = None  #: the address to which it could not connect, where its error names one


@dataclass(frozen=True)
class Budgets:
    """The part of the config's ``retry`` section that is judged here."""

    max_failures: int = 4
    max_requeues: int = 100
    no_progress_attempts: int = 2


@dataclass(frozen=True)
class Past:
    """An earlier attempt: how it ended, and the highest step that it reached.

    ``step_end`` is None if it reached none.
    """

    cause: str
    decision: str
    step_end: int | None
    suspect: str | None = None  #: the node that may have been to blame; after a node failure, the one that was
    step_start: int | None = None
    step_saved: int | None = None  #: the newest checkpoint after it
    failure: FirstFailure | None = None  #: what ended it
    gained_s: float = 0.0  #: in steps that it saved and no earlier attempt had saved, see `goodput.gained_s`
    lost_s: float = 0.0  #: the rest of its time: start-up, waiting in a hang, unsaved steps


@dataclass(frozen=True)
class Facts:
    """Everything that the verdict may depend on."""

    exit_code: int
    failures: tuple[RankFailure, ...] = ()
    stopped_cleanly: bool = False  #: every rank ended with 0 or 75, and what they had made is saved
    stop: Stop | None = None
    killed_after_s: float | None = None  #: from the request to stop to SIGKILL
    vacated_nodes: tuple[str, ...] = ()  #: for ``Stop.MOVE``: the nodes that are given up, each with its reason
    slurm: JobFate = JobFate.ABSENT
    lost_nodes: tuple[str, ...] = ()  #: reported by srun, or because no process on them answers
    can_go_on: bool = False  #: enough other nodes are left in the allocation, or spares
    condemned: str | None = None  #: the node excluded because of this attempt; only if enough others are left
    hang: RankFailure | None = None  #: the rank that all waited for when the attempt was ended for lack of progress
    cut_links: Sequence[tuple[str, str]] = ()  #: pairs of nodes: the first could not connect to the second
    hosts: Sequence[str] = ()  #: the attempt's nodes, the batch host first if it is among them
    step_start: int | None = None
    step_end: int | None = None
    step_saved: int | None = None  #: this and the next two are as in `Past`
    gained_s: float = 0.0
    lost_s: float = 0.0
    has_result: bool = False  #: rank 0 has delivered the run's result
    is_foreign: bool = False  #: a script without the toolkit: no result, and no steps to measure progress by
    history: Sequence[Past] = ()
    budgets: Budgets = Budgets()

    def as_past(self) -> Past:
        """Return this attempt as later ones see it. Its cause and decision are not known yet."""
        return Past(
            "now",
            "",
            self.step_end,
            step_start=self.step_start,
            step_saved=self.step_saved,
            gained_s=self.gained_s,
            lost_s=self.lost_s,
        )


@dataclass(frozen=True)
class Verdict:
    """The verdict, with one line for a reader."""

    cause: Cause
    decision: Decision
    line: str
    first_failure: RankFailure | None = None
    suspect: str | None = None  #: the node that may be to blame


def first_failure(failures: Sequence[RankFailure]) -> RankFailure | None:
    """Return the failure that caused the others.

    A rank that dies takes its peers with it: their collectives raise within milliseconds, often before the death is
    reported. So a rank that could not be started comes first, then one that a signal killed, a device error, the
    earliest exception, the earliest bare exit code, the earliest exception about another process that has ended.
    """

    def order(failure: RankFailure) -> tuple[bool, bool, bool, bool, bool, float]:
        return (
            not failure.at_launch,
            not failure.by_signal,
            not failure.blames_node,
            failure.is_consequence,
            not failure.traceback,
            failure.time,
        )

    return min(failures, key=order, default=None)
