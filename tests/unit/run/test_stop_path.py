"""The first reason to stop counts, and Slurm is asked before it kills the supervisor."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.nodes.allocation import Allocation
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.facts import Stop
from toolkit.run.supervise.stop_path import StopPath
from toolkit.slurm.commands import Settings


class Played:
    """A stop path of a job of Slurm, with the attempt that it changes."""

    def __init__(self, stop: Stop | None = None, kill_wait_s: float = 30.0) -> None:
        self.attempt = Attempt(1, 0.0, Allocation(("here",), (1,), 1), stop=stop, stopped={0})
        job = SimpleNamespace(
            slurm=object(),
            settings=Settings(kill_wait_s=kill_wait_s),
            takes_limit_signal=lambda number: False,
            is_being_ended=lambda: True,
        )
        context: Any = SimpleNamespace(
            job=job,
            asked=lambda: None,
            is_foreign=False,
            allocation=SimpleNamespace(job_id="1"),
            journal=SimpleNamespace(set_status=lambda *_: None),
        )
        self.abandoned = False
        ranks: Any = SimpleNamespace(abandon=lambda: setattr(self, "abandoned", True))
        store: Any = SimpleNamespace(propose=lambda kind, by: None)
        self.path = StopPath(context, self.attempt, ranks, store)


@pytest.mark.parametrize("first", [Stop.CLOCK, Stop.HALVING, Stop.SIGNAL])
def test_of_two_reasons_to_stop_the_first_counts_unless_a_user_gives_the_second(first: Stop) -> None:
    played = Played(first)
    for later in (Stop.SIGNAL, Stop.CLOCK, Stop.HALVING):
        played.path.ask(later)
        assert played.attempt.stop is first
    played.path.ask(Stop.USER)
    assert played.attempt.stop is Stop.USER


@pytest.mark.parametrize(("kill_wait_s", "after_s"), [(30.0, 25.0), (6.0, 3.0)])
def test_slurm_is_asked_before_it_kills_this_process(kill_wait_s: float, after_s: float) -> None:
    played = Played(kill_wait_s=kill_wait_s)
    played.path.take_signal(signal.SIGTERM)
    assert played.path._ask_slurm_at == pytest.approx(time.monotonic() + after_s, abs=1.0)


def test_ranks_that_are_left_to_slurm_have_not_stopped_cleanly() -> None:
    played = Played(Stop.SIGNAL)
    played.path._ask_slurm_at = 0.0
    played.path.leave_the_rest_to_slurm()
    assert played.abandoned
    assert played.attempt.stopped == set()
