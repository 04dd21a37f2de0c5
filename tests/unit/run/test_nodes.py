"""The nodes on which an attempt runs."""

import errno
import os
from pathlib import Path

import pytest

from toolkit.base import fsio
from toolkit.base.errors import RequestError
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.verdict import RankFailure
from toolkit.run.job import nodes
from toolkit.run.job.nodes import BadNode, Nodes

HOSTS = ("a", "b", "c", "d")


def pool(run: RunDir, spare: int = 1, *, allow_fewer: bool = False) -> Nodes:
    return Nodes(run, Allocation(HOSTS, (2, 2, 2, 2), 1, job_id="7"), spare=spare, allow_fewer=allow_fewer)


def hosts(of: Nodes) -> tuple[str, ...] | None:
    """Return the hosts of the next attempt, and note them as used."""
    plan = of.plan()
    if plan is None:
        return None
    of.note_used(plan)
    return plan.hosts


def test_spares_are_kept_for_later_and_then_stand_in_at_the_lost_nodes_place(run: RunDir) -> None:
    of = pool(run)
    assert hosts(of) == ("a", "b", "c")
    of.condemn("b", "no answer")
    plan = of.plan()
    assert (plan.hosts, plan.world_size, plan.job_id) == (("a", "d", "c"), 6, "7")


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


def test_a_suspected_node_that_nothing_can_replace_is_used_on_but_remembered(run: RunDir) -> None:
    of = pool(run, spare=0)
    of.suspect("a", 2)
    assert hosts(of) == ("a", "b", "c", "d")
    assert list(of.bad) == list(nodes.remembered(run)) == ["a"]


def test_the_next_job_uses_remembered_nodes_last(run: RunDir) -> None:
    pool(run).condemn("b", "no answer")
    again = pool(run)
    assert hosts(again) == ("a", "c", "d")
    again.condemn("c", "x")
    assert hosts(again) == ("a", "b", "d")
    nodes.forget(run)
    assert hosts(pool(run)) == ("a", "b", "c")


def test_bad_nodes_that_cannot_be_read_are_unknown_and_the_run_goes_on(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool(run).condemn("b", "no answer")
    path, read = run.path / "nodes.json", fsio.read_bytes

    def fail(self: Path, most_bytes: int) -> bytes:
        if self == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self))
        return read(self, most_bytes)

    monkeypatch.setattr(fsio, "read_bytes", fail)
    of = pool(run)
    assert f"{path} cannot be read: Input/output error" in caplog.text
    assert hosts(of) == ("a", "b", "c")
    assert of.newly_bad(0.0) == set()
    of.condemn("c", "no answer")  # this job knows it, and the file keeps what it has
    assert hosts(of) == ("a", "b", "d")
    assert "nodes.json: c is not recorded: " in caplog.text
    monkeypatch.undo()
    assert [*nodes.remembered(run)] == ["b"]


def test_nodes_that_two_processes_remember_are_both_kept(run: RunDir) -> None:
    first, second = pool(run), pool(run)
    first.condemn("a", "x")
    second.condemn("b", "y")
    assert set(nodes.remembered(run)) == {"a", "b"}


def test_a_spare_replaces_a_node_of_its_own_shape_only(run: RunDir) -> None:
    uneven = Allocation(HOSTS, (2, 1, 1, 1), 1, job_id="7", components=(0, 1, 1, 1))
    of = Nodes(run, uneven, spare=1, allow_fewer=False)
    assert hosts(of) == ("a", "b", "c")
    assert of.dispensable(["a", "b", "d"]) == {"b", "d"}
    of.note(sick={"a": "hot", "b": "hot"}, drained={})
    assert [*of.replaceable(["a", "b", "c"], HOSTS)] == ["b"]
    of.condemn("b", "no answer")
    assert hosts(of) == ("a", "d", "c")
    of.condemn("a", "no answer")
    assert hosts(of) is None


def test_without_its_only_node_of_a_shape_a_run_goes_on_with_fewer(run: RunDir) -> None:
    of = Nodes(run, Allocation(HOSTS, (2, 1, 1, 1), 1, job_id="7"), spare=0, allow_fewer=True)
    of.condemn("a", "no answer")
    assert of.dispensable(["b"]) == {"b"}
    assert hosts(of) == ("b", "c", "d")


@pytest.mark.parametrize(
    ("tasks", "spare", "words"),
    [((1, 1), 2, ["spare_nodes", "2 nodes", "--nodes"]), ((2, 1), 1, ["spare_nodes", "2,1", "--ntasks-per-node"])],
)
def test_spares_that_cannot_be_are_refused(tasks: tuple[int, ...], spare: int, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        Allocation(("a", "b"), tasks, 1).without_spares(spare)
    assert all(word in str(caught.value) for word in words)


def leaving(of: Nodes, at_work: str = "abc", silent: str = "") -> dict[str, str]:
    return {host: bad.why for host, bad in of.replaceable([*at_work], set(HOSTS) - {*silent}).items()}


def test_a_drained_or_sick_node_is_left_for_a_good_spare(run: RunDir) -> None:
    of = pool(run)
    of.note(sick={}, drained={"b": "new fan"})
    assert leaving(of) == {"b": "drained: new fan"}
    of.note(sick={"a": "no room on /tmp"}, drained={})
    assert leaving(of) == {"a": "no room on /tmp"}
    of.condemn("a", "no room on /tmp")
    assert hosts(of) == ("b", "c", "d")
    assert (leaving(of), of.degraded) == ({}, {})


@pytest.mark.parametrize(
    "what", ["none", "sick itself", "drained itself", "silent", "bad", "lost"], ids=lambda what: f"the spare is {what}"
)
def test_without_a_good_spare_no_node_is_left(run: RunDir, what: str) -> None:
    if what == "bad":
        nodes.remember(run, "d", "ended 2 attempts")
    of = pool(run, spare=0 if what == "none" else 1)
    sick, drained = {"b": "hot"}, {}
    if what == "sick itself":
        sick["d"] = "hot"
    if what == "drained itself":
        drained["d"] = "new fan"
    if what == "lost":
        of.condemn("d", "lost")
    of.note(sick=sick, drained=drained)
    assert leaving(of, "abcd" if what == "none" else "abc", "d" if what == "silent" else "") == {}
    assert of.degraded["b"].why == "hot"


def test_a_doubtful_spare_will_do_and_without_one_all_keep_their_places(run: RunDir) -> None:
    of = pool(run)
    of.doubt({"d": "was slow", "b": "was slow"})
    assert hosts(of) == ("a", "b", "c")
    of.note(sick={}, drained={"b": "new fan"})
    assert leaving(of) == {"b": "drained: new fan"}
    of = pool(run, spare=0)
    of.doubt({"a": "was slow"})
    assert hosts(of) == ("a", "b", "c", "d")


def test_no_more_nodes_are_left_than_there_are_spares(run: RunDir) -> None:
    of = pool(run)
    of.note(sick={"b": "hot", "c": "hot"}, drained={})
    assert list(leaving(of)) == ["b"]


def test_the_batch_host_is_left_when_it_is_sick_but_not_when_it_is_drained(run: RunDir) -> None:
    of = pool(run)
    of.note(sick={}, drained={"a": "new fan"})
    assert leaving(of) == {}
    of.note(sick={"a": "hot"}, drained={})
    assert leaving(of) == {"a": "hot"}


def test_an_ailing_spare_is_the_last_to_stand_in(run: RunDir) -> None:
    of = pool(run, spare=2)
    of.note(sick={"c": "hot"}, drained={})
    of.condemn("b", "lost")
    assert hosts(of) == ("a", "d")


def test_what_is_wrong_is_logged_once(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    of = pool(run)
    for _ in range(3):
        of.note(sick={"b": "hot"}, drained={"c": "new fan"})
    assert [record.message for record in caplog.records] == ["node b: hot", "node c: drained: new fan"]


def test_a_drained_node_is_remembered_as_one_that_slurm_looks_after(run: RunDir) -> None:
    pool(run).condemn("b", "drained: new fan", is_drained=True)
    pool(run).condemn("c", "lost")
    assert {host: bad.is_drained for host, bad in nodes.remembered(run).items()} == {"b": True, "c": False}
    assert hosts(pool(run)) == ("a", "d", "b")


def test_the_nodes_in_use_stay_under_the_next_supervisor_though_no_slow_one_is_known(run: RunDir) -> None:
    of = pool(run)
    of.note_used(Allocation(HOSTS, (2, 2, 2, 2), 1).on(["b", "c", "d"]))  # the supervisor before it had found a slow
    assert hosts(of) == ("b", "c", "d")
    of.condemn("c", "it was lost")
    assert {*(hosts(of) or ())} == {"a", "b", "d"}


def test_lost_sick_and_suspected_nodes_are_at_fault_for_an_attempts_end() -> None:
    plan = Allocation(HOSTS, (1, 1, 1, 1), 1, job_id="7")
    attempt = Attempt(1, 0.0, plan, lost_nodes={"a"})
    attempt.vacate({"b": BadNode("hot", 0.0), "c": BadNode("drained: fan", 0.0, is_drained=True)})
    attempt.fail(RankFailure(3, "d", "killed by SIGKILL", 0.0))
    assert attempt.nodes_at_fault("d") == {"a": "it was lost", "b": "hot", "d": "killed by SIGKILL"}
    assert attempt.nodes_at_fault("c")["c"] == "a hang"
    assert Attempt(1, 0.0, plan).nodes_at_fault(None) == {}
