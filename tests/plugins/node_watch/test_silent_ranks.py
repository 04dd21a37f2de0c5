"""When all ranks count as silent, by what the nodes tell."""

import sys
from pathlib import Path

import pytest

from tests.unit.nodes.test_agents import Site
from tests.waiting import wait_for
from toolkit import hang
from toolkit.base.this_node import bare_python
from toolkit.files.rundir import RANK_VARIABLE
from toolkit.nodes.agent.messages import ScriptRankStatus, WatchRanksOrder
from toolkit.nodes.agent.reports import RankProgress
from toolkit.plugins.node_watch import investigation
from toolkit.plugins.node_watch.investigation import SilentRanks

BOUND_S = 300.0
CONFIRMED_S = 21.0  #: two looks


class Nodes:
    """Two nodes with two ranks each, and a clock."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.watch = SilentRanks(4, BOUND_S, lambda: self.now)

    def say(self, rank: int, state: str, still_s: float = 301.0) -> None:
        self.watch.take(ScriptRankStatus(1, rank, state, still_s))

    def is_stuck(self, after_s: float = 0.0) -> bool:
        self.now += after_s
        return self.watch.is_stuck()


def test_a_run_hangs_when_all_ranks_are_silent_and_are_so_at_another_look() -> None:
    nodes = Nodes()
    for rank in range(4):
        assert not nodes.is_stuck(100)
        nodes.say(rank, "silent")
    assert not nodes.is_stuck()
    assert not nodes.is_stuck(CONFIRMED_S / 2)
    assert nodes.is_stuck(CONFIRMED_S)
    assert [progress.rank for progress in nodes.watch.rank_progress()] == [0, 1, 2, 3]
    assert nodes.watch.silence_s == pytest.approx(301 + 1.5 * CONFIRMED_S, abs=0.5)


def test_a_rank_that_the_run_does_not_have_hides_no_hang() -> None:
    nodes = Nodes()
    for rank in range(5):
        nodes.say(rank, "silent" if rank < 4 else "moving")
    assert not nodes.is_stuck()
    assert nodes.is_stuck(CONFIRMED_S + 1)


@pytest.mark.parametrize("other", ["moving", "hidden", None])
def test_a_run_does_not_hang_while_one_rank_moves_or_cannot_be_seen(other: str | None) -> None:
    nodes = Nodes()
    for rank in range(3):
        nodes.say(rank, "silent")
    if other is not None:
        nodes.say(3, "silent")
        nodes.say(3, other)
    assert not nodes.is_stuck()
    assert not nodes.is_stuck(10_000)


def test_a_rank_that_moves_while_the_others_are_confirmed_starts_the_wait_anew() -> None:
    nodes = Nodes()
    for rank in range(4):
        nodes.say(rank, "silent")
    assert not nodes.is_stuck()
    nodes.say(2, "moving")
    assert not nodes.is_stuck(CONFIRMED_S)
    nodes.say(2, "silent")
    assert not nodes.is_stuck()
    assert nodes.is_stuck(CONFIRMED_S)


def test_ended_ranks_are_not_waited_for_and_a_run_without_ranks_does_not_hang() -> None:
    nodes = Nodes()
    nodes.say(0, "ended")
    nodes.say(1, "ended")
    nodes.say(2, "silent")
    nodes.say(3, "silent")
    assert not nodes.is_stuck()
    assert nodes.is_stuck(CONFIRMED_S)
    assert [progress.rank for progress in nodes.watch.rank_progress()] == [2, 3]
    nodes.say(2, "ended")
    nodes.say(3, "ended")
    assert not nodes.is_stuck(1000)


def test_an_agent_tells_of_a_silent_rank_and_ends_it_for_its_stack(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path)
    mark = f"{RANK_VARIABLE}={site.run.rank_tag(1, 0)}"
    site.start(f"exec env {mark} PYTHONFAULTHANDLER=1 {sys.executable} -c 'import time; time.sleep(600)'")
    command = bare_python("toolkit.plugins.node_watch.silent_scripts", str(site.run.path), "1", "0.5")

    def watches() -> list[int]:
        return [
            pid for pid in hang.children(site.agent) if "silent_scripts" in Path(f"/proc/{pid}/cmdline").read_text()
        ]

    site.agents.request({"here": WatchRanksOrder(1, tuple(command))}, site.events)
    news = site.next()
    assert (news.attempt, news.rank, news.state) == (1, 0, "silent")
    assert news.still_s > 0.5
    ranks = {"here": [RankProgress(0, "silent", None, news.still_s, False)]}
    (group,) = investigation.collect_stacks(site.agents, site.run, 1, ranks, {}, outside=True, may_end=True)
    assert (group.ranks, group.doing, group.has_answered) == ((0,), "silent", True)
    assert len(watches()) == 1
    site.agents.request({"here": WatchRanksOrder(1, ())}, site.events)
    wait_for(lambda: not watches(), 5, "the end of the watch")
    site.close()
    assert "has ended: hangs will not be detected" not in caplog.text


def test_a_watch_that_ends_by_itself_is_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    site = Site(tmp_path)
    site.start("exec sleep 600")
    site.agents.request({"here": WatchRanksOrder(1, ("true",))}, site.events)
    words = "node here: the watch for silent ranks has ended: hangs will not be detected: see agent-here.log"
    wait_for(lambda: words in caplog.text, 20, words)
    site.close()
