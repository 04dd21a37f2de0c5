"""Nodes whose core or memory is slow."""

from __future__ import annotations

from pathlib import Path

from tests.plugins.site.test_node_history import JOB, run_in
from toolkit.plugins.site.checks import Finding
from toolkit.plugins.site.checks.host import CORE, MEMORY, SPEEDS, best_s, check_speeds
from toolkit.plugins.site.checks.verdict import Heard, judge
from toolkit.run.job.nodes import Nodes


def heard(name: str, core: float, memory: float) -> Heard:
    findings = [Finding(check, "ok", f"{value:g}", value=value) for check, value in ((CORE, core), (MEMORY, memory))]
    return Heard(name, findings, (0.0, 0.0))


def test_a_node_with_a_slow_core_or_memory_is_a_warning_and_used_last(tmp_path: Path) -> None:
    even = [heard(f"n{number}", 1.0 + number / 20, 1.0 - number / 20) for number in (1, 3, 4)]
    assert judge([*even, heard("n2", 0.9, 0.9)], 1.0).slow == {}
    report = judge([*even, heard("n2", 0.5, 1.0)], 1.0)
    assert report.slow == {"n2": "its core speed is 0.5, 45 % of the others': all ranks would wait for its own"}
    assert report.warnings == report.slow
    assert judge(even[:2], 1.0).slow == {}
    nodes = Nodes(run_in(tmp_path), JOB, spare=1, allow_fewer=False)
    nodes.doubt(report.slow)
    plan = nodes.plan()
    assert plan is not None
    assert plan.hosts == ("n1", "n3", "n4")


def test_the_speeds_are_those_of_a_copy_and_of_hashing() -> None:
    found = {finding.check: finding for finding in check_speeds()}
    assert tuple(found) == SPEEDS
    assert all(finding.value is not None and finding.value > 1e7 for finding in found.values()), found
    spins = 100_000
    assert best_s(lambda: sum(range(spins)), 0.05) < best_s(lambda: sum(range(4 * spins)), 0.05)
