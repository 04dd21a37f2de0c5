"""The progress of a node's ranks, and the digest sent for many ranks."""

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from toolkit.nodes.agent.reports import LONGEST_LOOK_S, SILENT_S, NodeProgress, ProgressSummary, RankReport, parse

REPORT = RankReport(1, 3, "in a step", 7, 2)


class Node:
    """The ranks of a node, under a clock that the test turns."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.progress = NodeProgress(lambda: self.now)

    def says(self, rank: int, phase: str = "in a step", step: int | None = 7, count: int = 0, attempt: int = 1) -> bool:
        return self.progress.on_report(RankReport(attempt, rank, phase, step, count))

    def pass_s(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1
            self.progress.summarize()

    @property
    def digest(self) -> ProgressSummary:
        digest = self.progress.summarize()
        assert digest is not None
        return digest


@pytest.fixture
def node() -> Node:
    return Node()


def test_nothing_is_told_before_the_first_report_and_each_rank_is_new_once(node: Node) -> None:
    assert node.progress.summarize() is None
    assert [node.says(3), node.says(3), node.says(4)] == [True, False, True]
    assert (node.digest.ranks, node.digest.silent) == (2, 0)


@pytest.mark.parametrize("change", [{"phase": "evaluating"}, {"step": 8}, {"count": 1}])
def test_a_rank_gets_on_by_its_step_its_counter_or_a_phase(node: Node, change: dict[str, int]) -> None:
    node.says(3)
    before = node.digest.moves
    node.says(3)
    assert node.digest.moves == before
    node.says(3, **change)  # type: ignore[arg-type]
    assert node.digest.moves == before + 1


def test_a_rank_that_goes_round_in_circles_gets_nowhere(node: Node) -> None:
    phases = ["in a step", "waiting for data"]
    for phase in phases:
        node.says(3, phase)
    before = node.digest.moves
    for phase in 5 * phases:
        node.says(3, phase)
    assert node.digest.moves == before
    node.says(3, phases[0], step=8)
    assert node.digest.moves == before + 1


def test_the_fewest_and_the_most_steps_of_a_node_are_told(node: Node) -> None:
    node.says(3, step=None)
    assert (node.digest.least, node.digest.most) == (None, None)
    node.says(4, step=9)
    assert (node.digest.least, node.digest.most) == (None, 9)
    node.says(3, step=2)
    assert (node.digest.least, node.digest.most) == (2, 9)


def test_a_rank_that_is_heard_no_more_is_silent_and_stands_where_it_was(node: Node) -> None:
    node.says(3)
    for _ in range(int(SILENT_S) + 2):
        node.pass_s(1)
        node.says(4)
    assert node.digest.silent == 1
    stopped, waiting = (node.progress.of_rank(1, rank) for rank in (3, 4))
    assert (stopped.is_silent, waiting.is_silent) == (True, False)
    assert (stopped.phase, stopped.step) == ("in a step", 7)
    assert stopped.still_s == pytest.approx(SILENT_S + 2)
    assert node.progress.of_rank(1, 5) is None
    assert node.progress.of_rank(2, 3) is None


def test_the_time_in_which_the_whole_node_was_stopped_does_not_count(node: Node) -> None:
    node.says(3)
    node.now += 3600
    progress = node.progress.of_rank(1, 3)
    assert (progress.still_s, progress.is_silent) == (LONGEST_LOOK_S, False)


def test_a_new_attempt_begins_anew_and_what_is_left_of_the_last_one_is_ignored(node: Node) -> None:
    node.says(3, step=90)
    assert node.says(3, step=60, attempt=2)
    assert not node.says(4, step=91, attempt=1)
    assert node.digest == ProgressSummary(2, 1, 0, 1, 60, 60)


def test_a_report_arrives_as_it_was_sent() -> None:
    assert parse(REPORT.as_bytes()) == REPORT
    told = replace(REPORT, rank=0, fields={"loss": 0.5}, result={"step": 7})
    assert parse(told.as_bytes()) == told


ODD: list[dict[str, Any]]
ODD = [{"attempt": "1"}, {"rank": -1}, {"rank": True}, {"step": 1.5}, {"step": "x"}, {"count": None}, {"phase": 3}]
ODD += [{"fields": []}, {"fields": "x"}, {"result": 7}, {"rank": 2**70}]
GARBAGE = [b"", b"garbage", b"\xff\xfe", b"[" * 100_000, b"[]", b"7", b'"stop"', b"{}", REPORT.as_bytes()[:-1]]


@pytest.mark.parametrize("data", GARBAGE + [json.dumps({**asdict(REPORT), **odd}).encode() for odd in ODD])
def test_what_no_rank_can_have_written_is_none(data: bytes) -> None:
    assert parse(data) is None
