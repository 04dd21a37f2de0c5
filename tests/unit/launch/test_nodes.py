"""Which nodes an attempt runs on."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit import rundir
from toolkit.errors import RequestError
from toolkit.launch import nodes
from toolkit.launch.allocation import Allocation
from toolkit.launch.nodes import Nodes
from toolkit.rundir import RunDir

HOSTS = ("a", "b", "c", "d")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return rundir.create("test", tmp_path)


def pool(run: RunDir, spare: int = 1, *, allow_fewer: bool = False) -> Nodes:
    return Nodes(run, Allocation(HOSTS, (2, 2, 2, 2), 1, job_id="7"), spare=spare, allow_fewer=allow_fewer)


def hosts(of: Nodes) -> tuple[str, ...] | None:
    plan = of.plan()
    return None if plan is None else plan.hosts


def test_spares_are_kept_for_later_and_then_stand_in(run: RunDir) -> None:
    of = pool(run)
    assert hosts(of) == ("a", "b", "c")
    of.condemn("b", "no answer")
    plan = of.plan()
    assert plan is not None
    assert (plan.hosts, plan.world_size, plan.job_id) == (("a", "c", "d"), 6, "7")


def test_without_spares_left_there_is_no_plan(run: RunDir) -> None:
    of = pool(run)
    of.condemn("a", "x")
    of.condemn("c", "x")
    assert hosts(of) is None


def test_fewer_nodes_are_used_when_that_is_allowed_down_to_one(run: RunDir) -> None:
    of = pool(run, spare=0, allow_fewer=True)
    for host, left in (("a", "bcd"), ("c", "bd"), ("d", "b")):
        of.condemn(host, "x")
        assert hosts(of) == tuple(left)
    of.condemn("b", "x")
    assert hosts(of) is None


def test_a_node_that_ends_two_attempts_is_replaced(run: RunDir) -> None:
    of = pool(run)
    of.suspect("a", 1)
    assert hosts(of) == ("a", "b", "c")
    of.suspect("a", 2)
    assert hosts(of) == ("b", "c", "d")
    assert nodes.remembered(run)["a"].why == "ended 2 attempts"


def test_a_suspected_node_that_nothing_can_replace_is_used_on_but_remembered(run: RunDir) -> None:
    of = pool(run, spare=0)
    of.suspect("a", 2)
    assert hosts(of) == ("b", "c", "d", "a")
    assert list(of.bad) == list(nodes.remembered(run)) == ["a"]


def test_the_next_job_uses_remembered_nodes_last(run: RunDir) -> None:
    pool(run).condemn("b", "no answer")
    again = pool(run)
    assert hosts(again) == ("a", "c", "d")
    again.condemn("c", "x")
    assert hosts(again) == ("a", "d", "b")
    nodes.forget(run)
    assert hosts(pool(run)) == ("a", "b", "c")


def test_nodes_that_two_processes_remember_are_both_kept(run: RunDir) -> None:
    first, second = pool(run), pool(run)
    first.condemn("a", "x")
    second.condemn("b", "y")
    assert set(nodes.remembered(run)) == {"a", "b"}


@pytest.mark.parametrize(
    ("tasks", "spare", "words"),
    [((1, 1), 2, ["spare_nodes", "2 nodes", "--nodes"]), ((2, 1), 1, ["spare_nodes", "2,1", "--ntasks-per-node"])],
)
def test_spares_that_cannot_be_are_refused(tasks: tuple[int, ...], spare: int, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        Allocation(("a", "b"), tasks, 1).without(spare)
    assert all(word in str(caught.value) for word in words)
