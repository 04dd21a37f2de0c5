"""A rank that compiles before its first step is alive, and one that waits is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from toolkit import hang
from toolkit.hang import Activity, Watchdog
from toolkit.nodes.agent.reports import NodeProgress, RankReport
from toolkit.ranks.report import EarlyWork, family_cpu_s

TIMEOUT_S = 600


class Rank:
    """A rank whose clock and use of the CPU the test sets, with the agent and the supervisor that hear of it."""

    def __init__(self) -> None:
        self.now = self.used_s = 0.0
        self.activity = Activity()
        self._work = EarlyWork(self.activity, lambda: self.used_s, lambda: self.now)
        self._agent = NodeProgress(lambda: self.now)
        self.watchdog = Watchdog(TIMEOUT_S, lambda: self.now)

    def go_on(self, seconds: int, cores: float) -> bool:
        """Report each second. Return whether it ever counted as a hang."""
        was_stuck = False
        for _ in range(seconds):
            self.now += 1.0
            self.used_s += cores
            self._work.look()
            now = self.activity
            self._agent.hear(RankReport(1, 0, now.phase, now.step, now.count))
            digest = self._agent.digest()
            assert digest is not None
            self.watchdog.hear("here", digest)
            was_stuck |= self.watchdog.is_stuck()
        return was_stuck


@pytest.mark.parametrize("phase", [hang.SETTING_UP, hang.PRIMING, hang.IN_STEP, hang.OWN_CODE])
def test_a_compile_that_is_longer_than_the_limit_is_no_hang(phase: str) -> None:
    rank = Rank()
    rank.activity.phase = phase
    assert not rank.go_on(3 * TIMEOUT_S, cores=0.3)


@pytest.mark.parametrize("phase", [hang.WAITING_FOR_DATA, hang.LOGGING, hang.LOADING])
def test_a_rank_that_keeps_a_core_busy_as_it_waits_hangs(phase: str) -> None:
    rank = Rank()
    rank.activity.phase = phase
    assert rank.go_on(TIMEOUT_S, cores=1.0)


def test_a_rank_that_uses_no_cpu_hangs_before_its_first_step() -> None:
    rank = Rank()
    rank.activity.phase = hang.IN_STEP
    assert rank.go_on(TIMEOUT_S, cores=0.005)


def test_after_the_first_step_the_cpu_says_nothing() -> None:
    rank = Rank()
    rank.activity.phase = hang.IN_STEP
    assert not rank.go_on(TIMEOUT_S, cores=1.0)
    rank.activity.step = 1
    assert rank.go_on(TIMEOUT_S, cores=1.0)


def test_compilers_that_a_rank_has_started_count_as_it() -> None:
    """Those that run, and those that have ended."""
    before_s = family_cpu_s()
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        alive_s = family_cpu_s() - before_s
        child.communicate(b"\n")
    assert alive_s >= 0.25
    assert family_cpu_s() - before_s >= 0.25
