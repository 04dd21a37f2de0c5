"""When Slurm is asked which nodes are drained, and how its answer is used."""

import threading

import pytest

from toolkit.base.process_limits import limits
from toolkit.plugins.testing.fake_slurm import FakeSlurm
from toolkit.run.supervise.node_care import for_drained_nodes

HOSTS = [f"node{number}" for number in range(1, 5)]


class Asking:
    """A watch on a fake Slurm, and its clock."""

    def __init__(self) -> None:
        self.slurm = FakeSlurm()
        self.now = 0.0
        self.watch = for_drained_nodes(self.slurm.drain_reasons, lambda: self.now)

    def look(self) -> None:
        self.watch.look(HOSTS)
        if self.watch._thread is not None:
            self.watch._thread.join()


@pytest.fixture
def asking() -> Asking:
    return Asking()


def test_slurm_is_asked_once_a_minute_for_all_nodes_however_often_somebody_looks(asking: Asking) -> None:
    for _ in range(600):
        asking.now += 0.5
        asking.look()
    assert asking.slurm.asked_for_nodes == ["node[1-4]"] * 5
    assert limits().ask_drained_every_s >= 60


def test_drained_nodes_are_known_with_their_reasons_until_they_are_well_again(asking: Asking) -> None:
    asking.slurm.drains = {"node2": "new fan by root", "node9": "not ours"}
    asking.now += limits().ask_drained_every_s
    asking.look()
    assert asking.watch.found == {"node2": "new fan by root"}
    asking.slurm.drains = {}
    asking.now += limits().ask_drained_every_s
    asking.look()
    assert asking.watch.found == {}


def test_a_controller_that_is_away_changes_nothing(asking: Asking) -> None:
    asking.slurm.drains = {"node2": "new fan by root"}
    asking.now += limits().ask_drained_every_s
    asking.look()
    asking.slurm.is_up, asking.now = False, asking.now + limits().ask_drained_every_s
    asking.look()
    assert len(asking.slurm.asked_for_nodes) == 2
    assert asking.watch.found == {"node2": "new fan by root"}


def test_a_controller_that_is_slow_is_not_asked_again_meanwhile() -> None:
    answer, asked = threading.Event(), []

    def ask(nodes: str) -> dict[str, str]:
        asked.append(nodes)
        answer.wait(10)
        return {}

    now = 0.0
    watch = for_drained_nodes(ask, lambda: now)
    for _ in range(3):
        now += limits().ask_drained_every_s
        watch.look(HOSTS)
    # the first question has had no answer so far
    answer.set()
    watch._thread.join()
    assert len(asked) == 1
