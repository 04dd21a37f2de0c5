"""`toolkit doctor` without Slurm, and inside an allocation that is too small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.cli.main import main
from toolkit.plugins.site import doctor
from toolkit.plugins.site.checks import Finding
from toolkit.plugins.site.checks.verdict import Heard, judge


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path / "not/made/yet"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


def test_without_slurm_it_checks_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = main(["doctor", "--json", "cluster.cpus_per_task=60000"])
    told = json.loads(capsys.readouterr().out)
    (node,) = told["nodes"].values()
    assert (code, told["fine"], node["bad"]) == (1, False, None)  # no fault of the node: the request is too large
    assert "of the 60000 CPUs that the ranks need are usable" in told["common"][0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--nodes", "2"], "2 nodes need Slurm"),
        (["--nodes", "0"], "1 or more"),
        (["a.yaml", "b.yaml"], "one CONFIG at most"),
        (["cluster.partitoin=gpu"], "did you mean 'cluster.partition'"),
    ],
)
def test_a_wrong_request_is_refused(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *argv]) == 2
    assert words in capsys.readouterr().err


def test_more_nodes_than_the_allocation_has_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"JOB_ID": "7", "JOB_NODELIST": "node[1-2]", "NTASKS": "2", "TASKS_PER_NODE": "1(x2)"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert main(["doctor", "--nodes", "3"]) == 2
    assert "this allocation has 2" in capsys.readouterr().err


def test_nodes_of_a_heterogeneous_job_are_not_looked_at_in_one_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"JOB_ID": "7", "JOB_NODELIST": "node1", "HET_SIZE": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for number in range(2):
        of_component = {"JOB_NODELIST": f"node{number + 1}", "NTASKS": "1", "TASKS_PER_NODE": "1"}
        for name, value in of_component.items():
            monkeypatch.setenv(f"SLURM_{name}_HET_GROUP_{number}", value)
    assert main(["doctor"]) == 2
    told = capsys.readouterr().err
    assert "this heterogeneous job needs several" in told
    assert "call it on a login node, with cluster.partition=NAME" in told


def test_the_table_has_a_row_for_each_node_and_no_column_without_figures() -> None:
    nodes = [
        Heard("node1", [Finding("cpus", "ok", "8")]),
        Heard("node2", [Finding("cpus", "bad", "4 of 8", "only 4 of the 8 CPUs")]),
        Heard("node3"),
    ]
    report = judge(nodes, 1.0)
    assert doctor.rows(report) == [
        ("NODE", "VERDICT", "CPUS"),
        ("node1", "ok", "8"),
        ("node2", "bad", "4 of 8"),
        ("node3", "warning", "-"),
    ]
