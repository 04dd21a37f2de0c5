"""Judges the end of an attempt: a pure function from the facts to a verdict.

The verdict is a cause, a decision and one line. The facts have three sources. The first is how the ranks ended: from
the agents or srun, and from the ranks' error files; exit code 75 is a stop that was agreed and committed. The second is
what rank 0 reported, the third one row of ``scontrol show job``. The rules stand in :func:`judge` in the order of their
strength. The rows that they were made for, recorded on Slurm 22.05 and 24.11, are in
``tests/unit/run/test_ending.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolkit.base.errors import EXIT_STOPPED
from toolkit.files.run_files import HALVED
from toolkit.run.attempt.budgets import (
    MAX_FRUITLESS_REQUEUES,
    attempts_without_progress,
    best_step,
    came_again,
    count_failures,
    fruitless_requeues,
    requeues_in_vain,
)
from toolkit.run.attempt.facts import Cause, Decision, Facts, RankFailure, Stop, Verdict, first_failure
from toolkit.run.job.fate import JobFate

#: A verdict's line names at most this many connections that could not be made.
MOST_LINKS = 4


def unfit_nodes(facts: Facts, hosts: Sequence[str]) -> set[str]:
    """Return the nodes that are at fault where ranks could not be started. ``hosts`` are by rank.

    The nodes are not at fault where more than half of them failed: then a folder is missing, or a path is wrong. Nor
    are they after requeues for bad nodes that were all in vain, nor in a job that is being ended.
    """
    unfit = {failure.host for failure in facts.failures if failure.at_launch and failure.rank is not None}
    is_common = len(unfit) > len({*hosts}) / 2
    is_hopeless = fruitless_requeues(facts.history) >= MAX_FRUITLESS_REQUEUES
    return set() if is_common or is_hopeless or not _is_left_alone(facts) else unfit


def has_completed(facts: Facts) -> bool:
    """True if rank 0 has delivered the result and every rank ended with 0.

    Exit codes alone say little: srun ends with 0 after ``task 0 launch failed``. A foreign script delivers no result.
    It has completed if all its ranks ended with 0 and nothing had told it to end: a script that saves and exits with 0
    at SIGTERM has more to do.
    """
    if facts.failures or facts.stopped_cleanly or facts.lost_nodes:
        return False
    if facts.is_foreign:
        return facts.exit_code == 0 and _is_left_alone(facts)
    return facts.has_result and facts.exit_code == 0


def judge(facts: Facts) -> Verdict:
    """Return cause and decision of an attempt's end. A cancelled run is never brought back."""
    if has_completed(facts):
        return Verdict(Cause.COMPLETED, Decision.FINISH, "completed")
    # First what people asked for, then what Slurm did to the job, then what the ranks did.
    if facts.stop is Stop.CANCEL or facts.slurm is JobFate.CANCELLED:
        return Verdict(Cause.CANCELLED, Decision.GIVE_UP, f"cancelled{_at(facts)}")
    if facts.stop is Stop.USER:
        return Verdict(Cause.STOPPED, Decision.FINISH, f"stopped as asked{_at(facts)}; {_kept(facts)}")
    if facts.stop is Stop.HALVING and facts.stopped_cleanly:
        return Verdict(Cause.STOPPED, Decision.FINISH, f"{facts.stop_note or HALVED}; {_kept(facts)}")
    # Slurm has taken the job back, or a lost node cannot be replaced within it. That is not worth it in a job that is
    # about to be taken away.
    is_mendable = facts.can_go_on and _is_left_alone(facts)
    if facts.slurm in (JobFate.REQUEUED, JobFate.NODE_FAILED) or (facts.lost_nodes and not is_mendable):
        if facts.lost_nodes or facts.slurm is JobFate.NODE_FAILED:
            return _requeue(facts, Cause.NODE_FAILURE, f"{_loss(facts)}; {_kept(facts)}")
        return _requeue(facts, Cause.PREEMPTED, f"put back into the queue by Slurm{_at(facts)}; {_kept(facts)}")
    if facts.slurm is JobFate.PREEMPTED:
        return _requeue(facts, Cause.PREEMPTED, f"preempted{_at(facts)}; {_kept(facts)}")
    if facts.slurm is JobFate.TIMEOUT or facts.stop is Stop.CLOCK:
        return _judge_timeout(facts)
    # Slurm leaves the job alone. A lost node is replaced from within the job.
    if facts.lost_nodes:
        line = f"{_loss(facts)}; {_kept(facts)}, on other nodes of the job"
        return Verdict(Cause.NODE_FAILURE, Decision.RESTART, line, first_failure(facts.failures))
    # The ranks committed a checkpoint and stopped: to move, or because a signal reached them.
    if facts.stopped_cleanly and facts.stop is Stop.MOVE:
        line = f"moved off {'; '.join(facts.vacated_nodes)}; stopped{_at(facts)}, {_kept(facts)}"
        return Verdict(Cause.MOVED, Decision.RESTART, line)
    if facts.stopped_cleanly:
        # A signal at a rank, of unknown reason: the run is not finished. Without Slurm it ends here.
        line = f"stopped by a signal{_at(facts)}; {_kept(facts)}"
        if facts.slurm is JobFate.ABSENT:
            return Verdict(Cause.STOPPED, Decision.FINISH, line)
        return _requeue(facts, Cause.STOPPED, line)
    # Told to end, but without a stop that all ranks have committed.
    if facts.stop is Stop.SIGNAL:
        return _judge_told_to_end(facts)
    return _judge_fault(facts)


def _is_left_alone(facts: Facts) -> bool:
    """True if no request ends the run, nor does Slurm, as far as it answers."""
    return facts.stop in (None, Stop.MOVE) and facts.slurm.is_left_alone


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
    """Give up after SIGTERM if Slurm does not answer or is absent.

    A requeue could revive a cancelled run. If it was a preemption after all, Slurm restarts the job itself, and the
    restarted job finds this run.
    """
    if facts.slurm is JobFate.RUNNING:
        return _requeue(facts, Cause.STOPPED, f"told to end by a signal{_at(facts)}; {_kept(facts)}")
    return Verdict(Cause.CANCELLED, Decision.GIVE_UP, f"told to end by SIGTERM{_at(facts)}")


def _judge_fault(facts: Facts) -> Verdict:
    first = facts.hang or first_failure(facts.failures)
    cause = Cause.HANG if facts.hang else Cause.CRASHED
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
    # Failures that would come again unchanged end the run at once.
    if any(failure.out_of_memory for failure in facts.failures):
        # torch's own error is about a GPU.
        is_gpus = first is not None and re.search("OutOfMemory|CUDA|HIP|cuda|hip", first.how)
        advice = "give it more (cluster.mem_gb) or less to hold"
        if is_gpus:
            advice = "give the GPU less to hold: a smaller batch, or weights on more GPUs"
            advice += "" if facts.is_foreign else " (strategy.name: fsdp)"
        line = f"{what}: out of memory; would fail again unchanged: {advice}"
        return Verdict(Cause.OUT_OF_MEMORY, Decision.GIVE_UP, line, first)
    if first is not None and first.comes_again:
        return Verdict(Cause.CRASHED, Decision.GIVE_UP, f"{what}; would fail again unchanged", first)
    if first is not None and came_again(facts, first):
        line = f"{what}; given up: the attempt before ended with the same error at the same line, and no step between"
        return Verdict(Cause.CRASHED, Decision.GIVE_UP, line, first)
    # A failure that a condemned node explains is not the run's: it costs no budget.
    suspect = _cut_off(facts) or _suspect(first, cause)
    if facts.condemned is not None and _is_first_to_blame(facts):
        line = f"{what}; node {facts.condemned} is to blame: {_kept(facts)}, on other nodes of the job"
        return Verdict(Cause.NODE_FAILURE, Decision.RESTART, line, first, suspect)
    if facts.budgets.max_failures == 0:
        return Verdict(cause, Decision.GIVE_UP, f"{what}; given up (retry.max_failures: 0)", first, suspect)
    # Now the run's own budgets: failures that cost more than they gained, then attempts without progress.
    count, since = count_failures(facts)
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


def _suspect(first: RankFailure | None, cause: Cause) -> str | None:
    """Return the node that may be to blame. Who sent a signal, or why a rank hung or a device failed, is unknown."""
    if first is None or first.rank is None:
        return None
    is_odd = first.by_signal or first.blames_node or first.at_launch or cause is Cause.HANG
    return first.host if is_odd else None


def _cut_off(facts: Facts) -> str | None:
    """Return the node that is an end of all failed connections, if there is one.

    Return None where several nodes may be at fault. For a single connection it is the end that comes later in the
    attempt. The job can go on without either end, and the batch host, where the ranks meet, comes first.
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
    limit = facts.budgets.max_requeues
    # A preemption ends the ranks by itself. What they say of it is no failure.
    first = first_failure(facts.failures) if cause is Cause.NODE_FAILURE else None
    if limit == 0:
        return Verdict(cause, Decision.GIVE_UP, f"{line}; given up (retry.max_requeues: 0)", first)
    before = requeues_in_vain(facts.history)
    if facts.gained_s == 0.0 and before >= limit:
        line = f"{line}; given up after {before} requeues without a new checkpoint (retry.max_requeues: {limit})"
        return Verdict(cause, Decision.GIVE_UP, line, first)
    return Verdict(cause, Decision.REQUEUE, line, first)


def _at(facts: Facts) -> str:
    return "" if facts.step_end is None else f" at step {facts.step_end}"


def _kept(facts: Facts) -> str:
    if facts.is_foreign:  # its checkpoints are not known
        return "by its exit code it has saved" if facts.stopped_cleanly else "the script is started again"
    if facts.stopped_cleanly and facts.step_end == 0:
        return "no step was made before that"
    return "committed, nothing is lost" if facts.stopped_cleanly else "goes on from the last checkpoint"


def _describe(failure: RankFailure) -> str:
    if not failure.host:  # a hang whose rank is unknown
        return failure.how
    who = failure.host if failure.rank is None else f"rank {failure.rank} on {failure.host}"
    return f"{who}: {failure.how}"
