"""When silent nodes are asked, and when they count as dead."""

from __future__ import annotations

from collections.abc import Sequence
from queue import SimpleQueue
from typing import Any

import pytest

from toolkit.run.supervise.node_care import ASK_DEAD_EVERY_S, for_dead_nodes


class Network:
    """Nodes that all answer but those in ``dead``."""

    def __init__(self) -> None:
        self.dead: set[str] = set()
        self.asked: list[set[str]] = []
        self.now = 100.0
        self.events: SimpleQueue[Any] = SimpleQueue()
        self.is_connected = True
        self.poller = for_dead_nodes(self.events, lambda: self.is_connected, self.ask, lambda: self.now)

    def ask(self, hosts: Sequence[str]) -> set[str]:
        self.asked.append(set(hosts))
        return set(hosts) & self.dead

    def look(self, *silent: str) -> None:
        self.now += ASK_DEAD_EVERY_S
        self.poller.look(silent)
        if self.poller._thread is not None:
            self.poller._thread.join()

    def failed(self) -> list[str]:
        return [self.events.get().host for _ in range(self.events.qsize())]


@pytest.fixture
def network() -> Network:
    return Network()


def test_nobody_is_asked_while_all_speak(network: Network) -> None:
    network.look()
    assert network.asked == []


def test_a_silent_node_that_answers_is_left_alone(network: Network) -> None:
    for _ in range(5):
        network.look("a")
    assert network.failed() == []


def test_a_node_that_does_not_answer_is_dead(network: Network) -> None:
    network.dead = {"b"}
    network.look("a", "b")
    assert network.failed() == ["b"]


def test_who_is_cut_off_oneself_calls_nobody_dead(network: Network) -> None:
    network.dead, network.is_connected = {"a", "b"}, False
    for _ in range(4):
        network.look("a", "b")
    assert network.failed() == []


def test_questions_are_not_asked_more_often_than_that(network: Network) -> None:
    network.look("a")
    network.now -= 1
    network.poller.look(["a"])
    assert len(network.asked) == 1
