"""Which reports count as progress, and how long there may be none."""

from collections.abc import Callable
from typing import Any

import pytest

from toolkit.hang import START_SHARE, STUCK_SHARE, Watchdog
from toolkit.nodes.agent.reports import LONGEST_LOOK_S, SILENT_S, NodeProgress, RankProgress, RankReport

TIMEOUT_S = 100.0
#: A node tells each second, and a look is half a second.
TOLD_S = 1.5
STUCK_S, START_S = STUCK_SHARE * TIMEOUT_S, START_SHARE * TIMEOUT_S


class Attempt:
    """Ranks that report when the test says so, one on each node.

    The test moves their clock. Each node sends a digest every second.
    """

    def __init__(self, world_size: int = 3) -> None:
        self.now = 1000.0
        self.dog = Watchdog(TIMEOUT_S, lambda: self.now)
        self.nodes = [NodeProgress(lambda: self.now) for _ in range(world_size)]
        self.reports: dict[int, RankReport] = {}
        self.alive = set(range(world_size))

    def say(self, *ranks: int, doing: str = "in a step", done: int | None = None, count: int = 0) -> None:
        for rank in ranks:
            self.reports[rank] = RankReport(1, rank, doing, done, count)
            self.nodes[rank].on_report(self.reports[rank])

    def pass_s(self, seconds: float, meanwhile: Callable[[], None] = lambda: None) -> float | None:
        """Let time pass while the reports are repeated.

        Returns the seconds until the watchdog fired; None if it did not.
        """
        end = self.now + seconds
        began = self.now
        while self.now < end:
            self.now += 0.5
            meanwhile()
            for rank in self.alive & self.reports.keys():
                self.nodes[rank].on_report(self.reports[rank])
            if self.now % 1 == 0:
                self.tell()
            if self.dog.is_stuck():
                return self.now - began
        return None

    def tell(self) -> None:
        for number, node in enumerate(self.nodes):
            digest = node.summarize()
            if digest is not None:
                self.dog.on_report(f"node{number}", digest)

    def rank_progress(self) -> list[RankProgress]:
        return [progress for rank, node in enumerate(self.nodes) if (progress := node.of_rank(1, rank))]

    def trains(self, step: int = 10) -> None:
        self.say(*self.alive, done=step)


@pytest.fixture
def attempt() -> Attempt:
    return Attempt()


def test_ranks_that_only_repeat_themselves_are_stuck_after_half_the_timeout(attempt: Attempt) -> None:
    attempt.trains()
    assert attempt.pass_s(200) == pytest.approx(STUCK_S, abs=TOLD_S)


def test_before_the_first_step_ranks_have_more_time_but_less_than_torchs_timeout(attempt: Attempt) -> None:
    attempt.say(0, 1, 2, doing="priming")
    bitten = attempt.pass_s(200)
    assert bitten == pytest.approx(START_S, abs=TOLD_S)
    assert bitten < TIMEOUT_S


def test_an_attempt_of_which_nobody_is_ever_heard_is_stuck_too(attempt: Attempt) -> None:
    assert attempt.pass_s(200) == pytest.approx(START_S, abs=TOLD_S)
    assert attempt.dog.nodes == {}


@pytest.mark.parametrize("what", ["step", "count", "phase"])
def test_one_rank_that_gets_on_is_enough(attempt: Attempt, what: str) -> None:
    attempt.trains()
    moments = iter(range(10_000))

    def gets_on() -> None:
        moment = next(moments)
        changed: dict[str, dict[str, Any]] = {
            "step": {"done": 11 + moment},
            "count": {"count": moment},
            "phase": {"doing": f"phase {moment}"},
        }
        attempt.say(1, **{"done": 10, **changed[what]})

    assert attempt.pass_s(500, gets_on) is None


def test_a_rank_that_goes_round_in_circles_gets_nowhere(attempt: Attempt) -> None:
    attempt.trains()
    moments = iter(range(10_000))
    circle = ["in a step", "waiting for data", "saving a checkpoint"]
    bitten = attempt.pass_s(200, lambda: attempt.say(1, doing=circle[next(moments) % 3], done=10))
    assert bitten == pytest.approx(STUCK_S, abs=3)


def test_a_rank_that_stands_still_beside_others_is_noticed_when_these_wait_for_it(attempt: Attempt) -> None:
    attempt.trains()
    counts = iter(range(10_000))
    assert attempt.pass_s(80, lambda: attempt.say(0, 2, doing="evaluating", done=10, count=next(counts))) is None
    assert attempt.pass_s(200) == pytest.approx(STUCK_S, abs=TOLD_S)
    still = {progress.rank: progress.still_s for progress in attempt.rank_progress()}
    assert still[1] == pytest.approx(80 + STUCK_S, abs=TOLD_S)
    assert still[0] == still[2] == pytest.approx(STUCK_S, abs=TOLD_S)


def test_who_waits_is_told_from_who_is_silent(attempt: Attempt) -> None:
    attempt.trains()
    attempt.alive = {0, 2}
    attempt.pass_s(SILENT_S + 1)
    assert [progress.is_silent for progress in attempt.rank_progress()] == [False, True, False]


def test_the_time_in_which_the_supervisor_was_stopped_itself_does_not_count(attempt: Attempt) -> None:
    """The job was suspended for an hour. The ranks report right after it."""
    attempt.trains()
    attempt.pass_s(STUCK_S / 2)
    attempt.now += 3600
    assert not attempt.dog.is_stuck()
    assert attempt.pass_s(200) == pytest.approx(STUCK_S / 2 - LONGEST_LOOK_S, abs=TOLD_S)
