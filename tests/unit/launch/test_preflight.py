"""What is made of what nodes say, and do not say. They are played, but for one test of this very machine."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from toolkit.cluster.checks import TOKEN_VARIABLE, Request, pairs
from toolkit.cluster.checks.verdict import Heard, Outcome, judge
from toolkit.launch import preflight, talk
from toolkit.launch.preflight import Complaint, Ended, Report, Said, check_nodes

HOSTS = ["node1", "node2", "node3", "node4"]


@dataclass(frozen=True)
class Play:
    """What one node says; the default is that it is well."""

    findings: Sequence[dict[str, Any]] = ()
    lead_s: float = 0.0  #: of its clock
    says_instead: Sequence[str | Complaint | Ended] | None = None  #: of all that a node says
    writes: bool = True


class Nodes:
    """A talk with nodes that are played."""

    def __init__(self, request: Request, hosts: Sequence[str], plays: Mapping[str, Play]) -> None:
        self.events: preflight.Events = SimpleQueue()
        self.began = time.time()
        self._request = request
        self._plays = {host: plays.get(host, Play()) for host in hosts}
        for task, (host, play) in enumerate(self._plays.items()):
            for line in self._opening(task, host) if play.says_instead is None else play.says_instead:
                self.say(task, line)
        if not request.pairs:
            self._finish([])

    def _opening(self, task: int, host: str) -> Iterator[dict[str, Any]]:
        play, folder = self._plays[host], Path(self._request.folder)
        if play.writes:
            (folder / host).write_text((folder / "token").read_text())
        yield {"hello": host, "time": time.time() + play.lead_s, "nodes": ""}
        yield from [found("shared folder"), *play.findings, {"listening": [f"10.0.0.{task}", 4000 + task]}]

    def say(self, task: int, line: dict[str, Any] | str | Complaint | Ended) -> None:
        if isinstance(line, (Complaint, Ended)):
            self.events.put(line)
        else:
            self.events.put(Said(task, line if isinstance(line, str) else json.dumps(line), time.time()))

    def send(self, line: str) -> None:
        self._finish([name for name, _, _ in json.loads(line)["peers"]])

    def _finish(self, met: Sequence[str]) -> None:
        for task, (host, play) in enumerate(self._plays.items()):
            if play.says_instead is None:
                for peer in (met[j] for i, j in pairs.partners(len(met)) if met[i] == host):
                    self.say(task, {"peer": peer, "took_s": 0.01, "error": None})
                self.say(task, {"time": time.time() + play.lead_s})
                self.say(task, {"done": host})

    def end(self) -> None:
        pass


def found(check: str, severity: str = "ok", text: str = "", value: float | None = None) -> dict[str, Any]:
    return {"check": check, "severity": severity, "figure": "?", "text": text, "value": value}


def examined(tmp_path: Path, plays: Mapping[str, Play], hosts: Sequence[str] = HOSTS, limit_s: float = 30.0) -> Report:
    def start(request: Request, on: Sequence[str]) -> Nodes:
        return Nodes(request, on, plays)

    environ = {"SLURM_JOB_ID": "7"}
    return check_nodes(tmp_path, hosts, [2] * len(hosts), 1, environ=environ, start=start, limit_s=limit_s)


def sick(*findings: dict[str, Any]) -> Play:
    return Play(findings)


SILENT = Play(says_instead=[])
GARBAGE = Play(says_instead=["Hello!", "42", '{"check": "cpus"}', "[]", '{"listening": 3}', "ImportError: no json"])
HALF = Play(says_instead=['{"hello": "node3", "nodes": ""}', json.dumps(found("cpus"))])


def test_nothing_is_said_of_healthy_nodes(tmp_path: Path) -> None:
    report = examined(tmp_path, {})
    assert report.is_fine
    assert (report.bad, report.warnings, report.common) == ({}, {}, ())
    assert report.hosts == tuple(HOSTS)
    assert report.summary() == [f"checks of 4 nodes: 0 bad, 0 with warnings ({report.took_s:.1f} s)"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("play", "words"),
    [
        (SILENT, "does not answer within 25 s"),
        (GARBAGE, "does not answer (ImportError: no json)"),
        (HALF, "has not got through its checks within 25 s"),
        (sick(found("cpus", "bad", "only 4 of the 8 CPUs")), "only 4 of the 8 CPUs"),
        (Play(lead_s=90.0), "its clock is 90.0 s ahead of the others'"),
        (Play(lead_s=-7.0), "its clock is 7.0 s behind the others'"),
        (Play(writes=False), "is not seen on"),
    ],
)
def test_one_sick_node_is_bad_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, play: Play, words: str
) -> None:
    monkeypatch.setattr(preflight.storage, "SEEN_WITHIN_S", 0.1)
    monkeypatch.setattr(preflight, "GATHER_S", 0.2)
    report = examined(tmp_path, {"node3": play}, limit_s=preflight.FOLDER_LIMIT_S + 1.0)
    assert list(report.bad) == ["node3"]
    assert words in report.bad["node3"]
    assert (report.warnings, report.common) == ({}, ())
    assert f"node3: bad: {report.bad['node3']}" in report.summary()


def test_a_clock_that_is_a_little_off_is_a_warning(tmp_path: Path) -> None:
    report = examined(tmp_path, {"node2": Play(lead_s=2.0)})
    assert (report.bad, list(report.warnings)) == ({}, ["node2"])


def test_where_most_clocks_differ_from_ours_ours_is_wrong(tmp_path: Path) -> None:
    """The batch host is node1: its own clock agrees with ours, of course."""
    report = examined(tmp_path, dict.fromkeys(HOSTS[1:], Play(lead_s=60.0)))
    assert list(report.bad) == ["node1"]


def test_what_is_wrong_with_every_node_is_no_nodes_fault(tmp_path: Path) -> None:
    report = examined(tmp_path, dict.fromkeys(HOSTS, sick(found("cpus", "bad", "only 2 of the 4 CPUs"))))
    assert (report.bad, report.common) == ({}, ("only 2 of the 4 CPUs",))
    assert not report.is_fine
    assert "every node: bad: only 2 of the 4 CPUs" in report.summary()


def test_of_a_single_node_its_own_faults_are_bad_but_a_full_run_folder_is_not(tmp_path: Path) -> None:
    words = [found("temp space", "bad", "/tmp is full"), found("run folder space", "bad", "runs is full")]
    report = examined(tmp_path, {"node1": sick(*words)}, HOSTS[:1])
    assert (report.bad, report.common) == ({"node1": "/tmp is full"}, ("runs is full",))


def test_equal_lines_are_one_line_with_all_its_nodes(tmp_path: Path) -> None:
    slow = sick(found("look-up", "warning", "takes 10 s"))
    report = examined(tmp_path, {"node1": slow, "node2": slow, "node4": slow})
    assert report.summary()[1:] == ["node[1-2,4]: warning: takes 10 s"]


@pytest.mark.parametrize(("ports", "severity"), [(2.0, "warnings"), (0.0, "bad")])
def test_a_node_with_fewer_infiniband_ports_than_most_stands_out(tmp_path: Path, ports: float, severity: str) -> None:
    well = sick(found("infiniband", value=4.0))
    report = examined(tmp_path, {**dict.fromkeys(HOSTS, well), "node2": sick(found("infiniband", value=ports))})
    assert list(getattr(report, severity)) == ["node2"]


def test_a_failed_pair_tells_on_the_node_that_fails_with_others_too(tmp_path: Path) -> None:
    class CutOff(Nodes):
        def say(self, task: int, line: Any) -> None:
            if isinstance(line, dict) and "peer" in line and "node3" in (line["peer"], HOSTS[task]):
                line = line | {"error": "timed out"}
            super().say(task, line)

    def start(request: Request, hosts: Sequence[str]) -> Nodes:
        return CutOff(request, hosts, {})

    report = check_nodes(tmp_path, HOSTS, [1] * 4, 1, environ={"SLURM_JOB_ID": "7"}, start=start)
    assert list(report.bad) == ["node3"]
    for peer in ("node1", "node2", "node4"):
        assert f"{peer} (timed out)" in report.bad["node3"]


def test_a_node_that_srun_does_not_reach_takes_no_other_with_it(tmp_path: Path) -> None:
    """srun then ends the whole step: the others are asked again, without it."""
    asked: list[Sequence[str]] = []
    failure = "srun: error: Task launch for StepId=7.0 failed on node node2: Communication connection failure"

    def start(request: Request, hosts: Sequence[str]) -> Nodes:
        asked.append(hosts)
        plays = dict.fromkeys(hosts, HALF) | {"node2": Play(says_instead=[Complaint(failure), Ended()])}
        return Nodes(request, hosts, plays if "node2" in hosts else {})

    report = check_nodes(tmp_path, HOSTS, [1, 2, 3, 4], 1, environ={"SLURM_JOB_ID": "7"}, start=start)
    assert asked == [HOSTS, ["node1", "node3", "node4"]]
    assert list(report.bad) == ["node2"]
    assert "Communication connection failure" in report.bad["node2"]


def test_a_task_that_srun_saw_end_is_not_waited_for(tmp_path: Path) -> None:
    last = [
        Complaint("2: slurmstepd: error: execve(): /env/bin/python: No such file or directory"),
        Complaint("srun: error: node3: task 2: Exited with exit code 2"),
    ]
    report = examined(tmp_path, {"node3": Play(says_instead=last)})
    assert list(report.bad) == ["node3"]
    assert "No such file or directory" in report.bad["node3"]
    assert report.took_s < 2


@pytest.mark.parametrize(
    "line",
    [
        "srun: error: Aborting, io error and missing step on node 0",
        "srun: error: Aborting, io error and missing step on node 7",
        "srun: error: task 7 launch failed: Slurmd could not connect IO",
        "srun: error: node3: tasks 2,7: Killed",
    ],
)
def test_no_line_of_srun_ends_the_checks_with_an_error_of_ours(tmp_path: Path, line: str) -> None:
    """The first was seen when a job was cancelled while its checks began."""
    report = examined(tmp_path, dict.fromkeys(HOSTS, Play(says_instead=[Complaint(line), Ended()])))
    assert line in str(report.summary())


def test_a_step_that_cannot_start_says_why_and_blames_nobody(tmp_path: Path) -> None:
    words = "srun: error: Unable to create step for job 7: Invalid partition"
    report = examined(tmp_path, dict.fromkeys(HOSTS, Play(says_instead=[Complaint(words), Ended()])))
    assert report.bad == {}
    assert report.common == (f"the checks could not be made: {words}",)


def test_a_folder_that_we_cannot_write_to_ourselves_is_the_runs_trouble(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    report = examined(tmp_path / "file", {})
    assert report.bad == {}
    assert "Not a directory" in report.common[0]


def test_a_folder_that_hangs_hangs_no_more_than_its_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(preflight, "FOLDER_LIMIT_S", 0.1)
    monkeypatch.setattr(preflight.fsio, "make_dir", lambda _: released.wait(20))
    report = examined(tmp_path, {})
    released.set()
    assert "no answer within 0.1 s" in report.common[0]


def test_a_spare_node_needs_what_any_rank_may_need(tmp_path: Path) -> None:
    asked: list[Request] = []

    def start(request: Request, hosts: Sequence[str]) -> Nodes:
        asked.append(request)
        return Nodes(request, hosts, {})

    check_nodes(tmp_path, HOSTS, [2, 1, 2, 0], 3, environ={"SLURM_JOB_ID": "7"}, start=start)
    assert [asked[0].cpus_of(task) for task in range(4)] == [6, 3, 6, 6]


@pytest.mark.parametrize("kind", ["step", "job", "this machine"])
def test_the_token_of_a_check_is_in_no_command_line(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which any user of a node may read."""
    started: list[tuple[Sequence[str], Mapping[str, str]]] = []

    class Talk:
        def __init__(self, argv: Sequence[str], environ: Mapping[str, str], descriptors: object = ()) -> None:
            started.append((argv, environ))

        def wait_for_a_word(self) -> None: ...

    for module in (preflight, talk):
        monkeypatch.setattr(module, "SubprocessTalk", Talk)
    environ = {"PATH": os.environ["PATH"]}
    starts = {
        "step": preflight.srun_step(environ),
        "job": preflight.srun_job([], environ),
        "this machine": preflight.this_machine(environ),
    }
    starts[kind](Request("/runs/x", "hunter2", [1]), ["n1", "n2"])
    ((argv, given),) = started
    assert "hunter2" not in " ".join(argv)
    assert given[TOKEN_VARIABLE] == "hunter2"


def test_this_machine_is_checked_for_real(tmp_path: Path) -> None:
    """A machine that runs tests may be busy; all else must be well."""
    report = check_nodes(tmp_path, ["here"], [1], 1, environ=dict(os.environ) | {"PYTHONPATH": "/nowhere"})
    (findings,) = report.findings.values()
    assert {f.check for f in findings if f.severity == "bad"} <= {"cpus taken"}
    assert {"cpus", "shared folder", "temp space", "clock", "network"} <= {f.check for f in findings}


# ------------------------------------------------------------------------------------------------- late, and many nodes


class LateNodes(Nodes):
    """Nodes of which some say nothing before the others have been introduced to each other."""

    def __init__(self, request: Request, hosts: Sequence[str], late: Sequence[str]) -> None:
        self._late = late
        self._held: list[tuple[int, Any]] = []
        super().__init__(request, hosts, {})

    def say(self, task: int, line: Any) -> None:
        if HOSTS[task] in self._late:
            self._held.append((task, line))
        else:
            super().say(task, line)

    def send(self, line: str) -> None:
        super().send(line)
        for task, held in self._held:
            super().say(task, held)


def test_a_healthy_node_that_reports_late_is_not_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It came too late to be introduced to a peer, so no pair tells anything of it."""
    monkeypatch.setattr(preflight, "GATHER_S", 0.1)

    def start(request: Request, hosts: Sequence[str]) -> Nodes:
        return LateNodes(request, hosts, ["node3"])

    report = check_nodes(tmp_path, HOSTS, [1] * 4, 1, environ={"SLURM_JOB_ID": "7"}, start=start)
    assert (report.bad, report.warnings, report.common) == ({}, {}, ())


def test_where_many_nodes_are_silent_none_is_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is slow then is the launch or the network, or we are."""
    monkeypatch.setattr(preflight, "GATHER_S", 0.1)
    monkeypatch.setattr(preflight, "FOLDER_LIMIT_S", 0.2)
    report = examined(tmp_path, {"node2": SILENT, "node3": SILENT, "node4": SILENT}, limit_s=0.8)
    assert (report.bad, report.common) == ({}, ())
    assert list(report.warnings) == ["node2", "node3", "node4"]
    assert "as 3 of 4 nodes: nothing is known of it" in report.warnings["node2"]


def test_ten_thousand_nodes_of_which_many_are_late_are_all_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, 3,000 took minutes and 1,580 healthy ones were bad. Nobody is told of 10,000 peers."""
    nodes = 10_000
    hosts = [f"node{number}" for number in range(nodes)]
    tokens: dict[str, str] = {}
    monkeypatch.setattr(preflight.storage, "read_soon", lambda path, *_: tokens["all"])
    expanded: list[str] = []
    expand = preflight.hostlist.expand
    monkeypatch.setattr(preflight.hostlist, "expand", lambda text: expanded.append(text) or expand(text))
    asked: list[Request] = []

    class Many:
        def __init__(self, request: Request, on: Sequence[str]) -> None:
            self.events, self.began, self.sent = SimpleQueue[Any](), time.time(), list[str]()
            asked.append(request)
            tokens["all"] = request.token
            late = [task for task in range(nodes) if task % 3 == 0]  # a third reports after all others are done
            for task in [*(task for task in range(nodes) if task % 3), *late]:
                hello = {"hello": on[task], "time": time.time(), "nodes": f"node[0-{nodes - 1}]"}
                for line in (hello, found("shared folder"), found("cpus"), {"done": on[task]}):
                    self.events.put(Said(task, json.dumps(line), time.time()))

        def send(self, line: str) -> None:
            raise AssertionError("nobody is introduced to so many")

        def end(self) -> None:
            pass

    report = check_nodes(tmp_path, hosts, [8] * nodes, 12, environ={"SLURM_JOB_ID": "7"}, start=Many)
    assert (report.bad, report.warnings, report.common) == ({}, {}, ())
    assert len(report.findings) == nodes
    assert len(expanded) == 1
    assert len(json.dumps(asdict(asked[0]))) < 1000


def test_what_is_wrong_with_every_node_is_counted_so_in_the_head(tmp_path: Path) -> None:
    """Before, the log said "0 bad" and in its next line "every node: bad"."""
    report = examined(tmp_path, dict.fromkeys(HOSTS, sick(found("cpus", "bad", "only 2 of the 4 CPUs"))))
    head, *rest = report.summary()
    assert head.startswith("checks of 4 nodes: all bad, 0 with warnings")
    assert rest == ["every node: bad: only 2 of the 4 CPUs"]
    prevented = examined(tmp_path, dict.fromkeys(HOSTS, Play(says_instead=[Complaint("srun: error: no"), Ended()])))
    assert prevented.summary()[1:] == ["the checks could not be made: srun: error: no"]


def test_a_node_that_answers_at_once_is_not_behind_those_that_answer_late() -> None:
    """Of a late answer nobody knows when its clock was read. Before, the early one was 10 s "behind the others"."""
    nodes = [Heard(f"node{number}", is_here=True, is_done=True) for number in range(5)]
    for number, node in enumerate(nodes):
        node.set_clock(100.0 + 5 * number, asked=100.0, received=100.1 + 5 * number)
    report = judge(Outcome(nodes, {}), None, 1.0)
    assert (report.bad, report.warnings) == ({}, {})


def test_thousands_of_nodes_with_texts_of_their_own_are_told_in_one_pass() -> None:
    hosts = [f"node{number}" for number in range(5000)]
    nodes = [Heard(host, is_here=True, noise=f"its own trouble {host}", is_done=host == "node0") for host in hosts]
    errors = [f"srun: error: {host}: task {task}: Exited with exit code 1" for task, host in enumerate(hosts)]
    reads = 0

    class Errors(list[str]):
        def __iter__(self) -> Iterator[str]:
            nonlocal reads
            reads += 1
            return super().__iter__()

    report = judge(Outcome(nodes, {}, Errors(errors)), None, 1.0)
    assert len(report.summary()) == 5000
    assert "node4999: task 4999" in report.bad["node4999"]
    assert reads <= 2
