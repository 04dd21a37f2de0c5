"""The attempt that was left behind when its supervisor died, or its node."""

from __future__ import annotations

import time

from toolkit.base import logs, outages
from toolkit.base.errors import ToolkitError
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.budgets import requeues_in_vain
from toolkit.run.attempt.facts import Cause, Decision, Stop, Verdict
from toolkit.run.supervise.context import Context

log = logs.get(__name__)


def close(context: Context, earlier_death: str | None) -> None:
    """Write the line of an attempt whose supervisor died without writing it. A preempted one would have had TERM.

    ``earlier_death`` says how that supervisor died, if it was one of this start of the job. Raises ToolkitError when
    the run has been requeued too often without a new checkpoint.
    """
    run, job, nodes = context.run, context.job, context.nodes
    status = run.left_over()
    if status is None:
        return
    left = Attempt.of_status(status, context.allocation)
    gone = job.unreachable(left.plan.hosts) if job.slurm else set()
    left.lost_nodes = lost = gone | nodes.given_up(left.started)  # they may be back
    decision = Decision.REQUEUE
    is_here = status.cluster in ("", context.allocation.cluster)  # another cluster's number is another job here
    # The most certain reason first: what the guard saw, lost nodes, a stop or preemption, and else a node failure.
    if earlier_death is not None:
        cause, why, decision = Cause.CRASHED, earlier_death, Decision.RESTART
        nodes.note_used(left.plan)  # the state of its ranks is in these nodes' memory
    elif lost:
        cause, why = Cause.NODE_FAILURE, f"lost {', '.join(sorted(lost))}"
    elif status.stop not in (None, Stop.MOVE) or (is_here and job.was_preempted(status.job_id)):
        cause, why = Cause.PREEMPTED, "taken away before its supervisor could say how it ended"
    elif status.why is not None:  # its guard has given up
        cause, why = Cause.NODE_FAILURE, status.why
    else:
        cause, why = Cause.NODE_FAILURE, "ended without a word: a node failure, a power cut, or SIGKILL"
    log.warning("attempt %d: %s", left.number, why)
    for host in gone:
        nodes.condemn(host, f"lost in attempt {left.number}")
    # The attempt ended, as far as is known, when its supervisor wrote last.
    left.left_over = status
    left.ended = time.time() if status.updated is None else status.updated
    context.journal.note_gain(left)
    outages.persist(lambda: context.journal.add(left, Verdict(cause, decision, why)), run.path)
    in_vain, limit = requeues_in_vain(context.journal.history()), context.config.retry.max_requeues
    if in_vain > limit:
        raise ToolkitError(f"{why}; given up after {in_vain - 1} requeues without a new checkpoint")
