"""When all ranks count as silent, by the lines of the nodes."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import pytest

from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.line_channel import ChannelEnded, ErrorLine, Events, LineChannel, NodeLine
from toolkit.plugins.node_watch.silence import NodesWatch

BOUND_S = 300.0
CONFIRMED_S = 21.0  #: two looks


class Nodes(LineChannel):
    """Two nodes with two ranks each, and a clock."""

    def __init__(self) -> None:
        self.events: Events = Events()
        self.began = 0.0
        self.now = 1000.0
        self.asked: list[str] = []
        self.watch = NodesWatch(self, Allocation(("n1", "n2"), (2, 2), 1), BOUND_S, lambda: self.now)

    def send(self, line: str) -> None:
        self.asked.append(line)

    def end(self) -> None: ...

    def say(self, rank: int, state: str, still_s: float = 301.0) -> None:
        self.says({"rank": rank, "is": state, "still_s": still_s})

    def says(self, message: Any) -> None:
        self.events.put(NodeLine(0, json.dumps(message), time.time()))

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
    assert [standing.rank for standing in nodes.watch.standings()] == [0, 1, 2, 3]
    assert nodes.watch.still_s == pytest.approx(301 + 1.5 * CONFIRMED_S, abs=0.5)


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
    assert [standing.rank for standing in nodes.watch.standings()] == [2, 3]
    nodes.say(2, "ended")
    nodes.say(3, "ended")
    assert not nodes.is_stuck(1000)


def test_stacks_are_waited_for_until_each_node_has_answered_or_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    nodes = Nodes()
    nodes.says({"answered": True})
    nodes.says({"answered": True})
    nodes.watch.ask_for_stacks()
    assert nodes.asked == ["stacks"]
    nodes = Nodes()
    nodes.says({"answered": True})
    nodes.events.put(ErrorLine("srun: error: Node failure on n2"))
    nodes.events.put(ChannelEnded())
    with caplog.at_level(logging.WARNING):
        nodes.watch.ask_for_stacks()
    assert "a hang is not noticed: srun: error: Node failure on n2" in caplog.text


def test_lines_that_are_no_words_of_ours_change_nothing() -> None:
    nodes = Nodes()
    messages: list[Any] = [[], 1, "x", {}, {"rank": "x"}, {"rank": 0, "is": "silent", "still_s": None}]
    for message in messages:
        nodes.says(message)
    assert not nodes.is_stuck()
    assert nodes.watch.standings() == []
