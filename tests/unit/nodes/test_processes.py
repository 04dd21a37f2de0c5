"""The processes that an agent starts on its node."""

import contextlib
import errno
import gc
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.process_limits import ChangeLimits
from tests.waiting import PATIENCE, wait_for
from toolkit.nodes.agent import processes as agent_processes
from toolkit.nodes.agent import zygote as agent_zygote
from toolkit.nodes.agent.helpers import Helpers
from toolkit.nodes.agent.messages import Message, ProcessEnded, ProcessNotStarted, ProcessSpec, StartOrder
from toolkit.nodes.agent.processes import Processes, ZygoteClient
from toolkit.nodes.start.launcher import port_in


def order(attempt: int, process: ProcessSpec, module: tuple[str, ...] | None = None) -> StartOrder:
    """Return the order to start a process that ends at once."""
    return StartOrder(attempt, module, ("true",), {}, (), (process,), None, 1, gets_signals=False)


def test_a_store_without_pipes_is_reported_and_the_agent_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Message] = []
    processes = Processes(selectors.DefaultSelector(), sent.append, None)
    made: list[int] = []
    pipe = os.pipe

    def only_one() -> tuple[int, int]:
        if made:
            raise OSError(errno.EMFILE, "Too many open files")
        made.extend(pipe())
        return made[0], made[1]

    monkeypatch.setattr(os, "pipe", only_one)
    processes.start(order(3, ProcessSpec(None, {}, str(tmp_path / "logs/store.log"))))
    assert sent == [ProcessNotStarted(3, None, "[Errno 24] Too many open files")]
    for file in made:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(file)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_waits_to_be_started_is_ended_by_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    sent: list[Message] = []
    processes = Processes(selectors.DefaultSelector(), sent.append, None)
    processes.defer_starts(600)
    processes.start(order(3, ProcessSpec(1, {}, str(tmp_path / "logs/rank-1.log"))))
    processes.signal(3, number)
    processes.use_copies({})  # the wait is over
    (ended,) = sent
    assert isinstance(ended, ProcessEnded)
    assert (ended.attempt, ended.rank, ended.code) == (3, 1, -number)


def test_what_a_rank_left_as_another_user_does_not_end_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program such as sudo may not be killed."""

    def refuse(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    processes = Processes(selectors.DefaultSelector(), lambda message: None, None)
    with subprocess.Popen(["sleep", "600"]) as child, contextlib.ExitStack() as at_end:
        at_end.callback(child.kill)
        patch = at_end.enter_context(monkeypatch.context())
        patch.setattr(os, "kill", refuse)
        assert processes.end_strays([])


def test_a_zygote_that_cannot_fork_leaves_no_pipe_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", refuse)
    gc.collect()  # what other tests have left open must not be closed in between
    before = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(OSError, match="temporarily unavailable"):
        agent_zygote._fork()
    assert len([*Path("/proc/self/fd").iterdir()]) == before


#: Stands for a zygote: says that it has imported, or not even that, and answers nothing more.
ZYGOTE = """#!{python}
import socket, sys, time
agent = socket.socket(fileno=int(sys.argv[4]))
if {is_ready}:
    agent.sendall(b'{{"ready": {{"import_s": 0, "waited_s": 0, "learnt": 0, "unclean": null, "has_torch": true}}}}\\n')
time.sleep(600)
"""


class Node:
    """The processes of a node with such a zygote, and what is told of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_ready: bool) -> None:
        program = folder / "python"
        program.write_text(ZYGOTE.format(python=sys.executable, is_ready=is_ready))
        program.chmod(0o700)
        self.zygotes: list[ZygoteClient] = []
        self.sent: list[Message] = []

        def client(imports: Path | None, python: str, environ: Mapping[str, str], *, forks: str) -> ZygoteClient:
            zygote = ZygoteClient(imports, str(program), environ, forks=forks)
            zygote.is_of_a_copy = False
            self.zygotes.append(zygote)
            return zygote

        monkeypatch.setattr(agent_processes, "ZygoteClient", client)
        self.selector = selectors.DefaultSelector()
        self.processes = Processes(self.selector, self.sent.append, None)
        self._log = str(folder / "logs/rank.log")

    def start(self, attempt: int) -> None:
        """Order a rank that a zygote is to fork."""
        self.processes.start(order(attempt, ProcessSpec(0, {}, self._log), ("true",)))

    def close(self) -> None:
        self.processes.end_all()
        for zygote in self.zygotes:
            zygote._process.wait()
            zygote._lines.close()
            zygote.socket.close()

    def serve(self) -> None:
        """Take what the zygote says."""
        for key, _ in self.selector.select(20):
            key.data()

    def await_rank(self, attempt: int) -> None:
        """Wait for the end of the rank."""
        (pid,) = (pid for pid, child in self.processes._children.items() if child.attempt == attempt)
        _, status = os.waitpid(pid, 0)
        self.processes.note_end(pid, status)
        ended = self.sent[-1]
        assert isinstance(ended, ProcessEnded)
        assert ended.code == 0


def test_a_zygote_that_forks_nothing_is_replaced_and_costs_no_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    change_limits(fork_s=0.1)
    node = Node(tmp_path, monkeypatch, is_ready=True)
    node.processes.warm()
    node.serve()
    node.start(1)
    node.await_rank(1)  # as a fresh program
    (silent,) = node.zygotes
    assert silent._process.wait(20) == -signal.SIGKILL
    node.serve()
    node.processes.warm()
    node.serve()
    assert [zygote.can_fork for zygote in node.zygotes] == [False, True]
    node.close()


def test_a_zygote_that_is_stopped_while_it_imports_holds_up_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    change_limits(zygote_answers_s=0.0)
    node = Node(tmp_path, monkeypatch, is_ready=False)
    node.start(1)
    node.processes.check_timers()
    (zygote,) = node.zygotes
    assert zygote._process.poll() is None  # it still imports
    os.kill(zygote.pid, signal.SIGSTOP)

    def look() -> bool:
        node.processes.check_timers()
        return zygote._process.poll() is not None

    wait_for(look, 20, "the end of the zygote")
    node.serve()
    node.await_rank(1)
    node.close()


def test_the_agent_does_not_wait_for_a_helper_that_reads_nothing() -> None:
    """A pipe takes 64 KiB: the agent stopped, and its supervisor gave it up with all its ranks."""
    helpers = Helpers(selectors.DefaultSelector())
    pid = helpers.start(["sleep", "600"], given=b"x" * (1 << 20))
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_helper_is_given_all_of_a_long_text_and_may_print_before_its_answer() -> None:
    selector, answers = selectors.DefaultSelector(), list[bytes]()
    program = "import sys, time; print('hello', flush=True); text = sys.stdin.read(); print({'read': len(text)})"
    program += "; sys.stdout.flush(); time.sleep(600)"
    helpers = Helpers(selector)
    helpers.ask([sys.executable, "-c", program], answers.append, b"x" * (1 << 20), awaits_end=False)
    while selector.get_map():
        for key, _ in selector.select(PATIENCE):
            key.data()
    assert answers == [b"hello\n{'read': 1048576}\n"]
    for pid in helpers.pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("line", ["hello", "{}", "3", '{"port": "80"}', '{"port": 1e999}', '{"port": 0}', "[" * 10**5])
def test_what_a_library_prints_in_the_store_host_is_no_port(line: str, caplog: pytest.LogCaptureFixture) -> None:
    assert port_in(f"{line}\n") is None
    assert f"the store host says: {line[:100]}" in caplog.text
    assert port_in('{"port": 4711}\n') == 4711
