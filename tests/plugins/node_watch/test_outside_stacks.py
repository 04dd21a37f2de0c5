"""Stacks of processes that have prepared nothing, by py-spy or by a fatal signal."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_for
from toolkit import hang
from toolkit.files import rundir
from toolkit.files.rundir import RunDir
from toolkit.plugins.node_watch import outside_stacks
from toolkit.plugins.node_watch.outside_stacks import main_stack

#: As `py-spy dump --json` of version 0.4.3 writes it, with what we do not read left out.
PY_SPY = """[
  {"pid": 7, "thread_id": 139816168838848, "thread_name": "Thread-1 (sleep)", "os_thread_id": 18887, "frames": [
    {"name": "Thread.run", "filename": "/lib/python3.11/threading.py", "module": null, "line": 982, "locals": null},
    {"name": "Thread._bootstrap", "filename": "/lib/python3.11/threading.py", "module": null, "line": 1002}]},
  {"pid": 7, "thread_id": 139816180624256, "thread_name": "MainThread", "os_thread_id": 18885, "frames": [
    {"name": "Queue.hang_for_ever", "filename": "/x/train.py", "short_filename": "train.py", "line": 3},
    {"name": "<module>", "filename": "/x/train.py", "short_filename": "train.py", "line": 8}]}
]"""
#: Starts a child that hangs as well, and says when both do.
SCRIPT = """
import os, sys, threading
def hang_in(name):
    lock = threading.Lock()
    lock.acquire()
    if name == "child": print("ready", flush=True)
    lock.acquire()
def in_parent(): hang_in("parent")
def in_child(): hang_in("child")
in_parent() if os.fork() else in_child()
"""
LAUNCHER = "import subprocess, sys; subprocess.run([sys.executable, '-S', 'train.py'])"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = rundir.create("test", tmp_path)
    run.attempt_logs(1).mkdir(parents=True)
    return run


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


def start(run: RunDir, command: list[str], folder: Path, **environ: str) -> subprocess.Popen[bytes]:
    """Start a rank with its output where a launcher puts it; return when it hangs."""
    (folder / "train.py").write_text(SCRIPT)
    log = run.rank_log(1, 0)
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={"PATH": os.environ["PATH"], "PYTHONFAULTHANDLER": "1", **environ},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    wait_for(lambda: "ready" in log.read_text(), 30, "a script that hangs")
    return process


def oldest_first(leader: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "-s", str(leader)], capture_output=True, text=True, check=True)
    return sorted(map(int, listed.stdout.split()))


@pytest.fixture
def killed() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_what_py_spy_says_is_read_as_a_stack_of_faulthandler() -> None:
    main = main_stack(outside_stacks.from_py_spy(PY_SPY))
    assert [(frame.filename, frame.lineno, frame.name) for frame in main] == [
        ("/x/train.py", 3, "hang_for_ever"),
        ("/x/train.py", 8, "<module>"),
    ]


@pytest.mark.parametrize("says", ["", "{}", "[1]", '[{"thread_id": 1}]', "Error: Permission Denied"])
def test_a_py_spy_that_fails_or_says_something_else_is_as_good_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\nprintf %s {shlex.quote(says)}\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert outside_stacks._by_py_spy(1) == ""


def test_py_spy_is_taken_where_it_is_and_ends_nothing(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: list[subprocess.Popen[bytes]]
) -> None:
    process = start(run, [sys.executable, "-S", "train.py"], tmp_path)
    killed.append(process)
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\ncat <<'E'\n{PY_SPY}\nE\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    outside_stacks.dump_stacks(run, 1, {0: [process.pid]}, may_end=True)
    text = hang.stack_path(run.attempt_logs(1), 0).read_text()
    assert "in hang_for_ever" in text
    assert text.endswith(hang.ANSWERED)
    assert process.poll() is None


@pytest.mark.usefixtures("no_py_spy")
def test_without_py_spy_processes_of_a_shell_write_stacks_and_the_shell_is_stopped(
    run: RunDir, tmp_path: Path, killed: list[subprocess.Popen[bytes]]
) -> None:
    python = shlex.quote(os.path.realpath("/proc/self/exe"))
    process = start(run, ["bash", "-c", f"{python} -S train.py; touch went-on; true"], tmp_path)
    killed.append(process)
    pids = oldest_first(process.pid)
    outside_stacks.dump_stacks(run, 1, {0: pids}, may_end=True)
    shell, parent, child = pids
    text = hang.stack_path(run.attempt_logs(1), 0).read_text()
    assert f"# process {shell}: bash, S (sleeping)" in text
    assert [frame.name for frame in main_stack(text)] == ["hang_in", "in_parent", "<module>"]
    of_child = (run.attempt_logs(1) / f"stack-0-process-{child}.txt").read_text()
    assert [frame.name for frame in main_stack(of_child)] == ["hang_in", "in_child", "<module>"]
    assert outside_stacks._is_gone(parent)
    assert not (tmp_path / "went-on").exists()
    assert list(tmp_path.glob("core*")) == []


@pytest.mark.usefixtures("no_py_spy")
def test_a_launcher_that_waits_for_the_script_is_not_taken_for_it(
    run: RunDir, tmp_path: Path, killed: list[subprocess.Popen[bytes]]
) -> None:
    process = start(run, [os.path.realpath("/proc/self/exe"), "-S", "-c", LAUNCHER], tmp_path)
    killed.append(process)
    outside_stacks.dump_stacks(run, 1, {0: oldest_first(process.pid)}, may_end=True)
    assert main_stack(hang.stack_path(run.attempt_logs(1), 0).read_text())[0].name == "hang_in"


@pytest.mark.usefixtures("no_py_spy")
def test_a_script_that_wants_no_faulthandler_has_at_least_what_the_kernel_says(
    run: RunDir, tmp_path: Path, killed: list[subprocess.Popen[bytes]]
) -> None:
    python = os.path.realpath("/proc/self/exe")
    process = start(run, [python, "-S", "train.py"], tmp_path, PYTHONFAULTHANDLER="")
    killed.append(process)
    outside_stacks.dump_stacks(run, 1, {0: oldest_first(process.pid)}, may_end=True)
    first, *_, last = hang.stack_path(run.attempt_logs(1), 0).read_text().splitlines(keepends=True)
    assert first.startswith(f"# process {process.pid}: python")
    assert ", S (sleeping)" in first
    assert last == hang.ANSWERED


def text(*frames: str) -> str:
    """Return a stack's text from ``file:function``, innermost first."""
    lines = [f'  File "{file}", line 1 in {name}\n' for file, name in (frame.split(":") for frame in frames)]
    return "".join(["Thread 0x1 (most recent call first):\n", *lines])


AGENT = text("/x/torch/distributed/elastic/agent/server/api.py:_invoke_run", "/x/bin/torchrun:<module>")
BARRIER = text("/x/torch/distributed/distributed_c10d.py:barrier", "/x/train.py:<module>")
WORKER = text("/lib/multiprocessing/connection.py:wait", "/x/torch/utils/data/_utils/worker.py:_worker_loop")
LOCK = text("/x/train.py:hang_for_ever", "/x/train.py:<module>")


@pytest.mark.parametrize(
    ("texts", "parents", "script"),
    [
        pytest.param([BARRIER, WORKER], [1, 10], 10, id="a script and its data worker"),
        pytest.param([AGENT, BARRIER, LOCK], [1, 10, 10], 12, id="torchrun: which waits for no other"),
        pytest.param([AGENT, BARRIER, BARRIER, WORKER], [1, 10, 10, 11], 11, id="torchrun: all wait"),
        pytest.param([AGENT], [1], 10, id="torchrun alone"),
        pytest.param([], [], None, id="no Python"),
    ],
)
def test_the_process_that_speaks_for_a_rank(texts: list[str], parents: list[int], script: int | None) -> None:
    pids = list(range(10, 10 + len(texts)))
    of = dict(zip(pids, texts, strict=True))
    assert outside_stacks._script_of(pids, of, dict(zip(pids, parents, strict=True))) == script
