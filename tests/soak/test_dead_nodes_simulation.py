"""A thousand hours of a node on bad networks: no node is taken for dead, and one that is gone is found in time."""

import secrets

import pytest

from tests.plugins.node_watch.test_dead_nodes import Network

pytestmark = pytest.mark.soak
NODES, HOURS = 4, 84.0  #: three of them are watched, four times
#: A link is away for up to this time, once in ten minutes. Longer than ``DEAD_S`` is a death.
FLAP_S, FLAPS_EVERY_S = 1.9, 600.0


@pytest.mark.parametrize(
    ("loss", "delay_s"), [(0.0, 0.001), (0.01, 0.02), (0.05, 0.1), (0.1, 0.3)], ids=["none", "1 %", "5 %", "10 %"]
)
def test_no_node_is_taken_for_dead_in_a_thousand_hours(loss: float, delay_s: float) -> None:
    seed = secrets.randbelow(10**9)
    network = Network(NODES, loss, delay_s=delay_s, seed=seed)
    print(f"seed {seed}")
    network.pass_s(FLAPS_EVERY_S)  # in which the job gets to know how long packets are lost
    while network.now < HOURS * 3600:
        network.cut(network.dice.choice(network.hosts[1:]), for_s=network.dice.uniform(0.2, FLAP_S))
        network.pass_s(network.dice.expovariate((NODES - 1) / FLAPS_EVERY_S))
    assert network.failed() == [], f"seed {seed}"
    print(f"{len(network.asked)} questions in {HOURS * (NODES - 1):.0f} hours")
    network.cut("node2")
    network.pass_s(10)
    assert {*network.failed()} == {"node2"}
