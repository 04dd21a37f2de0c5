"""When silent nodes are asked, and when they count as dead. The network is played, packet by packet.

`tests/soak/test_dead_nodes_simulation.py` plays 1,000 hours of a node.
"""

import math
import random
from collections.abc import Sequence
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.plugins.node_watch.batch_host_watch import PATIENT_S, DeadNodes
from toolkit.run.supervise.node_care import NodePoller
from toolkit.slurm.reachable import AGAIN_S

HEARTBEAT_S = 0.25
BATCH_HOST = "node0"
#: What TCP waits for an answer before it sends again, at first. Each further time it waits twice as long.
RESEND_S = 0.2


class Network:
    """Nodes that answer but while they are ``away``. Packets are lost, and answers come after up to ``delay_s``."""

    def __init__(
        self, nodes: int = 4, loss: float = 0.0, spares: int = 1, delay_s: float = 0.001, seed: int = 0
    ) -> None:
        self.hosts = [f"node{number}" for number in range(nodes)]
        self.away: dict[str, tuple[float, float]] = dict.fromkeys(self.hosts, (0.0, 0.0))
        self.signs = dict.fromkeys(self.hosts, 100.0)
        self._sending = dict.fromkeys(self.hosts, (100.0, RESEND_S))  #: the next heartbeat, TCP's wait after it
        self.loss, self.delay_s, self.dice = loss, delay_s, random.Random(seed)
        self.now, self.asked, self.given_up = 100.0, list[set[str]](), set[str]()
        self.heartbeat_s, self.is_connected = HEARTBEAT_S, True
        self.events: SimpleQueue[Any] = SimpleQueue()
        nodes_of_job = SimpleNamespace(can_lose=lambda hosts: len(hosts) <= spares)
        allocation = SimpleNamespace(hosts=self.hosts)
        slurm = SimpleNamespace(available=lambda: self.is_connected)
        job = SimpleNamespace(slurm=slurm, unreachable=lambda *asked: self.unreachable(*asked))
        context: Any = SimpleNamespace(
            agents=self, nodes=nodes_of_job, allocation=allocation, events=self.events, job=job
        )
        self.dead = DeadNodes(context, lambda: self.now)

    # what agents tell

    @property
    def heard_hosts(self) -> frozenset[str]:
        return frozenset(self.hosts)

    @property
    def unsure_hosts(self) -> frozenset[str]:
        return frozenset(host for host in self.hosts if self.now - self.last_sign(host) > 2.5 * HEARTBEAT_S)

    def last_sign(self, host: str) -> float:
        if host in self.given_up:
            return math.inf
        at, wait_s = self._sending[host]
        while at <= self.now:
            answered = self.answered(host, at)
            if answered is not None:
                self.signs[host] = answered
                at, wait_s = at + HEARTBEAT_S, RESEND_S
            else:
                at, wait_s = at + wait_s, 2 * wait_s
        self._sending[host] = at, wait_s
        return min(self.signs[host], self.now)

    def answered(self, host: str, at: float) -> float | None:
        """Return when the answer to a packet arrives that is sent to ``host`` at this time; None if one is lost."""
        begun, ended = self.away[host]
        is_lost = begun <= at < ended or (self.loss and self.dice.random() < 1 - (1 - self.loss) ** 2)
        return None if is_lost else at + self.dice.random() * self.delay_s

    def unreachable(self, hosts: Sequence[str], timeout_s: float) -> set[str]:
        self.asked.append({*hosts})
        silent, until, came = {*hosts}, self.now + timeout_s, list[float]()
        for host in hosts:
            at = self.now
            while at < until:
                answered = self.answered(host, at)
                if answered is not None and answered <= until:
                    silent.discard(host)
                    came.append(answered)
                    break
                at += AGAIN_S
        self.now = until if silent else max(came)
        return silent

    # what happens

    def pass_s(self, seconds: float) -> None:
        """Look each half second, as the loop of an attempt does."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            unsure = self.unsure_hosts - {BATCH_HOST}
            if unsure:
                self.dead.ask(sorted(unsure))

    def cut(self, *hosts: str, for_s: float = 1e9) -> None:
        begun = self.now + self.dice.random()
        for host in hosts:
            self.away[host] = (begun, begun + for_s)

    def failed(self) -> list[str]:
        return [self.events.get().host for _ in range(self.events.qsize())]


@pytest.fixture
def network() -> Network:
    return Network()


def test_nobody_is_asked_while_all_speak(network: Network) -> None:
    network.pass_s(60)
    assert network.asked == []


def test_a_node_that_is_gone_is_dead_within_two_and_a_half_seconds(network: Network) -> None:
    network.cut("node2")
    while not network.events.qsize():
        network.pass_s(0.5)
    assert network.failed() == ["node2"]
    assert network.now - network.away["node2"][0] < 2.5


@pytest.mark.parametrize("seconds", [0.7, 1.0, 1.5, 1.9])
def test_a_link_that_flaps_is_no_death(network: Network, seconds: float) -> None:
    for _ in range(100):
        network.cut("node1", for_s=seconds)
        network.pass_s(20 + network.dice.random())
    assert network.failed() == []
    assert network.asked


def test_where_silences_have_ended_by_themselves_longer_ones_are_waited_for(network: Network) -> None:
    network.cut("node1", for_s=1.9)
    network.pass_s(20)
    network.cut("node1", for_s=3.3)
    network.pass_s(20)
    assert network.failed() == []


def test_a_node_that_was_given_up_while_it_was_asked_teaches_nothing(network: Network) -> None:
    """It has no connection any more. Before, the next lost node was waited for three times as long."""
    network.cut("node1")
    network.pass_s(4)
    assert {*network.failed()} == {"node1"}
    played: Any = network
    ask = network.unreachable
    played.unreachable = lambda *asked: (ask(*asked), network.given_up.add("node1"))[0]
    network.dead.ask(["node1"])
    network.cut("node2")
    while "node2" not in network.failed():
        network.pass_s(0.5)
    assert network.now - network.away["node2"][0] < 3


def test_who_is_cut_off_oneself_calls_nobody_dead(network: Network) -> None:
    network.is_connected = False
    network.cut(*network.hosts)
    network.pass_s(60)
    assert network.failed() == []


@pytest.mark.parametrize("silent", [["node1", "node2"], ["node1", "node2", "node3"]])
def test_more_nodes_than_there_are_spares_may_be_behind_a_switch(network: Network, silent: list[str]) -> None:
    network.cut(*silent, for_s=PATIENT_S - 1)
    network.pass_s(20)
    assert network.failed() == []
    network.cut(*silent)
    network.pass_s(20)
    assert {*network.failed()} == {*silent}


def test_all_nodes_may_be_silent_for_our_own_link() -> None:
    network = Network(spares=3)
    network.cut("node1", "node2", "node3", for_s=PATIENT_S - 1)
    network.pass_s(20)
    assert network.failed() == []


def test_a_node_whose_agent_is_heard_again_is_not_dead_though_nothing_answers(network: Network) -> None:
    """Its slurmd is being restarted."""
    network.cut("node2", for_s=1.5)
    played: Any = network
    answers = network.unreachable
    played.unreachable = lambda hosts, timeout_s: answers(hosts, timeout_s) | {*hosts}
    network.pass_s(20)
    assert network.failed() == []


@pytest.mark.parametrize(("loss", "hours"), [(0.01, 0.5), (0.05, 0.1), (0.1, 0.05)])
def test_lost_packets_are_no_death(loss: float, hours: float) -> None:
    network = Network(loss=loss, delay_s=0.1)
    network.pass_s(hours * 3600)
    assert network.failed() == []


def test_questions_are_not_asked_more_often_than_that() -> None:
    asked, now = list[list[str]](), [100.0]

    def ask(hosts: list[str]) -> dict[str, str]:
        asked.append(hosts)
        return {}

    poller = NodePoller(ask, 1.0, lambda: now[0], first=0.0)
    poller.look(["a"])
    poller._thread.join()
    now[0] += 0.5
    poller.look(["a"])
    poller._thread.join()
    assert asked == [["a"]]
