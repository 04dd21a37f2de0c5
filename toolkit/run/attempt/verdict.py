"""Judges the end of an attempt: a pure function from the facts to a verdict.

The facts have three sources. The first is how the ranks ended: from the agents or srun, and from the ranks' error
files; exit code 75 is a stop that was agreed and committed. The second is what rank 0 reported, the third one row of
``scontrol show job``. The rules stand in :func:`judge` in the order of their strength. The rows that they were made
for, recorded on Slurm 22.05 and 24.11, are in ``tests/unit/run/test_verdict.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import takewhile

from toolkit.base.errors import EXIT_STOPPED
from toolkit.devices.kinds import DEVICE_OUT_OF_MEMORY, OF_DEVICES
from toolkit.files.run_files import FirstFailure
from toolkit.run.job.slurm_job import JobOutcome


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


class StopReason(StrEnum):
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
class PastAttempt:
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
    stop: StopReason | None = None
    killed_after_s: float | None = None  #: from the request to stop to SIGKILL
    vacated_nodes: tuple[str, ...] = ()  #: for ``Stop.MOVE``: the nodes that are given up, each with its reason
    slurm: JobOutcome = JobOutcome.ABSENT
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
    is_script: bool = False  #: a script without the toolkit: no result, and no steps to measure progress by
    history: Sequence[PastAttempt] = ()
    budgets: Budgets = Budgets()

    def as_past(self) -> PastAttempt:
        """Return this attempt as later ones see it. Its cause and decision are not known yet."""
        return PastAttempt(
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


#: A verdict's line names at most this many connections that could not be made.
MOST_LINKS = 4


def unfit_nodes(facts: Facts, hosts: Sequence[str]) -> set[str]:
    """Return the nodes that are at fault where ranks could not be started. ``hosts`` are by rank.

    None is where more than half of them failed: then a folder is missing, or a path is wrong. None is either after
    requeues for bad nodes that were all in vain, or in a job that is being ended.
    """
    unfit = {failure.host for failure in facts.failures if failure.at_launch and failure.rank is not None}
    is_common = len(unfit) > len({*hosts}) / 2
    is_hopeless = bad_node_requeues(facts.history) >= MAX_FRUITLESS_REQUEUES
    return set() if is_common or is_hopeless or not _is_left_alone(facts) else unfit


def has_completed(facts: Facts) -> bool:
    """True if rank 0 has delivered the result and every rank ended with 0.

    Exit codes alone say little: srun ends with 0 after ``task 0 launch failed``. A user script delivers no result.
    It has completed if all its ranks ended with 0 and nothing had told it to end: a script that saves and exits with 0
    at SIGTERM has more to do.
    """
    if facts.failures or facts.stopped_cleanly or facts.lost_nodes:
        return False
    if facts.is_script:
        return facts.exit_code == 0 and _is_left_alone(facts)
    return facts.has_result and facts.exit_code == 0


def judge(facts: Facts) -> Verdict:
    """Return cause and decision of an attempt's end. A cancelled run is never brought back."""
    if has_completed(facts):
        return Verdict(Cause.COMPLETED, Decision.FINISH, "completed")
    # First what people asked for, then what Slurm did to the job, then what the ranks did.
    if facts.stop is StopReason.CANCEL or facts.slurm is JobOutcome.CANCELLED:
        return Verdict(Cause.CANCELLED, Decision.GIVE_UP, f"cancelled{_at(facts)}")
    if facts.stop is StopReason.USER:
        # Nothing starts a script again that was stopped.
        is_known = not facts.is_script or facts.stopped_cleanly or facts.killed_after_s is not None
        kept = f"; {_kept(facts)}" if is_known else ""
        return Verdict(Cause.STOPPED, Decision.FINISH, f"stopped as asked{_at(facts)}{kept}")
    # Slurm has taken the job back, or a lost node cannot be replaced within it. That is not worth it in a job that is
    # about to be taken away.
    is_mendable = facts.can_go_on and _is_left_alone(facts)
    if facts.slurm in (JobOutcome.REQUEUED, JobOutcome.NODE_FAILED) or (facts.lost_nodes and not is_mendable):
        if facts.lost_nodes or facts.slurm is JobOutcome.NODE_FAILED:
            return _requeue(facts, Cause.NODE_FAILURE, f"{_loss(facts)}; {_kept(facts)}")
        return _requeue(facts, Cause.PREEMPTED, f"put back into the queue by Slurm{_at(facts)}; {_kept(facts)}")
    if facts.slurm is JobOutcome.PREEMPTED:
        return _requeue(facts, Cause.PREEMPTED, f"preempted{_at(facts)}; {_kept(facts)}")
    if facts.slurm is JobOutcome.TIMEOUT or facts.stop is StopReason.CLOCK:
        return _judge_timeout(facts)
    # Slurm leaves the job alone. A lost node is replaced from within the job.
    if facts.lost_nodes:
        line = f"{_loss(facts)}; {_kept(facts)}, on other nodes of the job"
        return Verdict(Cause.NODE_FAILURE, Decision.RESTART, line, first_failure(facts.failures))
    # The ranks committed a checkpoint and stopped: to move, or because a signal reached them.
    if facts.stopped_cleanly and facts.stop is StopReason.MOVE:
        line = f"moved off {'; '.join(facts.vacated_nodes)}; stopped{_at(facts)}, {_kept(facts)}"
        return Verdict(Cause.MOVED, Decision.RESTART, line)
    if facts.stopped_cleanly:
        # A signal at a rank, of unknown reason: the run is not finished. Without Slurm it ends here.
        line = f"stopped by a signal{_at(facts)}; {_kept(facts)}"
        if facts.slurm is JobOutcome.ABSENT:
            return Verdict(Cause.STOPPED, Decision.FINISH, line)
        return _requeue(facts, Cause.STOPPED, line)
    # Told to end, but without a stop that all ranks have committed.
    if facts.stop is StopReason.SIGNAL:
        return _judge_told_to_end(facts)
    return _judge_fault(facts)


def _is_left_alone(facts: Facts) -> bool:
    """True if no request ends the run, nor does Slurm, as far as it answers."""
    return facts.stop in (None, StopReason.MOVE) and facts.slurm.is_left_alone


def _loss(facts: Facts) -> str:
    first = first_failure(facts.failures)
    if first is not None and first.at_launch:
        return _describe(first)
    return (f"lost {', '.join(facts.lost_nodes)}" if facts.lost_nodes else "a node failed") + _at(facts)


def _judge_timeout(facts: Facts) -> Verdict:
    """Requeue for free while steps are gained. A run may take ten time limits if it gains steps."""
    stuck = attempts_without_progress(facts)
    if stuck >= facts.budgets.no_progress_attempts:
        line = f"out of time{_at(facts)} without a new step for {stuck} attempts; raise cluster.time_min"
        return Verdict(Cause.TIMEOUT, Decision.GIVE_UP, line)
    return _requeue(facts, Cause.TIMEOUT, f"out of time{_at(facts)}; {_kept(facts)}")


def _judge_told_to_end(facts: Facts) -> Verdict:
    """Give up after SIGTERM if Slurm does not answer or is absent: a requeue could revive a cancelled run.

    After a preemption Slurm restarts the job itself, and the restarted job finds this run.
    """
    if facts.slurm is JobOutcome.RUNNING:
        return _requeue(facts, Cause.STOPPED, f"asked to stop by a signal{_at(facts)}; {_kept(facts)}")
    return Verdict(Cause.CANCELLED, Decision.GIVE_UP, f"asked to stop by SIGTERM{_at(facts)}")


def _judge_fault(facts: Facts) -> Verdict:
    first = facts.hang or first_failure(facts.failures)
    cause = Cause.HANG if facts.hang else Cause.CRASHED
    what = _what_failed(facts, first)
    # Failures that would come again unchanged end the run at once.
    if any(failure.out_of_memory for failure in facts.failures):
        line = f"{what}: out of memory; would fail again unchanged: {_less_memory(facts, first)}"
        return Verdict(Cause.OUT_OF_MEMORY, Decision.GIVE_UP, line, first)
    if first is not None and first.comes_again:
        return Verdict(Cause.CRASHED, Decision.GIVE_UP, f"{what}; would fail again unchanged", first)
    if first is not None and is_repeated(facts, first):
        line = f"{what}; given up: the previous attempt ended with the same error at the same line, and no step between"
        return Verdict(Cause.CRASHED, Decision.GIVE_UP, line, first)
    # The node that may be to blame. Who sent a signal, or why a device failed or is waited for, is unknown.
    suspect = _cut_off(facts)
    if suspect is None and first is not None and first.rank is not None:
        suspect = first.host if first.by_signal or first.blames_node or first.at_launch else None
    # A failure that a condemned node explains is not the run's: it costs no budget.
    if facts.condemned is not None and _is_first_to_blame(facts):
        line = f"{what}; caused by node {facts.condemned}: {_kept(facts)}, on other nodes of the job"
        return Verdict(Cause.NODE_FAILURE, Decision.RESTART, line, first, suspect)
    if facts.budgets.max_failures == 0:
        return Verdict(cause, Decision.GIVE_UP, f"{what}; given up (retry.max_failures: 0)", first, suspect)
    # Now the run's own budgets: failures that cost more than they gained, then attempts without progress.
    count, since = count_costly_failures(facts)
    limit, after = facts.budgets.max_failures, "" if since is None else f" since step {since}"
    if count > limit:
        line = f"{what}; given up after {count} failures{after} (retry.max_failures: {limit})"
        return Verdict(cause, Decision.GIVE_UP, line, first, suspect)
    stuck, best = attempts_without_progress(facts), best_step(facts.history)
    if stuck >= facts.budgets.no_progress_attempts:
        line = f"{what}; given up: {stuck} attempts got no further than step {best} (retry.no_progress_attempts)"
        return Verdict(cause, Decision.GIVE_UP, line, first, suspect)
    if facts.gained_s > facts.lost_s:
        line = f"{what}; restart from step {facts.step_saved}, free: the attempt gained more time than it lost"
    else:
        line = f"{what}; restart after failure {count} of {limit}{after}"
    return Verdict(cause, Decision.RESTART, line, first, suspect)


def _what_failed(facts: Facts, first: RankFailure | None) -> str:
    what = f"the ranks ended with exit code {facts.exit_code}"
    if first is not None:
        what = _describe(first)
    elif facts.exit_code == 0:
        what = (
            "every rank ended with exit code 0, but rank 0 handed over no result (Trainer.fit does, or Session.finish)"
        )
    elif facts.exit_code == EXIT_STOPPED:
        what = f"the ranks ended with exit code {EXIT_STOPPED}, but have saved no stop: code of the job ends with it"
    # Name both ends of the connections that could not be made, the first few.
    links = [f"{host} to {peer}" for host, peer in facts.cut_links]
    if links:
        more = f" and {len(links) - MOST_LINKS} more" if len(links) > MOST_LINKS else ""
        what += f"; no connection from {', '.join(links[:MOST_LINKS])}{more}"
    return what


def _less_memory(facts: Facts, first: RankFailure | None) -> str:
    # torch's own error is about a GPU.
    if first is None or not DEVICE_OUT_OF_MEMORY.search(first.how):
        return "give it more (cluster.mem_gb) or less to hold"
    advice = "give the GPU less to hold: a smaller batch, or weights on more GPUs"
    return advice if facts.is_script else f"{advice} (strategy.name: fsdp)"


def _cut_off(facts: Facts) -> str | None:
    """Return the node that is an end of all failed connections, if there is one.

    Of a single connection it is the end that comes later in the attempt: the batch host, where ranks meet, is first.
    """
    links = {frozenset(link) for link in facts.cut_links}
    ends = frozenset.intersection(*links) if links else frozenset[str]()
    return max(ends, key=list(facts.hosts).index, default=None)


def _is_first_to_blame(facts: Facts) -> bool:
    """True if no other node was condemned since the last new step. With a second one the run itself is at fault."""
    for index in range(len(facts.history), 0, -1):
        past, before = facts.history[index - 1], facts.history[: index - 1]
        if (past.step_end or 0) > best_step(before):
            return True
        if past.cause == Cause.NODE_FAILURE and past.suspect not in (None, facts.condemned):
            return False
    return True


def _requeue(facts: Facts, cause: Cause, line: str) -> Verdict:
    """Requeue the job. It is free if this attempt saved a new step, however long the job waits and starts.

    A run does not choose when it is taken away; the budget is for a run without progress.
    """
    # A preemption ends the ranks by itself. What they say of it is no failure.
    first = first_failure(facts.failures) if cause is Cause.NODE_FAILURE else None
    return replace(
        requeue_within(facts.budgets.max_requeues, facts.history, cause, line, facts.gained_s), first_failure=first
    )


def requeue_within(
    limit: int, history: Sequence[PastAttempt], cause: Cause, line: str, gained_s: float = 0.0
) -> Verdict:
    """Requeue the job after an attempt that saved steps of ``gained_s``; give up where ``limit`` allows no more."""
    before = requeues_without_save(history)
    if limit == 0:
        line = f"{line}; given up (retry.max_requeues: 0)"
    elif gained_s == 0.0 and before >= limit:
        line = f"{line}; given up after {before} requeues without a new checkpoint (retry.max_requeues: {limit})"
    else:
        return Verdict(cause, Decision.REQUEUE, line)
    return Verdict(cause, Decision.GIVE_UP, line)


def _at(facts: Facts) -> str:
    return "" if facts.step_end is None else f" at step {facts.step_end}"


def _kept(facts: Facts) -> str:
    if facts.is_script and facts.killed_after_s is not None:
        words = f"killed {facts.killed_after_s:.0f} s after SIGTERM: what it was saving may be incomplete"
        is_reserved = facts.stop in (StopReason.USER, StopReason.CLOCK)
        return f"{words} (cluster.save_before_limit_s gives it more time)" if is_reserved else words
    if facts.is_script:  # its checkpoints are not known
        return "by its exit code it has saved" if facts.stopped_cleanly else "the script is started again"
    if facts.stopped_cleanly and facts.step_end == 0:
        return "no step was made before that"
    if facts.stopped_cleanly:
        return "checkpoint saved"
    return "no checkpoint was found on disk" if facts.step_saved is None else "continues from the last checkpoint"


def _describe(failure: RankFailure) -> str:
    if not failure.host:  # a hang whose rank is unknown
        return failure.how
    who = failure.host if failure.rank is None else f"rank {failure.rank} on {failure.host}"
    return f"{who}: {failure.how}"


#: After this many requeues in a row for bad nodes, without a step in between, a job takes the nodes that it gets.
MAX_FRUITLESS_REQUEUES = 2
#: A run may lose this many times the average time of a failed attempt from the time that it has gained.
RESERVE = 2.0
#: Failures from which the mean of that time is taken for known.
RESERVE_AFTER = 10
#: An attempt that takes less than this share of the mean is no usual one.
SHORT_SHARE = 0.1
#: Causes that are the run's own fault and count against ``retry``.
OWN_FAULT = frozenset({Cause.CRASHED, Cause.HANG, Cause.OUT_OF_MEMORY})


def bad_node_requeues(history: Sequence[PastAttempt]) -> int:
    """Count the latest attempts that were requeued for bad nodes before their first step."""

    def is_fruitless(past: PastAttempt) -> bool:
        return past.step_end is None and past.cause == Cause.NODE_FAILURE and past.decision == Decision.REQUEUE

    return sum(1 for _ in takewhile(is_fruitless, reversed(history)))


def count_costly_failures(facts: Facts) -> tuple[int, int | None]:
    """Count the failures that cost more than they gained, since the last reset.

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


def _own_faults(facts: Facts) -> list[PastAttempt]:
    """Return the past attempts that count against ``retry``: those for which no node was condemned later."""
    own, condemned = [], set[str | None]()
    # Backwards, so that a later verdict on a node is known when its earlier failures come up.
    for past in reversed(facts.history):
        if past.cause == Cause.NODE_FAILURE and past.suspect is not None:
            condemned.add(past.suspect)
        elif past.cause in OWN_FAULT and past.suspect not in condemned:
            own.append(past)
    return own


def requeues_without_save(history: Sequence[PastAttempt]) -> int:
    """Count the requeues since the run last saved a new step."""
    in_vain = takewhile(lambda past: past.gained_s == 0.0, reversed(history))
    return sum(past.decision == Decision.REQUEUE for past in in_vain)


def best_step(history: Sequence[PastAttempt]) -> int:
    return max((past.step_end or 0 for past in history), default=0)


def attempts_without_progress(facts: Facts) -> int:
    """Count the attempts since the last new step that predict no further progress.

    This attempt is among them. They are failures where this one and the furthest attempt ended, or before a first step,
    and time limits. Failures at other steps can be chance: on 1,000 nodes about one attempt in 30 fails before it is
    back at the step of the one before. `count_failures` counts those. An attempt that was taken away (a preemption,
    a stop, a node) says nothing about the run.
    """
    if facts.is_script:
        return 0
    attempts = [*facts.history, facts.as_past()]
    own = {id(past) for past in _own_faults(facts)}
    now = attempts[-1]
    made_a_step = (now.step_end or 0) > (now.step_start or 0)
    # At the wall: it got as far as any attempt before, give or take a step.
    is_at_wall = not made_a_step or (now.step_end or 0) >= best_step(facts.history) - 1
    count = 0
    # From the newest attempt back to the one that made the last new step.
    for index in range(len(attempts) - 1, -1, -1):
        past, best = attempts[index], best_step(attempts[:index])
        if (past.step_end or 0) > best:
            break
        if past.cause in OWN_FAULT:
            count += id(past) in own and is_at_wall and _is_same_place(_place(past), _place(now), best)
        else:
            count += past.cause in (Cause.TIMEOUT, "now")
    return count


#: What errors name that may be chance, however often they come: the network, a device or the system.
_CHANCE = re.compile(
    r"(?i)gloo|nccl|\bconnect|timed? ?out|time-?out|\bpeer\b|broken pipe|reset by|unavailable|\bstore\b"
    rf"|{OF_DEVICES}|\[errno "
)
#: What differs between two texts of one error: addresses in memory, and process numbers.
_VARIES = re.compile(r"0x[0-9a-f]+|\bpid \d+")
#: A script's steps are not known. One that failed within this time has gained nothing that a restart would keep.
SHORT_S = 300.0


def has_worked(facts: Facts) -> bool:
    """True if the run has made a step, or as a script has worked for a while, in this attempt or an earlier one."""
    attempts = [*facts.history, facts.as_past()]
    if facts.is_script:
        return any(past.gained_s + past.lost_s >= SHORT_S for past in attempts)
    return facts.step_saved is not None or any((past.step_end or 0) > (past.step_start or 0) for past in attempts)


def is_repeated(facts: Facts, first: RankFailure) -> bool:
    """True if the attempt before ended with the same exception at the same line, and no step was made between.

    A further attempt would end so, too. Errors that may be chance have the budgets of ``retry`` instead.
    """
    before = facts.history[-1] if facts.history else None
    if before is None or before.failure is None or first.where is None or first.by_signal or first.blames_node:
        return False
    is_same = first.where == before.failure.where
    is_same &= _VARIES.sub("", first.how) == _VARIES.sub("", before.failure.how)
    if not is_same or is_transient(first.how):
        return False
    if facts.is_script:
        return max(facts.gained_s + facts.lost_s, before.gained_s + before.lost_s) < SHORT_S
    there, now = _place(before), _place(facts.as_past())
    return _is_same_place(there, now, best=0) and (now or 0) <= (there or 0)


def is_transient(how: str) -> bool:
    """True for an error that names the network, a device or the system."""
    return _CHANCE.search(how) is not None


def _place(past: PastAttempt) -> int | None:
    """Return the step after which the attempt ended; None if its state was never loaded."""
    return past.step_start if past.step_end is None else past.step_end


def _is_same_place(one: int | None, other: int | None, best: int) -> bool:
    """True if two attempts failed at the same step. Rank 0's last reports may be a step late.

    Two failed starts are the same place only in a run that has made no step. Otherwise the cluster may be the reason.
    """
    if one is None or other is None:
        return one is other and best == 0
    return abs(one - other) <= 1
