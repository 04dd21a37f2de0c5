"""Counts how much of a run's retry budgets its attempts have used.

The budgets are for failures, requeues and attempts without progress.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile

from toolkit.run.attempt.facts import Cause, Decision, Facts, Past, RankFailure

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


def fruitless_requeues(history: Sequence[Past]) -> int:
    """Count the latest attempts that were requeued for bad nodes before their first step."""

    def is_fruitless(past: Past) -> bool:
        return past.step_end is None and past.cause == Cause.NODE_FAILURE and past.decision == Decision.REQUEUE

    return sum(1 for _ in takewhile(is_fruitless, reversed(history)))


def count_failures(facts: Facts) -> tuple[int, int | None]:
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


def _own_faults(facts: Facts) -> list[Past]:
    """Return the past attempts that count against ``retry``.

    Those for which a node was condemned later do not count.
    """
    own, condemned = [], set[str | None]()
    # Backwards, so that a later verdict on a node is known when its earlier failures come up.
    for past in reversed(facts.history):
        if past.cause == Cause.NODE_FAILURE and past.suspect is not None:
            condemned.add(past.suspect)
        elif past.cause in OWN_FAULT and past.suspect not in condemned:
            own.append(past)
    return own


def requeues_in_vain(history: Sequence[Past]) -> int:
    """Count the requeues since the run last saved a new step."""
    in_vain = takewhile(lambda past: past.gained_s == 0.0, reversed(history))
    return sum(past.decision == Decision.REQUEUE for past in in_vain)


def best_step(history: Sequence[Past]) -> int:
    return max((past.step_end or 0 for past in history), default=0)


def attempts_without_progress(facts: Facts) -> int:
    """Count the attempts since the last new step that predict no further progress.

    This attempt is among them. They are failures where this one and the furthest attempt ended, or before a first step,
    and time limits. Failures at other steps can be chance: on 1,000 nodes about one attempt in 30 fails before it is
    back at the step of the one before. `count_failures` counts those. An attempt that was taken away (a preemption,
    a stop, a node) says nothing about the run.
    """
    if facts.is_foreign:
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
    r"|cuda|\bhip\b|\[errno "
)
#: What differs between two texts of one error: addresses in memory, and process numbers.
_VARIES = re.compile(r"0x[0-9a-f]+|\bpid \d+")
#: A script's steps are not known. One that failed within this time has gained nothing that a restart would keep.
SHORT_S = 300.0


def came_again(facts: Facts, first: RankFailure) -> bool:
    """True if the attempt before ended with the same exception at the same line, and no step was made between.

    A further attempt would end so, too. Errors that may be chance have the budgets of ``retry`` instead.
    """
    before = facts.history[-1] if facts.history else None
    if before is None or before.failure is None or first.where is None or first.by_signal or first.blames_node:
        return False
    is_same = first.where == before.failure.where
    is_same &= _VARIES.sub("", first.how) == _VARIES.sub("", before.failure.how)
    if not is_same or may_be_chance(first.how):
        return False
    if facts.is_foreign:
        return max(facts.gained_s + facts.lost_s, before.gained_s + before.lost_s) < SHORT_S
    there, now = _place(before), _place(facts.as_past())
    return _is_same_place(there, now, best=0) and (now or 0) <= (there or 0)


def may_be_chance(how: str) -> bool:
    """True for an error that names the network, a device or the system."""
    return _CHANCE.search(how) is not None


def _place(past: Past) -> int | None:
    """Return the step after which the attempt ended; None if its state was never loaded."""
    return past.step_start if past.step_end is None else past.step_end


def _is_same_place(one: int | None, other: int | None, best: int) -> bool:
    """True if two attempts failed at the same step. Rank 0's last reports may be a step late.

    Two failed starts are the same place only in a run that has made no step. Otherwise the cluster may be the reason.
    """
    if one is None or other is None:
        return one is other and best == 0
    return abs(one - other) <= 1
