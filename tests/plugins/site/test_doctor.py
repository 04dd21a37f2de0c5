"""`toolkit doctor` without Slurm and in an allocation, a step's lines (played), and `toolkit placement`."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue

import pytest

from tests.command import Command
from tests.process_limits import ChangeLimits
from toolkit.cli.main import main
from toolkit.plugins.site import doctor
from toolkit.plugins.site.checks import CheckAnswer, CheckRequest, Finding, ok
from toolkit.plugins.site.checks.verdict import NodeCheck, NodesReport, judge
from toolkit.plugins.site.doctor import CheckStep, StepLine, ask_nodes, step_line


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
        (["a.yaml", "b.yaml"], "takes one CONFIG at most"),
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
        NodeCheck("node1", [Finding("cpus", "ok", "8")]),
        NodeCheck("node2", [Finding("cpus", "bad", "4 of 8", "only 4 of the 8 CPUs")]),
        NodeCheck("node3"),
    ]
    report = judge(nodes, 1.0)
    assert doctor.rows(report) == [
        ("NODE", "VERDICT", "CPUS"),
        ("node1", "ok", "8"),
        ("node2", "bad", "4 of 8"),
        ("node3", "warning", "-"),
    ]


HOSTS = ["node1", "node2", "node3", "node4"]
REQUEST = CheckRequest("/runs/.preflight", "word", [1, 2, 3, 4])


def line(host: str, *findings: Finding, at: float | None = None) -> str:
    at = time.time() if at is None else at
    return json.dumps(asdict(CheckAnswer(host, at - 0.2, at, (ok("cpus", "4"), *findings), "node[1-4]")))


class OfSrun(str):
    """A line that srun prints, and not one of its tasks."""


Lines = dict[str, list[str]]


class Step(CheckStep):
    """A step whose tasks say these lines; by default each reports one well node."""

    def __init__(self, hosts: Sequence[str], instead: Mapping[str, Sequence[str]], *, ends: bool) -> None:
        self.lines: SimpleQueue[StepLine | None] = SimpleQueue()
        self.began = time.time() - 0.5
        for task, host in enumerate(hosts):
            for text in instead.get(host, [line(host)]):
                self.lines.put(step_line(text if isinstance(text, OfSrun) else f"{task}: {text}", time.time()))
        if ends:
            self.lines.put(None)

    def end(self) -> None: ...


def asked(instead: Mapping[str, Sequence[str]], *, ends: bool = True) -> NodesReport:
    nodes, errors, took_s = ask_nodes(REQUEST, HOSTS, lambda _, hosts: Step(hosts, instead, ends=ends))
    return judge(nodes, took_s, errors)


def test_nothing_is_said_of_healthy_nodes() -> None:
    report = asked({}, ends=False)
    assert (report.bad, report.warnings, report.common, list(report.hosts)) == ({}, {}, (), HOSTS)


def test_an_answer_that_srun_has_cut_is_put_together() -> None:
    """srun prints a labelled line of more than 1,024 bytes as several. Spaces at the cut are part of the text."""
    text = line("node3", Finding("temp space", "bad", "0 B", "/tmp is full " * 200))
    pieces = ["a word of the profile", *(text[start : start + 1018] for start in range(0, len(text), 1018))]
    assert asked({"node3": pieces}).bad == {"node3": "/tmp is full " * 200}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (["Hello!", "ImportError: no json"], "could not be checked (ImportError: no json)"),
        (['{"check": "cpus"}', "[]", "42"], "could not be checked (42)"),
        (
            [
                OfSrun("2: slurmstepd: error: execve(): /env/bin/python: No such file or directory"),
                OfSrun("srun: error: node3: task 2: Exited with exit code 2"),
            ],
            "No such file or directory",
        ),
    ],
)
def test_a_node_that_fails_is_bad_with_its_last_words(said: Sequence[str], words: str) -> None:
    report = asked({"node3": said})
    assert list(report.bad) == ["node3"]
    assert words in report.bad["node3"]


def test_a_task_that_srun_saw_end_is_not_waited_for() -> None:
    report = asked({"node3": [OfSrun("srun: error: node3: task 2: Exited with exit code 2")]}, ends=False)
    assert list(report.bad) == ["node3"]
    assert report.took_s < 5


def test_a_node_that_says_nothing_is_unknown(change_limits: ChangeLimits) -> None:
    change_limits(check_nodes_s=0.3, spares_checked_s=0.3)
    report = asked({"node3": []}, ends=False)
    assert (report.bad, list(report.warnings)) == ({}, ["node3"])


def test_names_are_learnt_where_slurm_chooses_the_nodes() -> None:
    """Also the name of a node that says nothing itself."""
    gone: Lines = {"node 3": [OfSrun("srun: error: node3: task 2: Exited with exit code 2")]}
    lines: Lines = {f"node {number}": [line(f"node{number}")] for number in (1, 2, 4)}
    hosts = [f"node {number}" for number in range(1, 5)]
    nodes, errors, took_s = ask_nodes(
        REQUEST, hosts, lambda _, hosts: Step(hosts, lines | gone, ends=True), is_queued=True
    )
    report = judge(nodes, took_s, errors)
    assert list(report.hosts) == HOSTS
    assert list(report.bad) == ["node3"]


def test_a_wrong_clock_is_found_also_after_an_hour_in_the_queue() -> None:
    now = time.time()

    def start(_: CheckRequest, hosts: Sequence[str]) -> Step:
        step = Step(hosts, {"node3": [line("node3", at=now + 90)]}, ends=True)
        step.began -= 3600
        return step

    nodes, errors, took_s = ask_nodes(REQUEST, HOSTS, start, is_queued=True)
    assert list(judge(nodes, took_s, errors).bad) == ["node3"]
    assert took_s < 60


def test_a_node_that_srun_does_not_reach_takes_no_other_with_it() -> None:
    """srun then ends the whole step. The other nodes are asked again, without that one."""
    failure = "srun: error: Task launch for StepId=7.0 failed on node node2: Communication connection failure"
    killed = "srun: error: node3: task 2: Killed"
    starts: list[tuple[Sequence[str], list[int]]] = []

    def start(request: CheckRequest, hosts: Sequence[str]) -> Step:
        starts.append((hosts, [request.cpus_of(task) for task in range(len(hosts))]))
        ends = {host: [OfSrun(failure), OfSrun(killed)] for host in hosts if "node2" in hosts}
        return Step(hosts, ends, ends=True)

    nodes, errors, took_s = ask_nodes(REQUEST, HOSTS, start)
    report = judge(nodes, took_s, errors)
    assert starts == [(HOSTS, [1, 2, 3, 4]), (["node1", "node3", "node4"], [1, 3, 4])]
    assert list(report.bad) == ["node2"]
    assert "Communication connection failure" in report.bad["node2"]


@pytest.mark.parametrize(
    "text",
    [
        "srun: error: Aborting, io error and missing step on node 0",
        "srun: error: Aborting, io error and missing step on node 7",
        "srun: error: task 7 launch failed: Slurmd could not connect IO",
        "srun: error: node3: tasks 2,7: Killed",
        "srun: error: Unable to create step for job 7: Invalid partition",
    ],
)
def test_a_step_that_fails_as_a_whole_says_why_and_blames_nobody(text: str) -> None:
    """The first text was seen when a job was cancelled while its checks began."""
    report = asked({host: [OfSrun(text)] for host in HOSTS})
    assert report.bad == {}
    assert text in report.common[0]


def test_thousands_of_nodes_with_texts_of_their_own_are_told_apart() -> None:
    hosts = [f"node{number}" for number in range(5000)]
    said: Lines = {
        host: [f"its own trouble {host}", OfSrun(f"srun: error: {host}: task {task}: Exited with exit code 1")]
        for task, host in enumerate(hosts)
    }
    nodes, errors, took_s = ask_nodes(REQUEST, hosts, lambda _, on: Step(on, said | {"node0": []}, ends=True))
    report = judge(nodes, took_s, errors)
    assert len(report.summary()) == 5001
    assert "its own trouble node4999" in report.bad["node4999"]
    assert "its state is unknown" in report.warnings["node0"]


def test_doctor_refuses_a_number_of_nodes_that_no_job_can_have(command: Command) -> None:
    assert "cluster.nodes: 0 is out of range" in command.refuses("doctor", "cluster.nodes=0")


def test_a_rank_that_nothing_tells_where_its_supervisor_is_says_so(
    monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setenv("TOOLKIT_SUPERVISED", "1")
    for name in ("MASTER_ADDR", "SLURM_LAUNCH_NODE_IPADDR"):
        monkeypatch.delenv(name, raising=False)
    assert "unset TOOLKIT_SUPERVISED" in command.refuses("placement")
