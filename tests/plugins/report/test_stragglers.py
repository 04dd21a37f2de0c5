"""Ranks that are slow for long, by a clock that the test moves by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.scale.slow_ranks import DAY, named, own_times, planted
from toolkit.plugins.report.stragglers import BLOCK_WINDOWS, SLIGHT_BLOCKS, Stragglers, usual_of

EVEN = (1.0, 1.05, 0.95, 1.0)


class World:
    """Two ranks on each node, and a window every 15 s."""

    def __init__(self, ranks_per_node: int = 2) -> None:
        self.now = 1000.0
        self.asked: list[int] = []
        self._per_node = ranks_per_node
        self._stragglers = Stragglers(self.host_of, clock=lambda: self.now)

    def host_of(self, rank: int) -> str:
        self.asked.append(rank)
        return f"node{1 + rank // self._per_node}"

    def windows(self, count: int, own_s: Sequence[float], every_s: float = 15.0) -> None:
        for _ in range(count):
            self.now += every_s
            self._stragglers.update(own_s)

    def named(self) -> list[dict[str, Any]]:
        return [straggler.to_json() for straggler in self._stragglers.named()]

    def slow(self) -> dict[str, list[int]]:
        return {entry["host"]: entry["ranks"] for entry in self.named() if entry["until"] is None}


@pytest.fixture
def world() -> World:
    return World()


def test_a_node_is_named_with_its_ranks_how_slow_and_since_when(world: World) -> None:
    world.windows(10, EVEN)
    world.windows(20, (1.0, 1.0, 1.6, 1.6))
    assert world.named() == [{"host": "node2", "ranks": [2, 3], "ratio": 1.6, "since": 1150.0, "until": None}]
    assert set(world.asked) == {2, 3}  # a host is a question to the store


def test_one_slow_rank_of_a_node_is_named_alone_for_all_others_wait_for_it() -> None:
    world = World(ranks_per_node=4)
    world.windows(5, (1.0,) * 6 + (1.5, 1.0))
    assert world.slow() == {"node2": [6]}


@pytest.mark.parametrize(
    ("count", "every_s"),
    [(4, 60.0), (5, 11.0), (50, 1.0)],
    ids=["few windows", "too short", "many and still too short"],
)
def test_slow_for_a_moment_is_not_slow(world: World, count: int, every_s: float) -> None:
    world.windows(count, (1.0, 1.0, 1.0, 3.0), every_s)
    assert world.named() == []


def test_a_window_in_between_at_the_others_speed_starts_the_count_again(world: World) -> None:
    for _ in range(10):
        world.windows(4, (1.0, 1.0, 1.0, 3.0))
        world.windows(1, EVEN)
    assert world.named() == []


def test_who_has_recovered_is_slow_no_more_and_remembered(world: World) -> None:
    world.windows(6, (2.0, 1.0, 1.0, 1.0))
    assert world.slow() == {"node1": [0]}
    world.windows(1, EVEN)
    assert world.slow() == {}
    world.windows(20, EVEN)
    assert world.named() == [{"host": "node1", "ranks": [0], "ratio": 2.0, "since": 1000.0, "until": 1105.0}]


def test_what_is_usual_for_all_is_slow_for_nobody(world: World) -> None:
    for seconds in (1.0, 5.0, 0.2):  # the shared disk has its days
        world.windows(10, (seconds,) * 4)
    world.windows(10, (0.0,) * 4)
    assert world.named() == []


@pytest.mark.parametrize(
    ("own_s", "usual"),
    [([1.0, 3.0], 1.0), ([1.0, 2.0, 3.0], 1.5), ([1.0, 1.0, 9.0, 9.0], 1.0), ([5.0], 0.0), ([0.0, 1.0, 3.0], 1.0)],
    ids=["two", "three", "half of them slow", "alone", "two and a server"],
)
def test_the_usual_time_is_the_others(own_s: list[float], usual: float) -> None:
    assert usual_of(own_s) == usual


SLIGHTLY = (1.0, 1.02, 1.1, 0.98)


def test_a_rank_that_is_a_tenth_slower_is_named_after_half_an_hour_until_it_is_well(world: World) -> None:
    world.windows(BLOCK_WINDOWS * SLIGHT_BLOCKS - 1, SLIGHTLY, every_s=20.0)
    assert world.named() == []
    world.windows(1, SLIGHTLY, every_s=20.0)
    (entry,) = world.named()
    assert (entry["host"], entry["ranks"], entry["until"]) == ("node2", [2], None)
    assert entry["ratio"] == pytest.approx(1.1, abs=0.05)
    world.windows(BLOCK_WINDOWS, (1.0, 1.0, 1.04, 1.0), every_s=20.0)  # below the limit, and not yet well
    assert world.slow() == {"node2": [2]}
    world.windows(2 * BLOCK_WINDOWS, EVEN, every_s=20.0)
    assert world.slow() == {}


def test_a_burst_in_each_block_does_not_make_a_slow_rank(world: World) -> None:
    for _ in range(3 * SLIGHT_BLOCKS):
        world.windows(4, (1.0, 1.0, 2.0, 1.0), every_s=20.0)
        world.windows(BLOCK_WINDOWS - 4, EVEN, every_s=20.0)
    assert world.named() == []


def test_a_rank_that_is_a_tenth_slower_is_found_in_made_up_noise_and_no_other_one() -> None:
    """A part of the measurement `python -m tests.scale "slow ranks"`."""
    assert [planted(8, seed) is not None for seed in range(5)] == [True] * 5
    times = own_times(np.random.default_rng(7), 16, DAY)
    assert named(times) == {}
