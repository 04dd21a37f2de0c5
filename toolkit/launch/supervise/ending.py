"""What the end of an attempt means: a pure function from the facts to (cause, decision, one line).

It uses three sources. The first is how the ranks ended: from the agents or srun, and from the ranks' error files; exit
code 75 is a stop that was agreed and committed. The second is what rank 0 reported, the third one row of ``scontrol
show job``. The rules stand in :func:`judge` in the order of their strength. The rows that they were made for, recorded
on Slurm 22.05 and 24.11, are in ``tests/unit/launch/test_ending.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile

from toolkit.slurm.jobs import JobRow


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


#: A node that ended this many attempts is bad: by a signal of unknown sender, a device error, or a hang.
SUSPICIONS_TO_CONDEMN = 2
#: After this many requeues in a row for bad nodes, without a step in between, a job takes the nodes that it gets.
MAX_FRUITLESS_REQUEUES = 2
#: A run may lose this many times the average time of a failed attempt from the time that it has gained.
RESERVE = 2.0
#: Failures from which the mean of that time is taken for known.
RESERVE_AFTER = 10
#: An attempt that takes less than this share of the mean is no usual one.
SHORT_SHARE = 0.1
#: A verdict's line names at most this many connections that could not be made.
MOST_LINKS = 4
#: Causes that are the run's own fault and count against ``retry``.
OWN_FAULT = frozenset({Cause.CRASHED, Cause.HANG, Cause.OUT_OF_MEMORY})


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
    return JobFate.TIMEOUT if row.reason == "TimeLimit" or _used_up(row) else JobFate.CANCELLED


def _used_up(row: JobRow) -> bool:
    if row.end_time is None or row.start_time is None or row.time_limit_s is None:
        return False
    return row.end_time - row.start_time >= row.time_limit_s


class Stop(StrEnum):
    """Why the supervisor ended the ranks, or asked them to stop."""

    CANCEL = "cancel"  #: `toolkit cancel`
    USER = "user"  #: `toolkit stop`, or Ctrl-C where the run lives in a terminal
    CLOCK = "clock"  #: the time limit is near
    MOVE = "move"  #: a spare node is to replace one that is drained or sick
    SIGNAL = "signal"  #: TERM, USR1 or USR2, from Slurm, a site or a user; the row may say why


@dataclass(frozen=True)
class RankFailure:
    """One rank that did not end well, as reported by srun, the kernel or the rank itself.

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
    is_request_error: bool = False  #: a wrong config or missing data: no restart helps
    at_launch: bool = False  #: Slurm could not start it
    blames_node: bool = False  #: a device, driver or network error of the node, or an end before the first report
    unreached: str | None = None  #: the address to which it could not connect, where its error names one


@dataclass(frozen=True)
class Budgets:
    """The part of the config's ``retry`` section that is judged here."""

    max_failures: int = 4
    max_requeues: int = 100
    no_progress_attempts: int = 2


@dataclass(frozen=True)
class Past:
    """An earlier attempt: how it ended, and the highest step that it reached (None: it reached none)."""

    cause: str
    decision: str
    step_end: int | None
    suspect: str | None = None  #: the node that may have been to blame; after a node failure, the one that was
    step_start: int | None = None
    step_saved: int | None = None  #: the newest checkpoint after it
    gained_s: float = 0.0  #: in steps that it saved and no earlier attempt had saved, see `goodput.gained_s`
    lost_s: float = 0.0  #: the rest of its time: start-up, waiting in a hang, unsaved steps


@dataclass(frozen=True)
class Facts:
    """Everything that the verdict may depend on."""

    exit_code: int
    failures: tuple[RankFailure, ...] = ()
    stopped_cleanly: bool = False  #: every rank ended with 0 or 75, and at least one with 75
    stop: Stop | None = None
    left_nodes: tuple[str, ...] = ()  #: for ``Stop.MOVE``: the nodes that are given up, each with its reason
    slurm: JobFate = JobFate.ABSENT
    lost_nodes: tuple[str, ...] = ()  #: reported by srun, or because no process on them answers
    can_go_on: bool = False  #: enough other nodes are left in the allocation, or spares
    condemned: str | None = None  #: a node that this attempt's suspicion has excluded, while enough others are left
    hang: RankFailure | None = None  #: the rank that all waited for when the attempt was ended for lack of progress
    cut_links: Sequence[tuple[str, str]] = ()  #: pairs of nodes: the first could not connect to the second
    hosts: Sequence[str] = ()  #: the attempt's nodes, the batch host first if it is among them
    step_start: int | None = None
    step_end: int | None = None
    step_saved: int | None = None  #: this and the next two are as in `Past`
    gained_s: float = 0.0
    lost_s: float = 0.0
    has_result: bool = False  #: rank 0 has delivered the run's result
    lost_ranks: bool = False  #: ranks that the strategy can do without have died
    is_foreign: bool = False  #: a script without the toolkit: no result, and no steps to measure progress by
    history: Sequence[Past] = ()
    budgets: Budgets = Budgets()

    def as_past(self) -> Past:
        """Return this attempt in the form that later ones get, before its cause and decision are known."""
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
class Ending:
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
    earliest exception, the earliest bare exit code.
    """

    def order(failure: RankFailure) -> tuple[bool, bool, bool, bool, float]:
        return (
            not failure.at_launch,
            not failure.by_signal,
            not failure.blames_node,
            not failure.traceback,
            failure.time,
        )

    return min(failures, key=order, default=None)


def unfit_nodes(facts: Facts, hosts: Sequence[str]) -> set[str]:
    """Return the nodes on which Slurm could not start ranks, if the nodes are at fault. ``hosts`` are by rank.

    The nodes are not at fault where more than half of them failed: then a folder is missing, or a path is wrong. Nor
    are they after requeues for bad nodes that were all in vain, nor in a job that is being ended.
    """
    unfit = {failure.host for failure in facts.failures if failure.at_launch and failure.rank is not None}
    is_common = len(unfit) > len({*hosts}) / 2
    is_hopeless = fruitless_requeues(facts.history) >= MAX_FRUITLESS_REQUEUES
    return set() if is_common or is_hopeless or not _is_left_alone(facts) else unfit


def fruitless_requeues(history: Sequence[Past]) -> int:
    """Count the latest attempts that ended in a requeue for bad nodes, before their first step."""

    def is_fruitless(past: Past) -> bool:
        return past.step_end is None and past.cause == Cause.NODE_FAILURE and past.decision == Decision.REQUEUE

    return sum(1 for _ in takewhile(is_fruitless, reversed(history)))


def has_completed(facts: Facts) -> bool:
    """True if rank 0 has delivered the run's result, and every needed rank ended with 0.

    Exit codes alone say little: srun ends with 0 after ``task 0 launch failed``. A foreign script delivers no result.
    It has completed if all its ranks ended with 0 and nothing had told it to end: a script that saves and exits with 0
    at SIGTERM has more to do.
    """
    if facts.failures or facts.stopped_cleanly or facts.lost_nodes:
        return False
    if facts.is_foreign:
        return facts.exit_code == 0 and _is_left_alone(facts)
    return facts.has_result and (facts.exit_code == 0 or facts.lost_ranks)


def judge(facts: Facts) -> Ending:
    """Return cause and decision of an attempt's end. A cancelled run is never brought back."""
    if has_completed(facts):
        return Ending(Cause.COMPLETED, Decision.FINISH, "completed")
    # First what people asked for, then what Slurm did to the job, then what the ranks did.
    if facts.stop is Stop.CANCEL or facts.slurm is JobFate.CANCELLED:
        return Ending(Cause.CANCELLED, Decision.GIVE_UP, f"cancelled{_at(facts)}")
    if facts.stop is Stop.USER:
        return Ending(Cause.STOPPED, Decision.FINISH, f"stopped as asked{_at(facts)}; {_kept(facts)}")
    # Slurm has taken the job back, or too few nodes are left to go on.
    if facts.slurm in (JobFate.REQUEUED, JobFate.NODE_FAILED) or (facts.lost_nodes and not _is_mendable(facts)):
        return _judge_taken_away(facts)
    if facts.slurm is JobFate.PREEMPTED:
        return _requeue(facts, Cause.PREEMPTED, f"preempted{_at(facts)}; {_kept(facts)}")
    if facts.slurm is JobFate.TIMEOUT or facts.stop is Stop.CLOCK:
        return _judge_timeout(facts)
    # Slurm leaves the job alone. A lost node is replaced from within the job.
    if facts.lost_nodes:
        line = f"{_loss(facts)}; {_kept(facts)}, on other nodes of the job"
        return Ending(Cause.NODE_FAILURE, Decision.RESTART, line, first_failure(facts.failures))
    # The ranks committed a checkpoint and stopped: to move, or because a signal reached them.
    if facts.stopped_cleanly and facts.stop is Stop.MOVE:
        line = f"moved off {'; '.join(facts.left_nodes)}; stopped{_at(facts)}, {_kept(facts)}"
        return Ending(Cause.MOVED, Decision.RESTART, line)
    if facts.stopped_cleanly:
        return _judge_stopped(facts)
    # Told to end, but without a stop that all ranks have committed.
    if facts.stop is Stop.SIGNAL:
        return _judge_told_to_end(facts)
    return _judge_fault(facts)


def _is_mendable(facts: Facts) -> bool:
    """True if a lost node can be replaced within the job. Not worth it in a job that is about to be taken away."""
    return facts.can_go_on and _is_left_alone(facts)


def _is_left_alone(facts: Facts) -> bool:
    """True if no request ends the run, nor does Slurm, as far as it answers."""
    return facts.stop in (None, Stop.MOVE) and facts.slurm in (JobFate.RUNNING, JobFate.UNKNOWN, JobFate.ABSENT)


def _judge_taken_away(facts: Facts) -> Ending:
    if facts.lost_nodes or facts.slurm is JobFate.NODE_FAILED:
        return _requeue(facts, Cause.NODE_FAILURE, f"{_loss(facts)}; {_kept(facts)}")
    return _requeue(facts, Cause.PREEMPTED, f"put back into the queue by Slurm{_at(facts)}; {_kept(facts)}")


def _loss(facts: Facts) -> str:
    first = first_failure(facts.failures)
    if first is not None and first.at_launch:
        return _describe(first)
    return (f"lost {', '.join(facts.lost_nodes)}" if facts.lost_nodes else "a node failed") + _at(facts)


def _judge_timeout(facts: Facts) -> Ending:
    """Requeue for free while steps are gained. A run may take ten time limits if it gains steps."""
    if _stuck(facts) >= facts.budgets.no_progress_attempts:
        line = f"out of time{_at(facts)} without a new step for {_stuck(facts)} attempts; raise cluster.time_min"
        return Ending(Cause.TIMEOUT, Decision.GIVE_UP, line)
    return _requeue(facts, Cause.TIMEOUT, f"out of time{_at(facts)}; {_kept(facts)}")


def _judge_stopped(facts: Facts) -> Ending:
    """Requeue after a signal at a rank of unknown reason: the run is not finished. Without Slurm it ends here."""
    if facts.slurm is JobFate.ABSENT:
        return Ending(Cause.STOPPED, Decision.FINISH, f"stopped by a signal{_at(facts)}; {_kept(facts)}")
    return _requeue(facts, Cause.STOPPED, f"stopped by a signal{_at(facts)}; {_kept(facts)}")


def _judge_told_to_end(facts: Facts) -> Ending:
    """Give up after SIGTERM if Slurm does not answer or is absent.

    A requeue could revive a cancelled run. If it was a preemption after all, Slurm restarts the job itself, and the
    restarted job finds this run.
    """
    if facts.slurm is JobFate.RUNNING:
        return _requeue(facts, Cause.STOPPED, f"told to end by a signal{_at(facts)}; {_kept(facts)}")
    return Ending(Cause.CANCELLED, Decision.GIVE_UP, f"told to end by SIGTERM{_at(facts)}")


def _judge_fault(facts: Facts) -> Ending:
    first = facts.hang or first_failure(facts.failures)
    cause = Cause.HANG if facts.hang else Cause.CRASHED
    what = (_describe(first) if first else _describe_exit(facts)) + _describe_links(facts)
    # Failures that would come again unchanged end the run at once.
    if any(failure.out_of_memory for failure in facts.failures):
        line = f"{what}: out of memory; would fail again unchanged: give it more (cluster.mem_gb) or less to hold"
        return Ending(Cause.OUT_OF_MEMORY, Decision.GIVE_UP, line, first)
    if first is not None and first.is_request_error:
        return Ending(Cause.CRASHED, Decision.GIVE_UP, f"{what}; would fail again unchanged", first)
    # A failure that a condemned node explains is not the run's: it costs no budget.
    suspect = _cut_off(facts) or _suspect(first, cause)
    if facts.condemned is not None and _is_first_to_blame(facts):
        line = f"{what}; node {facts.condemned} is to blame: {_kept(facts)}, on other nodes of the job"
        return Ending(Cause.NODE_FAILURE, Decision.RESTART, line, first, suspect)
    if facts.budgets.max_failures == 0:
        return Ending(cause, Decision.GIVE_UP, f"{what}; given up (retry.max_failures: 0)", first, suspect)
    # Now the run's own budgets: failures that cost more than they gained, then attempts without progress.
    count, since = _failures(facts)
    limit, after = facts.budgets.max_failures, "" if since is None else f" since step {since}"
    if count > limit:
        line = f"{what}; given up after {count} failures{after} (retry.max_failures: {limit})"
        return Ending(cause, Decision.GIVE_UP, line, first, suspect)
    stuck, best = _stuck(facts), _best(facts.history)
    if stuck >= facts.budgets.no_progress_attempts:
        line = f"{what}; given up: {stuck} attempts got no further than step {best} (retry.no_progress_attempts)"
        return Ending(cause, Decision.GIVE_UP, line, first, suspect)
    if facts.gained_s > facts.lost_s:
        line = f"{what}; restart from step {facts.step_saved}, free: the attempt gained more time than it lost"
    else:
        line = f"{what}; restart after failure {count} of {limit}{after}"
    return Ending(cause, Decision.RESTART, line, first, suspect)


def _describe_exit(facts: Facts) -> str:
    if facts.exit_code != 0:
        return f"the ranks ended with exit code {facts.exit_code}"
    return "every rank ended with exit code 0, but rank 0 handed over no result (Trainer.fit does, or Session.finish)"


def _suspect(first: RankFailure | None, cause: Cause) -> str | None:
    """Return the node that may be to blame. Who sent a signal, or why a rank hung or a device failed, is unknown."""
    if first is None or first.rank is None:
        return None
    is_odd = first.by_signal or first.blames_node or first.at_launch or cause is Cause.HANG
    return first.host if is_odd else None


def _cut_off(facts: Facts) -> str | None:
    """Return the node that is an end of all failed connections; None where several may be at fault.

    Of a single connection's two ends it is the later node of the attempt. The job can go on without either, and the
    batch host, where the ranks meet, comes first.
    """
    links = {frozenset(link) for link in facts.cut_links}
    ends = frozenset.intersection(*links) if links else frozenset[str]()
    return max(ends, key=list(facts.hosts).index, default=None)


def _describe_links(facts: Facts) -> str:
    """Name both ends of the connections that could not be made, the first few."""
    links = [f"{host} to {peer}" for host, peer in facts.cut_links]
    more = f" and {len(links) - MOST_LINKS} more" if len(links) > MOST_LINKS else ""
    return f"; no connection from {', '.join(links[:MOST_LINKS])}{more}" if links else ""


def _is_first_to_blame(facts: Facts) -> bool:
    """True if no other node was condemned since the last new step. With a second one the run itself is at fault."""
    for index in range(len(facts.history), 0, -1):
        past, before = facts.history[index - 1], facts.history[: index - 1]
        if (past.step_end or 0) > _best(before):
            return True
        if past.cause == Cause.NODE_FAILURE and past.suspect not in (None, facts.condemned):
            return False
    return True


def _failures(facts: Facts) -> tuple[int, int | None]:
    """Count the failures that cost more than they gained, since the run last made up for them.

    An attempt that gained more time than it lost is free. The count is reset while the run has gained more time than
    its failures have lost. So failures never cost a run more time than it gains, except for the last ``max_failures`` +
    1. A count that is never reset would give up each large job in the end. One that any gain resets would let a run
    lose hours for each minute that it gains.

    The gain that the run keeps for later failures is at most ``RESERVE`` times the mean time of its failed attempts.
    Where these take an hour, several failures in a row may be chance. One that takes less than ``SHORT_SHARE`` of the
    mean counts in any case: such a run may have lost the ability to start.

    Also return the step of the checkpoint that was the newest at the last reset; None if there was no reset.
    """
    own = {id(past) for past in _own_faults(facts)}
    attempts = [*facts.history, facts.as_past()]
    count, balance_s, since = 0, 0.0, None
    failures, mean_s = 0, 0.0
    for index, past in enumerate(attempts):
        is_failure = id(past) in own or index == len(facts.history)
        gained_more, took_s = past.gained_s > past.lost_s, past.gained_s + past.lost_s
        is_short = took_s < SHORT_SHARE * mean_s
        if is_failure:
            failures += 1
            mean_s += (took_s - mean_s) / failures
        # An attempt that was taken away (a preemption, a lost node) only adds its gain: it is no fault of the run.
        balance_s += past.gained_s - (past.lost_s if is_failure else 0.0)
        # The run has made up for its failures: reset the count, and cap what it keeps for later ones.
        if balance_s > 0.0 and (gained_more or not is_short):
            reserve_s = RESERVE * mean_s if failures >= RESERVE_AFTER else 0.0
            count, balance_s, since = 0, min(balance_s, reserve_s), past.step_saved
        elif is_failure and not gained_more:
            count += 1
    return count, since


def _own_faults(facts: Facts) -> list[Past]:
    """Return the past attempts that count against ``retry``: without those for which a node was condemned later."""
    own, condemned = [], set[str | None]()
    # Backwards, so that a later verdict on a node is known when its earlier failures come up.
    for past in reversed(facts.history):
        if past.cause == Cause.NODE_FAILURE and past.suspect is not None:
            condemned.add(past.suspect)
        elif past.cause in OWN_FAULT and past.suspect not in condemned:
            own.append(past)
    return own


def _requeue(facts: Facts, cause: Cause, line: str) -> Ending:
    """Requeue the job. It is free if this attempt saved a new step, however long the job waits and starts.

    A run does not choose when it is taken away; the budget is for a run without progress.
    """
    limit = facts.budgets.max_requeues
    if limit == 0:
        return Ending(cause, Decision.GIVE_UP, f"{line}; given up (retry.max_requeues: 0)")
    before = requeues_in_vain(facts.history)
    if facts.gained_s == 0.0 and before >= limit:
        line = f"{line}; given up after {before} requeues without a new checkpoint (retry.max_requeues: {limit})"
        return Ending(cause, Decision.GIVE_UP, line)
    return Ending(cause, Decision.REQUEUE, line)


def requeues_in_vain(history: Sequence[Past]) -> int:
    """Count the requeues since the run last saved a new step."""
    in_vain = takewhile(lambda past: past.gained_s == 0.0, reversed(history))
    return sum(past.decision == Decision.REQUEUE for past in in_vain)


def _best(history: Sequence[Past]) -> int:
    return max((past.step_end or 0 for past in history), default=0)


def _stuck(facts: Facts) -> int:
    """Count the attempts since the last new step that predict no progress for the next one.

    This attempt is among them. They are failures where this one and the furthest attempt ended, or before a first step,
    and time limits. Failures at other steps can be chance: on 1,000 nodes about one attempt in 30 fails before it is
    back at the step of the one before. `_failures` counts those. An attempt that was taken away (a preemption, a stop,
    a node) says nothing about the run.
    """
    if facts.is_foreign:
        return 0
    attempts = [*facts.history, facts.as_past()]
    own = {id(past) for past in _own_faults(facts)}
    now = attempts[-1]
    made_a_step = (now.step_end or 0) > (now.step_start or 0)
    # At the wall: it got as far as any attempt before, give or take a step.
    is_at_wall = not made_a_step or (now.step_end or 0) >= _best(facts.history) - 1
    count = 0
    # From the newest attempt back to the one that made the last new step.
    for index in range(len(attempts) - 1, -1, -1):
        past, best = attempts[index], _best(attempts[:index])
        if (past.step_end or 0) > best:
            break
        if past.cause in OWN_FAULT:
            count += id(past) in own and is_at_wall and _is_same_place(_place(past), _place(now), best)
        else:
            count += past.cause in (Cause.TIMEOUT, "now")
    return count


def _place(past: Past) -> int | None:
    """Return the step after which the attempt ended; None if it ended before it had loaded its state."""
    return past.step_start if past.step_end is None else past.step_end


def _is_same_place(one: int | None, other: int | None, best: int) -> bool:
    """True if two attempts failed at the same step. Rank 0's last reports may be a step late.

    Two failed starts are the same place only in a run that has made no step. Otherwise the cluster may be the reason.
    """
    if one is None or other is None:
        return one is other and best == 0
    return abs(one - other) <= 1


def _at(facts: Facts) -> str:
    return "" if facts.step_end is None else f" at step {facts.step_end}"


def _kept(facts: Facts) -> str:
    return "committed, nothing is lost" if facts.stopped_cleanly else "goes on from the last checkpoint"


def _describe(failure: RankFailure) -> str:
    if not failure.host:  # a hang whose rank is unknown
        return failure.how
    who = failure.host if failure.rank is None else f"rank {failure.rank} on {failure.host}"
    return f"{who}: {failure.how}"
