"""Nodes that have ended attempts of several runs, or are slow: used last, and named."""

import errno
import os
import time
from pathlib import Path

import pytest

from toolkit.base import fsio
from toolkit.cli import run_facts
from toolkit.files import rundir
from toolkit.files.run_files import RunStatus
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.plugins.site import node_history
from toolkit.plugins.site.checks import Finding
from toolkit.plugins.site.checks.host import CORE, MEMORY, SPEEDS, best_s, check_speeds
from toolkit.plugins.site.checks.verdict import NodeCheck, judge
from toolkit.run.job.nodes import Nodes

JOB = Allocation(("n1", "n2", "n3", "n4"), (1, 1, 1, 1), 1, job_id="7")
FILE = ".nodes.jsonl"


def run_in(root: Path) -> RunDir:
    return rundir.create("name", root)


def test_a_node_that_has_ended_attempts_of_two_runs_is_used_last_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third = (run_in(tmp_path) for _ in range(3))
    for run in (first, second):
        node_history.note(run, {"n2": "it was lost"})
    node_history.note(first, {"n3": "a hang"})
    node_history.note(first, {"n3": "a hang"})  # one run, whose own fault it may be
    assert node_history.doubtful(tmp_path) == {
        "n2": "ended 2 attempts of 2 runs in 30 days, the last 0 s ago: it was lost"
    }
    plan = Nodes(third, JOB, spare=1, allow_fewer=False, doubtful=node_history.doubtful_for(third)).plan()
    assert plan.hosts == ("n1", "n3", "n4")
    assert "node n2 ended 2 attempts of 2 runs" in caplog.text
    third.write_status(RunStatus(nodes=("n2", "n3")))
    doubtful = run_facts.facts(third)["doubtful_nodes"]
    assert [(host, text[:16]) for host, text in doubtful.items()] == [("n2", "ended 2 attempts")]


def test_without_a_spare_a_doubtful_node_is_used_all_the_same(tmp_path: Path) -> None:
    for run in (run_in(tmp_path), run_in(tmp_path)):
        node_history.note(run, {"n2": "it was lost"})
    plan = Nodes(run, JOB, spare=0, allow_fewer=False, doubtful=node_history.doubtful_for(run)).plan()
    assert {*plan.hosts} == {*JOB.hosts}


def test_what_is_old_is_left_out_and_a_full_disk_costs_the_note_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = run_in(tmp_path), run_in(tmp_path)
    long_ago = {"version": 1, "host": "n2", "run": old.id, "time": time.time() - 31 * 86_400, "why": "a hang"}
    fsio.append_shared_line(tmp_path / FILE, long_ago)
    node_history.note(new, {"n2": "it was lost"})
    assert node_history.doubtful(tmp_path) == {}

    def full(path: Path, line: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fsio, "append_shared_line", full)
    node_history.note(new, {"n2": "it was lost"})
    assert "cannot be noted" in caplog.text


def test_a_history_that_cannot_be_read_now_makes_no_node_doubtful(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(root: Path) -> dict[str, str]:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), FILE)

    run = run_in(tmp_path)
    monkeypatch.setattr(node_history, "doubtful", fails)
    plan = Nodes(run, JOB, spare=1, allow_fewer=False, doubtful=node_history.doubtful_for(run)).plan()
    assert plan.hosts == ("n1", "n2", "n3")
    assert "is not known" in caplog.text


def test_the_line_of_a_writer_that_died_costs_no_other_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = run_in(tmp_path), run_in(tmp_path)
    node_history.note(first, {"n2": "it was lost"})
    with (tmp_path / FILE).open("a") as file:
        file.write('{"version": 1, "host": "n3", "ru')
    node_history.note(second, {"n2": "a hang"})
    node_history.note(second, {"n4": "a hang"})
    assert (tmp_path / FILE).read_text().splitlines()[1] == '{"version": 1, "host": "n3", "ru'
    assert [*node_history.doubtful(tmp_path)] == ["n2"]
    assert caplog.text.count(f"{tmp_path / FILE}, line 2, cannot be read") == 1


def heard(name: str, core: float, memory: float) -> NodeCheck:
    findings = [Finding(check, "ok", f"{value:g}", value=value) for check, value in ((CORE, core), (MEMORY, memory))]
    return NodeCheck(name, findings, (0.0, 0.0))


def test_a_node_with_a_slow_core_or_memory_is_a_warning_and_used_last(tmp_path: Path) -> None:
    even = [heard(f"n{number}", 1.0 + number / 20, 1.0 - number / 20) for number in (1, 3, 4)]
    assert judge([*even, heard("n2", 0.9, 0.9)], 1.0).slow == {}
    report = judge([*even, heard("n2", 0.5, 1.0)], 1.0)
    assert report.slow == {"n2": "its core speed is 0.5, 45 % of the others': all ranks would wait for its own"}
    assert report.warnings == report.slow
    assert judge(even[:2], 1.0).slow == {}
    nodes = Nodes(run_in(tmp_path), JOB, spare=1, allow_fewer=False)
    nodes.doubt(report.slow)
    assert nodes.plan().hosts == ("n1", "n3", "n4")


def test_the_speeds_are_those_of_a_copy_and_of_hashing() -> None:
    found = {finding.check: finding for finding in check_speeds()}
    assert tuple(found) == SPEEDS
    assert all(finding.value is not None and finding.value > 1e7 for finding in found.values()), found
    spins = 100_000
    assert best_s(lambda: sum(range(spins)), 0.05) < best_s(lambda: sum(range(4 * spins)), 0.05)
