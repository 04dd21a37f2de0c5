"""The first reason to stop counts, and Slurm is asked before it kills the supervisor."""

import math
import signal
import time
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.nodes.agent.messages import AgentSignalled
from toolkit.nodes.allocation import Allocation
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.verdict import RankFailure, StopReason
from toolkit.run.job.slurm_job import JobOutcome
from toolkit.run.supervise.rank_stop import RankStopper, StopAsked, stopped_in_pause
from toolkit.slurm.commands import Settings


class Played:
    """A stop path of a job of Slurm, with the attempt that it changes."""

    def __init__(
        self,
        stop: StopReason | None = None,
        kill_wait_s: float = 30.0,
        *,
        reserved_s: int | None = None,
        left_s: float = math.inf,
        outcome: JobOutcome = JobOutcome.RUNNING,
    ) -> None:
        """Play the ranks of a script if ``reserved_s`` is given: its save_before_limit_s."""
        self.attempt = Attempt(1, 0.0, Allocation(("here",), (1,), 1), stop=stop)
        self.attempt.note_stopped(RankFailure(0, "here", "exit code 75", 1.0))
        job = SimpleNamespace(
            slurm=object(),
            settings=Settings(kill_wait_s=kill_wait_s),
            takes_limit_signal=lambda number: False,
            is_ending=lambda: True,
            left_s=lambda: left_s,
            outcome=lambda: outcome,
            was_ending=lambda: not outcome.is_left_alone,
        )
        context: Any = SimpleNamespace(
            job=job,
            events=SimpleQueue(),
            asked=lambda: None,
            is_script=reserved_s is not None,
            config=SimpleNamespace(cluster=SimpleNamespace(save_before_limit_s=reserved_s)),
            allocation=SimpleNamespace(job_id="1"),
            journal=SimpleNamespace(set_status=lambda *_: None),
        )
        self.abandoned, self.signals = False, list[signal.Signals]()
        ranks: Any = SimpleNamespace(abandon=lambda: setattr(self, "abandoned", True), send_signal=self.signals.append)
        store: Any = SimpleNamespace(propose=lambda kind, by: None)
        self.context = context
        self.path = RankStopper(context, self.attempt, ranks, store)


@pytest.mark.parametrize("first", [StopReason.CLOCK, StopReason.SIGNAL])
def test_of_two_reasons_to_stop_the_first_counts_unless_a_user_gives_the_second(first: StopReason) -> None:
    played = Played(first)
    for later in (StopReason.SIGNAL, StopReason.CLOCK):
        played.path.ask(later)
        assert played.attempt.stop is first
    played.path.ask(StopReason.USER)
    assert played.attempt.stop is StopReason.USER


@pytest.mark.parametrize(("kill_wait_s", "after_s"), [(30.0, 25.0), (6.0, 3.0)])
def test_slurm_is_asked_before_it_kills_this_process(kill_wait_s: float, after_s: float) -> None:
    played = Played(kill_wait_s=kill_wait_s)
    played.path.take(StopAsked(signal.SIGTERM))
    assert played.path._ask_slurm_at == pytest.approx(time.monotonic() + after_s, abs=1.0)


@pytest.mark.parametrize(
    ("stop", "time_s", "left_s", "outcome"),
    [
        (StopReason.USER, 300, math.inf, JobOutcome.RUNNING),  # what is reserved
        (StopReason.USER, 95, 100, JobOutcome.RUNNING),
        (StopReason.CLOCK, 395, 400, JobOutcome.RUNNING),  # what there is before the limit
        (StopReason.SIGNAL, 300, 9000, JobOutcome.RUNNING),  # of a site or a person
        (StopReason.SIGNAL, 895, 900, JobOutcome.PREEMPTED),  # the partition's grace
        (StopReason.SIGNAL, 25, 0, JobOutcome.PREEMPTED),  # none, but for KillWait
        (StopReason.SIGNAL, 25, 0, JobOutcome.CANCELLED),
        (StopReason.SIGNAL, 300, math.inf, JobOutcome.UNKNOWN),
    ],
)
def test_a_script_has_the_time_to_save_that_there_is(
    stop: StopReason, time_s: float, left_s: float, outcome: JobOutcome
) -> None:
    played = Played(reserved_s=300, left_s=left_s, outcome=outcome)
    played.attempt.kill_within(0.5)  # a rank has ended badly just before
    played.path.ask(stop)
    assert played.attempt.kill_at == pytest.approx(time.monotonic() + time_s, abs=1.0)
    assert played.signals == [signal.SIGTERM]


def test_a_users_request_counts_also_where_its_file_cannot_be_read_again() -> None:
    played = Played()
    played.path.take(StopAsked(None))
    assert played.attempt.stop is StopReason.USER, "a signal of unknown origin would have the run requeued"


def test_a_script_has_at_least_half_a_minute_where_nothing_is_reserved() -> None:
    played = Played(reserved_s=0)
    played.path.ask(StopReason.USER)
    assert played.attempt.kill_at == pytest.approx(time.monotonic() + 30, abs=1.0)


@pytest.mark.parametrize(
    ("outcome", "reserved_s", "stop"),
    [
        (JobOutcome.PREEMPTED, 120, StopReason.SIGNAL),
        (JobOutcome.CANCELLED, 120, StopReason.SIGNAL),
        (JobOutcome.RUNNING, 120, None),  # somebody's scancel --signal=TERM: the script knows what for
        (JobOutcome.UNKNOWN, 120, None),
        (JobOutcome.PREEMPTED, None, StopReason.SIGNAL),  # the toolkit's own, of which some may not have started
        (JobOutcome.RUNNING, None, None),
    ],
)
def test_ranks_that_slurm_has_signalled_are_stopped_without_a_second_signal(
    outcome: JobOutcome, reserved_s: int | None, stop: StopReason | None
) -> None:
    played = Played(reserved_s=reserved_s, outcome=outcome)
    played.path.take_ranks_signal()
    assert (played.attempt.stop, played.signals) == (stop, [])


@pytest.mark.parametrize(("outcome", "stop"), [(JobOutcome.PREEMPTED, StopReason.SIGNAL), (JobOutcome.RUNNING, None)])
def test_ranks_are_not_started_where_slurm_has_told_the_agents_that_the_job_ends(
    outcome: JobOutcome, stop: StopReason | None
) -> None:
    played = Played(outcome=outcome)
    played.context.events.put(AgentSignalled())
    assert stopped_in_pause(played.context, played.attempt, 0.0) == (stop is not None)
    assert played.attempt.stop is stop


def test_ranks_that_are_left_to_slurm_have_not_stopped_cleanly() -> None:
    played = Played(StopReason.SIGNAL)
    played.path._ask_slurm_at = 0.0
    played.path.leave_the_rest_to_slurm()
    assert played.abandoned
    assert played.attempt.stopped == []
