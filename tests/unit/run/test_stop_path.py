"""The first reason to stop counts, and Slurm is asked before it kills the supervisor."""

from __future__ import annotations

import math
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.nodes.allocation import Allocation
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.facts import Stop
from toolkit.run.job.slurm_job import JobFate
from toolkit.run.supervise.stop_path import StopAsked, StopPath
from toolkit.slurm.commands import Settings


class Played:
    """A stop path of a job of Slurm, with the attempt that it changes."""

    def __init__(
        self,
        stop: Stop | None = None,
        kill_wait_s: float = 30.0,
        *,
        reserved_s: int | None = None,
        left_s: float = math.inf,
        fate: JobFate = JobFate.RUNNING,
    ) -> None:
        """Play the ranks of a script if ``reserved_s`` is given: its signal_delay_s."""
        self.attempt = Attempt(1, 0.0, Allocation(("here",), (1,), 1), stop=stop, stopped={0})
        job = SimpleNamespace(
            slurm=object(),
            settings=Settings(kill_wait_s=kill_wait_s),
            takes_limit_signal=lambda number: False,
            is_being_ended=lambda: True,
            left_s=lambda: left_s,
            state=lambda: fate,
            is_ending=lambda: not fate.is_left_alone,
        )
        context: Any = SimpleNamespace(
            job=job,
            asked=lambda: None,
            is_foreign=reserved_s is not None,
            config=SimpleNamespace(cluster=SimpleNamespace(signal_delay_s=reserved_s)),
            allocation=SimpleNamespace(job_id="1"),
            journal=SimpleNamespace(set_status=lambda *_: None),
        )
        self.abandoned, self.signals = False, list[signal.Signals]()
        ranks: Any = SimpleNamespace(abandon=lambda: setattr(self, "abandoned", True), kill=self.signals.append)
        store: Any = SimpleNamespace(propose=lambda kind, by: None)
        self.path = StopPath(context, self.attempt, ranks, store)


@pytest.mark.parametrize("first", [Stop.CLOCK, Stop.SIGNAL])
def test_of_two_reasons_to_stop_the_first_counts_unless_a_user_gives_the_second(first: Stop) -> None:
    played = Played(first)
    for later in (Stop.SIGNAL, Stop.CLOCK):
        played.path.ask(later)
        assert played.attempt.stop is first
    played.path.ask(Stop.USER)
    assert played.attempt.stop is Stop.USER


@pytest.mark.parametrize(("kill_wait_s", "after_s"), [(30.0, 25.0), (6.0, 3.0)])
def test_slurm_is_asked_before_it_kills_this_process(kill_wait_s: float, after_s: float) -> None:
    played = Played(kill_wait_s=kill_wait_s)
    played.path.take(StopAsked(signal.SIGTERM))
    assert played.path._ask_slurm_at == pytest.approx(time.monotonic() + after_s, abs=1.0)


@pytest.mark.parametrize(
    ("stop", "time_s", "left_s", "fate"),
    [
        (Stop.USER, 300, math.inf, JobFate.RUNNING),  # what is reserved
        (Stop.USER, 95, 100, JobFate.RUNNING),
        (Stop.CLOCK, 395, 400, JobFate.RUNNING),  # what there is before the limit
        (Stop.SIGNAL, 300, 9000, JobFate.RUNNING),  # of a site or a person
        (Stop.SIGNAL, 895, 900, JobFate.PREEMPTED),  # the partition's grace
        (Stop.SIGNAL, 25, 0, JobFate.PREEMPTED),  # none, but for KillWait
        (Stop.SIGNAL, 25, 0, JobFate.CANCELLED),
        (Stop.SIGNAL, 300, math.inf, JobFate.UNKNOWN),
    ],
)
def test_a_script_has_the_time_to_save_that_there_is(stop: Stop, time_s: float, left_s: float, fate: JobFate) -> None:
    played = Played(reserved_s=300, left_s=left_s, fate=fate)
    played.attempt.kill_within(0.5)  # a rank has ended badly just before
    played.path.ask(stop)
    assert played.attempt.kill_at == pytest.approx(time.monotonic() + time_s, abs=1.0)
    assert played.signals == [signal.SIGTERM]


def test_a_users_request_counts_also_where_its_file_cannot_be_read_again() -> None:
    played = Played()
    played.path.take(StopAsked(None))
    assert played.attempt.stop is Stop.USER, "a signal of unknown origin would have the run requeued"


def test_a_script_has_at_least_half_a_minute_where_nothing_is_reserved() -> None:
    played = Played(reserved_s=0)
    played.path.ask(Stop.USER)
    assert played.attempt.kill_at == pytest.approx(time.monotonic() + 30, abs=1.0)


@pytest.mark.parametrize(
    ("fate", "reserved_s", "stop"),
    [
        (JobFate.PREEMPTED, 120, Stop.SIGNAL),
        (JobFate.CANCELLED, 120, Stop.SIGNAL),
        (JobFate.RUNNING, 120, None),  # somebody's scancel --signal=TERM: the script knows what for
        (JobFate.UNKNOWN, 120, None),
        (JobFate.PREEMPTED, None, None),  # the toolkit's ranks agree by themselves
    ],
)
def test_ranks_that_slurm_has_signalled_are_stopped_without_a_second_signal(
    fate: JobFate, reserved_s: int | None, stop: Stop | None
) -> None:
    played = Played(reserved_s=reserved_s, fate=fate)
    played.path.take_ranks_signal()
    assert (played.attempt.stop, played.signals) == (stop, [])


def test_ranks_that_are_left_to_slurm_have_not_stopped_cleanly() -> None:
    played = Played(Stop.SIGNAL)
    played.path._ask_slurm_at = 0.0
    played.path.leave_the_rest_to_slurm()
    assert played.abandoned
    assert played.attempt.stopped == set()
