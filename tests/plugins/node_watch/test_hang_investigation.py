"""Which rank is behind, and how faulthandler's text is read."""

import cProfile
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from traceback import FrameSummary
from typing import cast

import pytest

import toolkit
from tests.process_limits import ChangeLimits
from tests.waiting import wait_for
from toolkit import hang
from toolkit.base import fsio
from toolkit.base.process_limits import limits
from toolkit.files import rundir
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent.messages import StacksAnswered, StacksOrder, encoded
from toolkit.nodes.agent.reports import ProgressSummary, RankProgress
from toolkit.nodes.start.agents import Agents
from toolkit.plugins.node_watch import investigation, stack_summary
from toolkit.plugins.node_watch.investigation import blame
from toolkit.plugins.node_watch.outside_stacks import main_stack
from toolkit.plugins.node_watch.stack_summary import (
    RankStack,
    awaits,
    collect,
    from_json,
    group,
    merge,
    summarize_stacks,
)

TIMEOUT_S = 20


def frames(*places: str) -> list[FrameSummary]:
    """Return frames from ``file:function``, innermost first."""
    return [FrameSummary(file, 1, name) for file, name in (place.split(":") for place in places)]


OURS = Path(toolkit.__file__).parent
LOOP = f"{OURS}/train/loop.py:_train"
ALL_REDUCE = frames(
    "/x/site-packages/torch/distributed/distributed_c10d.py:all_reduce", f"{OURS}/ranks/collectives.py:sum", LOOP
)
BROADCAST = frames("/x/site-packages/torch/distributed/distributed_c10d.py:broadcast", "/x/jobs/mine.py:odd", LOOP)
BARRIER = frames("/x/site-packages/torch/distributed/distributed_c10d.py:barrier", "/x/jobs/mine.py:odd")
FORWARD = frames("/x/site-packages/torch/nn/parallel/distributed.py:_pre_forward", "/x/jobs/mine.py:odd")
BACKWARD = frames(
    "/x/site-packages/torch/autograd/graph.py:_engine_run_backward", "/x/site-packages/torch/_tensor.py:backward", LOOP
)
LOADER = frames("/x/site-packages/numpy/lib/format.py:read_array", LOOP)
GATHER = frames(f"{OURS}/checkpoint/exchange.py:_await", f"{OURS}/checkpoint/exchange.py:gather", LOOP)
WRITING = frames(f"{OURS}/fsio.py:write_stream", LOOP)
C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"
OPENING = frames(f"{C10D}:_new_process_group_helper", f"{C10D}:init_process_group", f"{OURS}/ranks/session.py:open")
IMPORTING = frames("<frozen importlib._bootstrap>:_find_and_load", "/x/jobs/mine.py:<module>")


def rank(
    number: int,
    stack: list[FrameSummary] | None,
    phase: str | None = "in a step",
    step: int | None = 7,
    silent: bool = False,
) -> RankStack:
    return RankStack(RankProgress(number, phase, step, 212.4 + number, silent), stack)


def progress(number: int, *, silent: bool) -> RankProgress:
    return RankProgress(number, "in a step", 7, 10.0, silent)


@pytest.mark.parametrize(
    ("seen", "culprits", "line"),
    [
        pytest.param(
            [rank(0, BACKWARD), rank(1, LOADER, "waiting for data"), rank(2, BACKWARD), rank(3, ALL_REDUCE)],
            [1],
            "waiting for data, 213 s; 3 others in all_reduce",
            id="the loader of one",
        ),
        pytest.param(
            [rank(0, BACKWARD), rank(1, []), rank(2, [], silent=True)],
            [2],
            "does not answer (stopped, or its node is gone), 214 s; 1 other in all_reduce, 1 in a step",
            id="one is stopped, one is alive and too busy to write its stack",
        ),
        pytest.param(
            [rank(0, LOADER), rank(1, BACKWARD)],
            [0],
            "in a step, 212 s; 1 other in all_reduce",
            id="one never enters the collective",
        ),
        pytest.param(
            [rank(0, ALL_REDUCE), rank(1, BROADCAST), rank(2, ALL_REDUCE)],
            [1],
            "in broadcast (mine.py:1), 213 s; 2 others in all_reduce",
            id="one is in another collective",
        ),
        pytest.param(
            [rank(0, BARRIER), rank(1, FORWARD, step=8)],
            [0],
            "in barrier (mine.py:1), 212 s; 1 other in DistributedDataParallel (mine.py:1)",
            id="a call that the other has not made, which is further",
        ),
        pytest.param(
            [rank(0, ALL_REDUCE), rank(1, FORWARD)],
            [1],
            "in DistributedDataParallel (mine.py:1), 213 s; 1 other in all_reduce",
            id="a forward pass of one, while the other is in a call of the toolkit's",
        ),
        pytest.param(
            [rank(0, FORWARD), rank(1, ALL_REDUCE, step=8), rank(2, FORWARD)],
            [1],
            "in all_reduce, 213 s; 2 others in DistributedDataParallel (mine.py:1)",
            id="a call that one has left out, which is further",
        ),
        pytest.param(
            [rank(0, ALL_REDUCE), rank(1, ALL_REDUCE)],
            [0, 1],
            "in all_reduce, 212 s (rank 1 as well)",
            id="all in the same one: the network",
        ),
        pytest.param(
            [rank(0, LOADER, step=9), rank(1, BACKWARD, step=8), rank(2, BACKWARD, step=9)],
            [1],
            "in all_reduce, 213 s; 1 other in a step, 1 in all_reduce",
            id="fewer steps weigh more",
        ),
        pytest.param(
            [rank(0, WRITING, "saving a checkpoint"), *(rank(n, GATHER, "saving a checkpoint") for n in (1, 2))],
            [0],
            "saving a checkpoint, 212 s; 2 others waiting for the others at a checkpoint",
            id="rank 0's disk",
        ),
        pytest.param(
            [rank(0, GATHER, "saving a checkpoint"), rank(1, WRITING, "saving a checkpoint")],
            [1],
            "saving a checkpoint, 213 s; 1 other waiting for the others at a checkpoint",
            id="another rank's disk",
        ),
        pytest.param(
            [rank(0, OPENING, None, None), rank(1, None, None, None), rank(2, OPENING, None, None)],
            [1],
            "has not started, 213 s; 2 others in init_process_group",
            id="one was never started",
        ),
        pytest.param(
            [rank(0, OPENING, None, None), rank(1, IMPORTING, None, None)],
            [1],
            "has not joined the others (mine.py:1), 213 s; 1 other in init_process_group",
            id="one is in its imports",
        ),
        pytest.param(
            [rank(0, BACKWARD), *(rank(n, LOADER, "waiting for data") for n in (4, 5, 6, 9))],
            [4, 5, 6, 9],
            "waiting for data, 216 s (ranks 5-6,9 as well); 1 other in all_reduce",
            id="several, of one file server",
        ),
        pytest.param(
            [rank(0, [], silent=True), rank(1, [], silent=True)],
            [0, 1],
            "does not answer (stopped, or its node is gone), 212 s (rank 1 as well)",
            id="nobody answers",
        ),
    ],
)
def test_the_rank_that_is_behind(seen: list[RankStack], culprits: list[int], line: str) -> None:
    assert blame(group(seen)) == (culprits, line)


def test_a_rank_at_work_waits_for_nobody() -> None:
    assert awaits(LOADER) is None
    assert awaits([]) is None


@pytest.mark.parametrize(("line", "waits"), [("work.wait()", True), ("time.sleep(9)", False)])
def test_a_wait_for_a_collective_that_was_begun_before_is_one(tmp_path: Path, line: str, waits: bool) -> None:
    """The wait itself is compiled code, so the script's own frame is the innermost."""
    (tmp_path / "train.py").write_text(f"work = dist.all_reduce(x, async_op=True)\n{line}\n")
    stack = [FrameSummary(str(tmp_path / "train.py"), 2, "<module>")]
    assert awaits(stack) == ("waiting for a collective" if waits else None)


def test_the_calls_to_judge_ranks_grow_no_faster_than_their_number() -> None:
    def calls(number_of_ranks: int) -> int:
        seen = [rank(number, BACKWARD) for number in range(number_of_ranks)]
        profile = cProfile.Profile()
        culprits, line = profile.runcall(lambda: blame(group(seen)))
        assert len(culprits) == number_of_ranks
        assert line == f"in all_reduce, 212 s (ranks 1-{number_of_ranks - 1} as well)"
        return sum(entry.callcount for entry in profile.getstats())

    assert calls(4096) < 5 * calls(1024)


#: A rank and its forked data worker, which hang in two threads each. Only the environment names the supervisor.
RANK = """
import os, threading
from toolkit import hang

def forever():
    threading.Event().wait()

def main_forever():
    print("ready", flush=True)
    forever()

hang.install_stack_dump(3)
os.environ["RANK"] = "3"
threading.Thread(target=forever, daemon=True).start()
if os.fork() == 0:
    hang.install_worker_dump(1)
    main_forever()
main_forever()
"""


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """Yield the log folder and the pid of a rank 3 that hangs."""
    run = rundir.create("test", tmp_path)
    folder = fsio.make_dir(run.attempt_logs(1))
    environ = {"TOOLKIT_SUPERVISED": "1", rundir.RUN_DIR_VARIABLE: str(run.path), "TOOLKIT_ATTEMPT": "1"}
    command = [sys.executable, "-c", RANK]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        yield folder, process.pid
        os.killpg(process.pid, signal.SIGKILL)


def test_a_rank_and_its_worker_tell_their_stacks_when_only_the_rank_is_asked(hung: tuple[Path, int]) -> None:
    """As under Slurm's cgroup plugin. The main thread's stack counts."""
    folder, pid = hung
    os.kill(pid, hang.ASK)
    told = collect(folder, [progress(3, silent=False)])
    assert [frame.name for frame in told[3]][-2:] == ["main_forever", "<module>"]
    worker = hang.stack_path(folder, 3, 1)
    wait_for(lambda: "<module>" in worker.read_text(), TIMEOUT_S, "the worker's stack")
    assert [frame.name for frame in main_stack(worker.read_text())][-2:] == ["main_forever", "<module>"]
    quoted = investigation._quote(folder, 3, investigation._stack_of(folder, 3))
    assert quoted.count("in main_forever") == 2
    assert "data worker 1" in quoted
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())


def test_a_stopped_rank_is_not_waited_for_and_one_without_a_file_has_not_started(
    hung: tuple[Path, int], change_limits: ChangeLimits
) -> None:
    change_limits(stacks_s=1.0)
    folder, pid = hung
    os.kill(pid, signal.SIGSTOP)
    os.kill(pid, hang.ASK)
    begun = time.monotonic()
    assert collect(folder, [progress(3, silent=True)]) == {3: []}
    assert time.monotonic() - begun < limits().stacks_s / 2
    assert collect(folder, [progress(3, silent=True), progress(4, silent=False)]) == {3: [], 4: None}
    assert time.monotonic() - begun > limits().stacks_s - 2 * limits().look_for_stacks_every_s


def unread(number: int, phase: str | None = "in a step", step: int | None = 7) -> RankStack:
    return RankStack(RankProgress(number, phase, step, 212.4 + number, False), None, is_read=False)


@pytest.mark.parametrize(
    ("seen", "culprits", "line"),
    [
        pytest.param(
            [rank(0, BACKWARD), rank(1, ALL_REDUCE), unread(2), unread(3)],
            [],
            "the slowest rank is unknown: there was no time to read the stacks of 2 of 4 ranks; 2 ranks in all_reduce",
            id="all that were read wait: it may be any of the others",
        ),
        pytest.param(
            [unread(0), unread(1)],
            [],
            "the slowest rank is unknown: there was no time to read the stacks of 2 of 2 ranks",
            id="none was read",
        ),
        pytest.param(
            [rank(0, BACKWARD), rank(1, LOADER, "waiting for data"), unread(2)],
            [1],
            "waiting for data, 213 s; 1 other in all_reduce, 1 unknown (in a step)",
            id="one was seen at work",
        ),
        pytest.param(
            [rank(0, BACKWARD), unread(1, step=6), unread(2)],
            [1],
            "unknown (in a step), 213 s; 1 other in all_reduce, 1 unknown (in a step)",
            id="one is behind by its reports",
        ),
        pytest.param(
            [rank(0, OPENING, None, None), unread(1, None, None)],
            [],
            "the slowest rank is unknown: there was no time to read the stacks of 1 of 2 ranks; "
            "1 rank in init_process_group",
            id="whether it has started nobody knows",
        ),
    ],
)
def test_a_rank_whose_stack_was_not_read_is_not_blamed_for_it(
    seen: list[RankStack], culprits: list[int], line: str
) -> None:
    assert blame(group(seen)) == (culprits, line)


class SlowDisk:
    """The stack files of many ranks. Each takes ``delay_s`` to read, and the reads are counted."""

    def __init__(self, texts: dict[int, str | None], delay_s: float) -> None:
        self._texts, self._delay_s = texts, delay_s
        self.reads: list[int] = []

    def __call__(self, path: Path) -> str | None:
        number = int(path.stem.removeprefix("stack-"))
        self.reads.append(number)
        time.sleep(self._delay_s)
        return self._texts[number]


def written(*places: str) -> str:
    lines = [f'  File "{frame.filename}", line 1 in {frame.name}' for frame in frames(*places)]
    return "\n".join(["Current thread 0x01 (most recent call first):", *lines, hang.ANSWERED])


WAITS = written("/x/site-packages/torch/distributed/distributed_c10d.py:all_reduce", LOOP)
WORKS = written("/x/jobs/mine.py:__getitem__", LOOP)


def test_ranks_whose_stacks_there_was_no_time_to_read_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    """Before, each unread rank counted as "in a step". The first of them was blamed."""
    ranks = 1000
    change_limits(stacks_s=0.3)
    disk = SlowDisk(dict.fromkeys(range(ranks), WAITS) | {ranks - 1: WORKS}, delay_s=0.01)
    monkeypatch.setattr(stack_summary, "stack_text", disk)
    rank_progress = [RankProgress(number, "in a step", 7, 300.0, False) for number in range(ranks)]
    groups = from_json(json.loads(summarize_stacks(tmp_path, rank_progress)))
    read = [each for each in groups if each.is_read]
    assert [each.doing for each in read] == ["in all_reduce"]
    assert 0 < len(read[0].ranks) < ranks / 10
    culprits, line = blame(groups)
    assert culprits == []
    known = len(read[0].ranks)
    assert line.endswith(f"the stacks of {ranks - known} of {ranks} ranks; {known} ranks in all_reduce")


def test_a_file_server_that_does_not_answer_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    change_limits(stacks_s=0.2)
    answers = threading.Event()
    monkeypatch.setattr(stack_summary, "stack_text", lambda _: str(answers.wait(TIMEOUT_S)))
    assert collect(tmp_path, [progress(0, silent=False)]) == {}
    answers.set()


def test_a_file_that_was_read_too_early_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    """The signal takes time to reach the ranks. An empty file is an answer only when one could have been there."""
    change_limits(stacks_s=0.2, look_for_stacks_every_s=60.0)
    monkeypatch.setattr(stack_summary, "stack_text", lambda _: "")
    assert collect(tmp_path, [progress(0, silent=False)]) == {}
    change_limits(look_for_stacks_every_s=0.02)
    assert collect(tmp_path, [progress(0, silent=False)]) == {0: []}


def test_every_file_is_read_once_where_all_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = SlowDisk(dict.fromkeys(range(200), WAITS), delay_s=0.0)
    monkeypatch.setattr(stack_summary, "stack_text", disk)
    told = collect(tmp_path, [progress(number, silent=False) for number in range(200)])
    assert sorted(disk.reads) == sorted(told) == list(range(200))


class Nodes:
    """Agents that answer with the test's groups, or not at all."""

    def __init__(self, groups: Mapping[str, str], silent: Sequence[str] = ()) -> None:
        self._groups, self.silent_hosts = groups, silent
        self.orders: Mapping[str, StacksOrder] = {}

    def ask(self, orders: Mapping[str, StacksOrder], wait_s: float) -> Mapping[str, StacksAnswered]:
        self.orders = orders
        return {host: StacksAnswered(1, json.loads(text)) for host, text in self._groups.items()}


A_NODE = 8


def node_ranks(node: int) -> range:
    return range(node * A_NODE, (node + 1) * A_NODE)


def answer_of(node: int, culprit: int | None = None) -> str:
    """Return the answer of a node whose ranks are in an all-reduce. Only ``culprit`` is not."""
    stacks_of = {number: LOADER if number == culprit else ALL_REDUCE for number in node_ranks(node)}
    return json.dumps([each.to_json() for each in group(rank(number, stack) for number, stack in stacks_of.items())])


def unknown(nodes: int) -> dict[str, list[RankProgress]]:
    """Return a supervisor's knowledge of the ranks of a run that reports."""
    return {
        f"node{node}": [RankProgress(number, None, None, 40.0, False) for number in node_ranks(node)]
        for node in range(nodes)
    }


def test_of_two_thousand_nodes_the_one_rank_that_works_is_named(run: RunDir) -> None:
    """Before, the supervisor read 16,000 files for it, one by one, within its 3 s."""
    count, culprit = 2_000, 14_321
    nodes = Nodes({f"node{node}": answer_of(node, culprit) for node in range(count)})
    begun = time.monotonic()
    groups = investigation.collect_stacks(cast(Agents, nodes), run, 1, unknown(count), {})
    named, line = blame(groups)
    assert time.monotonic() - begun < 10
    assert len(groups) == 2
    assert (named, line) == ([culprit], f"in a step, {212.4 + culprit:.0f} s; {8 * count - 1} others in all_reduce")
    assert max(len(encoded(order)) for order in nodes.orders.values()) < 1200


def test_a_node_that_is_silent_is_taken_for_the_one_that_all_wait_for(run: RunDir) -> None:
    nodes = Nodes({f"node{node}": answer_of(node) for node in (0, 2)}, silent=["node1"])
    known = {"node1": ProgressSummary(1, A_NODE, 0, 99, 7, 7)}
    culprits, line = blame(investigation.collect_stacks(cast(Agents, nodes), run, 1, unknown(3), known))
    assert culprits == list(node_ranks(1))
    gone = "does not answer (stopped, or its node is gone), 40 s (ranks 9-15 as well)"
    assert line == f"{gone}; 16 others in all_reduce"


def test_a_node_that_does_not_answer_in_time_blames_nobody(run: RunDir) -> None:
    nodes = Nodes({f"node{node}": answer_of(node) for node in (0, 2)})
    known = {"node1": ProgressSummary(1, A_NODE, 0, 99, 7, 7)}
    culprits, line = blame(investigation.collect_stacks(cast(Agents, nodes), run, 1, unknown(3), known))
    assert culprits == []
    assert "no time to read the stacks of 8 of 24 ranks; 16 ranks in all_reduce" in line


def test_groups_may_be_merged_in_any_order_and_in_parts() -> None:
    """Agents that pass on the groups of other agents merge them in this way."""
    parts = [from_json(json.loads(answer_of(node, culprit=9))) for node in range(4)]
    at_once = merge(each for part in parts for each in part)
    in_a_tree = merge([*merge([*parts[3], *parts[1]]), *merge([*parts[0], *parts[2]])])
    assert at_once == in_a_tree
    assert [len(each.ranks) for each in at_once] == [31, 1]


TORCH = "/opt/env/lib/python3.11/site-packages/torch/cuda/__init__.py"


@pytest.mark.parametrize(
    ("frames", "is_of_node"),
    [
        ([], True),  # it does not answer
        ([("train.py", "time.sleep(1000)")], False),
        ([("train.py", "while not done: pass")], False),
        ([("/opt/lib/python3.11/threading.py", "waiter.acquire()"), ("train.py", "event.wait()")], False),
        ([("/opt/lib/python3.11/multiprocessing/connection.py", "buf = os.read(n)"), ("train.py", "x")], False),
        ([("train.py", "total += loss.item()")], True),
        ([("train.py", "data = np.load(path)")], True),
        ([(TORCH, "torch._C._cuda_synchronize()"), ("train.py", "main()")], True),
    ],
)
def test_a_hang_blames_the_node_only_where_it_may_be_at_fault(frames: list[tuple[str, str]], is_of_node: bool) -> None:
    stack = [FrameSummary(file, 1, "f", line=line, lookup_line=False) for file, line in frames]
    assert investigation._may_be_of_node(stack) is is_of_node
