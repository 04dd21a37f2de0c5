"""The report on nodes that answer, and on nodes that do not, and slow GPUs. The agents are played."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from threading import Timer
from typing import Any, cast

import pytest
import torch

from tests.process_limits import ChangeLimits
from toolkit.base import fsio
from toolkit.nodes.agent.messages import CheckAnswered, CheckOrder
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agents import NodeAnswered, NodeSilent
from toolkit.plugins.site import gpu_measure
from toolkit.plugins.site.checks import CheckAnswer, CheckRequest, Finding, host, ok, preflight
from toolkit.plugins.site.checks.preflight import report_on_nodes
from toolkit.plugins.site.checks.verdict import NodeCheck, NodesReport, judge

HOSTS = ["node1", "node2", "node3", "node4"]


@dataclass(frozen=True)
class Play:
    """The behaviour of one node; by default it is well."""

    findings: Sequence[Finding] = ()
    lead_s: float = 0.0  #: of its clock
    after_s: float = 0.0  #: it answers
    says_instead: str | None = None
    silent: NodeSilent | None = None
    never: bool = False
    writes: bool = True


class Agents:
    """Agents that are played. They put their answers into ``events``, as those of a job do."""

    def __init__(self, plays: Mapping[str, Play], events: SimpleQueue[Any]) -> None:
        self.requests: dict[str, CheckRequest] = {}
        self._plays, self._events = plays, events

    def request(self, orders: Mapping[str, CheckOrder], heard: SimpleQueue[Any]) -> int:
        assert heard is self._events
        for name, order in orders.items():
            self.requests[name] = CheckRequest(**json.loads(order.command[-1]))
            play = self._plays.get(name, Play())
            if play.after_s:
                threading.Timer(play.after_s, self._answer, [name, play]).start()
            else:
                self._answer(name, play)
        return 0

    def withdraw(self, number: int) -> None: ...

    def _answer(self, host: str, play: Play) -> None:
        folder = Path(self.requests[host].folder)
        if play.never:
            return
        if play.silent is not None:
            self._events.put(play.silent)
            return
        if play.writes:
            os.mknod(folder / host)
        now = time.time()
        answer = CheckAnswer(host, now, now, (ok("shared folder", "same"), *play.findings))
        text = json.dumps(asdict(answer)) + "\n" if play.says_instead is None else play.says_instead
        message = CheckAnswered(0, text, now + play.lead_s, now + play.lead_s + 0.001)
        self._events.put(NodeAnswered(host, message, now, now + 0.001))


def examined(
    tmp_path: Path,
    plays: Mapping[str, Play],
    hosts: Sequence[str] = HOSTS,
    spares: Sequence[str] = (),
    events: SimpleQueue[Any] | None = None,
) -> NodesReport:
    events = SimpleQueue() if events is None else events
    agents: Any = Agents(plays, events)
    job = Allocation(tuple(hosts), (2,) * len(hosts), 1)
    return report_on_nodes(tmp_path, job, agents, events, spares=spares)


def sick(*findings: Finding) -> Play:
    return Play(findings)


def bad(check: str, text: str) -> Finding:
    return Finding(check, "bad", "?", text)


def removed(folder: Path) -> bool:
    """True if the checks' folder is gone. It is removed while the ranks start."""
    deadline = time.monotonic() + 20
    while list(folder.iterdir()) and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    return not list(folder.iterdir())


def test_nothing_is_said_of_healthy_nodes(tmp_path: Path) -> None:
    report = examined(tmp_path, {})
    assert report.is_fine
    assert (report.bad, report.warnings, report.common) == ({}, {}, ())
    assert report.hosts == tuple(HOSTS)
    assert report.summary() == [f"checks of 4 nodes: 0 bad, 0 with warnings ({report.took_s:.1f} s)"]
    assert removed(tmp_path)


@pytest.mark.parametrize(
    ("play", "words"),
    [
        (Play(says_instead="ImportError: no json\n"), "could not be checked (ImportError: no json)"),
        (Play(says_instead=""), "could not be checked (its checks printed nothing"),
        (Play(says_instead="42"), "could not be checked (42)"),
        (
            Play(says_instead='{"node": "node3", "began": 1, "ended": 1, "findings": [{"check": "cpus"}]}'),
            "not be checked",
        ),
        (Play(silent=NodeSilent("node3", "its agent: exit code 2", is_certain=True)), "its agent: exit code 2"),
        (sick(bad("cpus", "only 4 of the 8 CPUs")), "only 4 of the 8 CPUs"),
        (Play(lead_s=90.0), "its clock is 90.0 s ahead of the others'"),
        (Play(lead_s=-7.0), "its clock is 7.0 s behind the others'"),
        (Play(writes=False), "is not seen on"),
    ],
)
def test_one_sick_node_is_bad_and_no_other(tmp_path: Path, change_limits: ChangeLimits, play: Play, words: str) -> None:
    change_limits(file_seen_within_s=0.1)
    report = examined(tmp_path, {"node3": play})
    assert list(report.bad) == ["node3"]
    assert words in report.bad["node3"]
    assert (report.warnings, report.common) == ({}, ())
    assert f"node3: bad: {report.bad['node3']}" in report.summary()


FOUR_PORTS = dict.fromkeys(HOSTS, sick(ok("infiniband", "4", 4.0)))
#: What nodes do, and which of them are bad and warned of.
PLAYS: dict[str, tuple[dict[str, Play], list[str], list[str]]] = {
    "a clock that is a little off": ({"node2": Play(lead_s=2.0)}, [], ["node2"]),
    # The batch host is node1: its own clock always agrees with the supervisor's.
    "most clocks differ from ours": (dict.fromkeys(HOSTS[1:], Play(lead_s=60.0)), ["node1"], []),
    "fewer InfiniBand ports": ({**FOUR_PORTS, "node2": sick(ok("infiniband", "?", 2.0))}, [], ["node2"]),
    "no InfiniBand port": ({**FOUR_PORTS, "node2": sick(ok("infiniband", "?", 0.0))}, ["node2"], []),
    # The network may have been away, or a user has ended the job.
    "a lost agent": ({"node2": Play(silent=NodeSilent("node2", "it has ended", is_certain=False))}, [], ["node2"]),
    "a late answer": ({"node3": Play(after_s=0.5)}, [], []),
}


@pytest.mark.parametrize(("plays", "bad", "warned"), PLAYS.values(), ids=PLAYS.keys())
def test_what_one_node_differs_in_is_bad_or_a_warning(
    tmp_path: Path, plays: dict[str, Play], bad: list[str], warned: list[str]
) -> None:
    report = examined(tmp_path, plays)
    assert (list(report.bad), list(report.warnings), report.common) == (bad, warned, ())


def test_what_is_wrong_with_every_node_is_no_nodes_fault_and_counted_so_in_the_head(tmp_path: Path) -> None:
    """Before, the log said "0 bad" and in its next line "every node: bad"."""
    report = examined(tmp_path, dict.fromkeys(HOSTS, sick(bad("cpus", "only 2 of the 4 CPUs"))))
    assert (report.bad, report.common) == ({}, ("only 2 of the 4 CPUs",))
    assert not report.is_fine
    head, *rest = report.summary()
    assert head.startswith("checks of 4 nodes: all bad, 0 with warnings")
    assert rest == ["every node: bad: only 2 of the 4 CPUs"]


def test_of_a_single_node_only_its_own_faults_are_bad(tmp_path: Path) -> None:
    words = [bad("temp space", "/tmp is full"), bad("run folder space", "runs is full"), bad("cpus", "2 of 4")]
    report = examined(tmp_path, {"node1": sick(*words)}, HOSTS[:1])
    assert report.bad == {"node1": "/tmp is full"}
    assert {*report.common} == {"runs is full", "2 of 4"}


def test_equal_lines_are_one_line_with_all_its_nodes(tmp_path: Path) -> None:
    slow = sick(Finding("look-up", "warning", "10 s", "takes 10 s"))
    report = examined(tmp_path, {"node1": slow, "node2": slow, "node4": slow})
    assert report.summary()[1:] == ["node[1-2,4]: warning: takes 10 s"]


def test_agents_that_cannot_be_started_at_all_say_why_and_blame_nobody(tmp_path: Path) -> None:
    words = "Unable to create step for job 7: Invalid partition"
    plays = {host: Play(silent=NodeSilent(host, words, is_certain=False)) for host in HOSTS}
    report = examined(tmp_path, plays)
    assert report.bad == {}
    assert "the checks could not be run" in report.common[0]
    assert words in report.common[0]


def test_a_folder_that_we_cannot_write_to_ourselves_is_the_runs_trouble(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    report = examined(tmp_path / "file", {})
    assert report.bad == {}
    assert "Not a directory" in report.common[0]


def test_a_folder_that_hangs_hangs_no_more_than_its_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    released = threading.Event()
    change_limits(check_folder_s=0.1)
    monkeypatch.setattr(fsio, "make_dir", lambda _, parents: released.wait(20))
    report = examined(tmp_path, {})
    released.set()
    assert "no answer within 0.1 s" in report.common[0]


def test_a_spare_node_needs_what_any_rank_may_need(tmp_path: Path) -> None:
    events: SimpleQueue[Any] = SimpleQueue()
    agents: Any = Agents({}, events)
    job = Allocation(tuple(HOSTS), (2, 1, 2, 1), 3, task_cpus=(3, 4, 3, 4))
    report_on_nodes(tmp_path, job, agents, events, spares=["node4"])
    assert [agents.requests[host].cpus_of(0) for host in HOSTS] == [6, 4, 6, 4]


@pytest.mark.parametrize("silent", [HOSTS[1:2], HOSTS[1:]])
def test_a_node_of_which_nothing_is_heard_in_time_is_unknown_and_not_bad(
    tmp_path: Path, change_limits: ChangeLimits, silent: Sequence[str]
) -> None:
    change_limits(check_nodes_s=0.3, spares_checked_s=0.3)
    report = examined(tmp_path, dict.fromkeys(silent, Play(never=True)))
    assert (report.bad, report.common) == ({}, ())
    assert report.is_fine
    assert list(report.warnings) == list(report.unknown) == list(silent)
    assert "its state is unknown" in report.warnings["node2"]


def test_a_late_spare_does_not_keep_the_others_waiting(tmp_path: Path, change_limits: ChangeLimits) -> None:
    change_limits(spares_checked_s=0.1)
    report = examined(tmp_path, {"node4": Play(never=True)}, spares=["node4"])
    assert report.took_s < 5
    assert (report.bad, list(report.warnings)) == ({}, ["node4"])


def test_a_signal_ends_the_wait_and_is_not_lost(tmp_path: Path) -> None:
    events: SimpleQueue[Any] = SimpleQueue()
    threading.Timer(0.2, events.put, ["a signal"]).start()
    report = examined(tmp_path, {"node2": Play(never=True)}, events=events)
    assert report.took_s < 5
    assert events.get_nowait() == "a signal"
    assert report.bad == {}


def test_three_thousand_nodes_of_which_many_are_late_or_silent_are_never_blamed(
    monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    """A third answers after all others, and a hundred do not answer at all. Before, 1,580 healthy ones were bad."""
    change_limits(check_nodes_s=0.1, spares_checked_s=0.1)
    nodes = 3_000
    hosts = [f"node{number}" for number in range(nodes)]
    reads: list[Path] = []
    wait_for_text: Callable[..., str | None] = host.wait_for_text
    monkeypatch.setattr(host, "wait_for_text", lambda path, *rest: reads.append(path) or wait_for_text(path, *rest))

    class Many(Agents):
        def request(self, orders: Mapping[str, CheckOrder], heard: SimpleQueue[Any]) -> int:
            # an order that names all nodes would be sent 3,000 times
            assert max(len(" ".join(order.command)) for order in orders.values()) < 1000
            super().request({host: orders[host] for host in hosts[100:] if int(host[4:]) % 3}, heard)
            return super().request({host: orders[host] for host in hosts[100:] if int(host[4:]) % 3 == 0}, heard)

    events: SimpleQueue[Any] = SimpleQueue()
    agents: Any = Many({}, events)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        job = Allocation(tuple(hosts), (8,) * nodes, 12)
        report = report_on_nodes(Path(folder), job, agents, events)
        assert removed(Path(folder))
    assert (report.bad, report.common) == ({}, ())
    assert list(report.warnings) == hosts[:100]
    assert len(report.findings) == nodes
    assert reads == [], "a look at each node's file takes seconds on a file server: one listing tells"


def test_nodes_of_another_component_may_have_another_network_and_less_room(tmp_path: Path) -> None:
    few = bad("temp space", "/tmp is full")
    plays = {host: Play((Finding("infiniband", "ok", "4", "", 4.0),)) for host in ("node1", "node2")}
    plays |= {"node3": Play((few,)), "node4": Play((few,))}
    events: SimpleQueue[Any] = SimpleQueue()
    agents: Any = Agents(plays, events)
    job = Allocation(tuple(HOSTS), (2,) * 4, 1, components=(0, 0, 1, 1))
    report = report_on_nodes(tmp_path, job, agents, events)
    assert (report.bad, report.common) == ({}, (few.text,))
    # one of a kind is compared with nothing, and what is bad on it is its own
    agents = Agents(plays, events)
    report = report_on_nodes(tmp_path, replace(job, components=(0, 0, 0, 1)), agents, events)
    assert [*report.bad] == ["node3", "node4"]


def test_several_findings_of_one_node_are_not_taken_for_a_fault_of_every_node() -> None:
    """A starved node does not get through any of its checks, each of which then says the same."""
    slow, ok = Finding("answer", "bad", "none", "does not get through its checks"), Finding("answer", "ok", "in time")
    starved, well = [slow, slow, slow], [ok]
    one = judge([NodeCheck("node1", starved), NodeCheck("node2", well), NodeCheck("node3", well)], 1.0)
    assert (set(one.bad), one.common) == ({"node1"}, ())
    both = judge([NodeCheck("node1", starved), NodeCheck("node2", starved)], 1.0)
    assert (both.bad, both.common) == ({}, (slow.text,))


def test_a_node_that_answers_at_once_is_not_behind_those_that_answer_late() -> None:
    """A late answer does not tell when its clock was read. Before, the early one was 10 s "behind the others"."""
    nodes = [NodeCheck(f"node{number}") for number in range(5)]
    for number, node in enumerate(nodes):
        late_s = 5.0 * number
        answer = CheckAnswer(node.name, 0.0, 0.0, ())
        node.take(answer, asked=100.0, received=100.1 + late_s, began=100.0 + late_s, ended=100.0 + late_s)
    report = judge(nodes, 1.0)
    assert (report.bad, report.warnings) == ({}, {})


def text(gemm: list[float], copy: list[float]) -> str:
    return json.dumps({"gemm": gemm, "copy": copy})


def test_a_gpu_that_is_a_tenth_slower_than_the_jobs_median_is_named() -> None:
    even = text([100.0, 98.0], [50.0, 51.0])
    assert preflight.find_slow_gpus({"n1": even, "n2": even, "n3": even}) == {}
    found = preflight.find_slow_gpus(
        {"n1": even, "n2": text([99.0, 88.0], [50.0, 50.0]), "n3": text([99.0, 99.0], [25.0, 50.0])}
    )
    assert found == {
        "n2": "GPU 1 multiplies matrices at 89 % of the others' speed",
        "n3": "GPU 0 copies from the host at 50 % of the others' speed",
    }


@pytest.mark.parametrize("answer", ["", "No module named torch", "[]", '{"gemm": 3}', '{"gemm": ["x"], "copy": []}'])
def test_a_node_without_figures_is_left_out(answer: str, caplog: pytest.LogCaptureFixture) -> None:
    even = text([100.0, 98.0], [50.0, 51.0])
    assert preflight.find_slow_gpus({"n1": even, "n2": even, "n3": answer}) == {}
    assert "is not known" in caplog.text


class PlayedAgents:
    """Agents of nodes whose GPUs are equal, except for one of n2."""

    silent_hosts = frozenset({"silent"})

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def request(self, orders: dict[str, Any], heard: SimpleQueue[Any]) -> int:
        assert not self.asked, "one request for all nodes: a start waits for each"
        self.asked |= orders
        for name in orders:
            if name == "dead":
                heard.put(NodeSilent(name, "it was lost", is_certain=False))
            elif name != "hangs":
                message = CheckAnswered(3, text([1.0, 1.0 if name == "n1" else 0.5], [1.0, 1.0]), 0.0, 0.0)
                heard.put(NodeAnswered(name, message, 0.0, 0.0))
        return 3

    def withdraw(self, number: int) -> None:
        assert number == 3


def with_gpus(*hosts: str, components: tuple[int, ...] = ()) -> Allocation:
    count = len(hosts)
    return Allocation(hosts, (1,) * count, 1, gpus=(2,) * count, job_id="1", components=components)


def test_all_nodes_are_asked_at_once_by_their_agents() -> None:
    agents, events = PlayedAgents(), SimpleQueue[Any]()
    found = preflight.slow_nodes(cast(Any, agents), with_gpus("n1", "n2", "dead", "silent"), events)
    assert {*agents.asked} == {"n1", "n2", "dead"}
    assert agents.asked["n1"].command[-2] == "toolkit.plugins.site.gpu_measure"
    assert {*found} == {"n2"}


def test_components_are_asked_at_once_and_each_is_compared_with_itself() -> None:
    job = with_gpus("n1", "n2", "n3", "n4", components=(0, 0, 1, 1))
    assert preflight.slow_nodes(cast(Any, PlayedAgents()), job, SimpleQueue()) == {
        "n2": "GPU 1 multiplies matrices at 50 % of the others' speed",
        "n3": "GPU 1 multiplies matrices at 67 % of the others' speed",
        "n4": "GPU 1 multiplies matrices at 67 % of the others' speed",
    }


@pytest.mark.parametrize(("gpus", "is_asked"), [(1, False), (2, True)])
def test_a_job_of_few_gpus_is_not_measured(gpus: int, *, is_asked: bool) -> None:
    agents, job = PlayedAgents(), Allocation(("n1", "n3"), (1, 1), 1, gpus=(gpus, gpus), job_id="1")
    assert preflight.slow_nodes(cast(Any, agents), job, SimpleQueue()).keys() <= {"n3"}
    assert bool(agents.asked) == is_asked


def test_an_event_such_as_a_signal_ends_the_wait_for_the_speeds() -> None:
    events = SimpleQueue[Any]()
    Timer(0.1, events.put, ["a signal"]).start()
    began = time.monotonic()
    assert preflight.slow_nodes(cast(Any, PlayedAgents()), with_gpus("n1", "hangs"), events) == {}
    assert time.monotonic() - began < preflight.WAIT_S / 4
    assert events.get() == "a signal"


def test_the_measurement_is_over_before_the_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(60)\n")  # as torch on a slow disk
    *command, limit_s = preflight.COMMAND
    assert 0 < int(limit_s) < preflight.WAIT_S
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([*command, "1"], env=environ, timeout=30, check=False)
    assert done.returncode == -signal.SIGALRM


def test_the_measurement_counts_products_and_copies_on_each_device() -> None:
    devices = [torch.device("cpu")] * 2
    found = gpu_measure.measure(devices, edge=64, copy_bytes=1 << 16, gemm_s=0.05, copy_s=0.05)
    assert {name: len(values) for name, values in found.items()} == {"gemm": 2, "copy": 2}
    assert all(value > 1e6 for values in found.values() for value in values), found
