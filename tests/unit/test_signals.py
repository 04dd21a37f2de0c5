"""Stop signals: none is lost, none harms a moment at which it comes. None kills a process that has ended well."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.waiting import PATIENCE
from toolkit.base import signals
from toolkit.base.signals import STOP_SIGNALS


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Restore the test runner's own handlers."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_that_came_while_nobody_listened_is_told_to_the_first_who_does(number: signal.Signals) -> None:
    handler, heard = signals.install(), list[str]()
    assert handler.first is None
    signal.raise_signal(number)
    signal.raise_signal(number)
    handler.listen(lambda: heard.append("told"))
    assert heard == ["told"]
    signal.raise_signal(number)
    assert heard == ["told"] * 2


def test_without_a_signal_nobody_is_told_anything() -> None:
    heard: list[str] = []
    signals.install().listen(lambda: heard.append("told"))
    assert heard == []


def test_the_first_signal_is_the_one_that_is_timed() -> None:
    handler = signals.install()
    begun = time.time()
    signal.raise_signal(signal.SIGUSR1)
    first = handler.first
    assert first is not None
    assert begun <= first <= time.time()
    while time.time() == first:
        pass
    signal.raise_signal(signal.SIGTERM)
    assert handler.first == first


def test_a_signal_may_come_while_another_is_handled() -> None:
    handler, heard = signals.install(), list[str]()

    def listener() -> None:
        heard.append("begun")
        if len(heard) == 1:
            signal.raise_signal(signal.SIGUSR2)  # handled before this line is left
        heard.append("done")

    handler.listen(listener)
    signal.raise_signal(signal.SIGTERM)
    assert heard == ["begun", "begun", "done", "done"]


def test_who_no_longer_listens_is_told_nothing() -> None:
    handler, heard = signals.install(), list[str]()
    handler.listen(lambda: heard.append("told"))
    handler.listen(None)
    signal.raise_signal(signal.SIGTERM)
    assert heard == []
    assert handler.first is not None


def test_a_second_install_keeps_the_first_handler_and_what_it_has_noted() -> None:
    first = signals.install()
    signal.raise_signal(signal.SIGTERM)
    assert signals.install() is first
    assert {signal.getsignal(number) for number in STOP_SIGNALS} == {first}


def test_in_a_thread_where_no_handler_can_be_set_nothing_changes_and_nothing_fails() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with ThreadPoolExecutor(1) as thread:
        assert isinstance(thread.submit(signals.install).result(), signals.StopSignals)
        thread.submit(signals.ignore).result()
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_an_earlier_handler_is_called_after_the_stop_for_the_signals_that_came() -> None:
    called: list[int] = []
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, lambda number, _: called.append(number))
    signals.install()
    signal.raise_signal(signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR1)
    assert called == []  # a stop is saved first
    signals.chain_to_previous()
    assert called == [signal.SIGUSR2]
    signal.raise_signal(signal.SIGUSR2)  # ignored: the process has ended well


def test_a_handler_that_a_script_sets_before_its_loop_is_kept_for_the_end() -> None:
    signals.install()
    signal.raise_signal(signal.SIGUSR1)
    called: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: called.append(number))
    heard: list[str] = []
    signals.install().listen(lambda: heard.append("told"))
    assert heard == ["told"]
    signal.raise_signal(signal.SIGTERM)
    assert (heard, called) == (["told", "told"], [])
    signals.chain_to_previous()
    assert called == [signal.SIGTERM]


# The object in the main module dies when the interpreter has put back the default actions already.
SHUTDOWN = """
import os, signal, sys
from toolkit.base import signals

class Last:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.{number}):
        kill(pid, number)

signals.install()
last = Last()
{before_the_end}
sys.exit(75)
"""


def exit_code(number: signal.Signals, before_the_end: str) -> int:
    code = SHUTDOWN.format(number=number.name, before_the_end=before_the_end)
    return subprocess.run([sys.executable, "-c", code], timeout=60).returncode


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_during_the_interpreters_shutdown_does_not_change_the_exit_code(number: signal.Signals) -> None:
    assert exit_code(number, "signals.ignore()") == 75


def test_without_ignore_a_signal_during_the_interpreters_shutdown_does_kill() -> None:
    assert exit_code(signal.SIGTERM, "") == -signal.SIGTERM


#: Starts a child in one way, sends it the signals as Slurm does, and tells which have ended it. Then ends it.
RANK = """
import multiprocessing, os, signal, subprocess, sys, time
from toolkit.base import signals

def wait(ready):
    ready.send(os.getpid())
    time.sleep(600)

class Waiting:
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return os.getpid()

def child_of(how):
    if how in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(how)
        ours, theirs = context.Pipe()
        child = context.Process(target=wait, args=(theirs,), daemon=True)
        child.start()
        assert ours.recv() == child.pid
        return child.pid, child
    if how.startswith("loader"):
        from torch.utils.data import DataLoader
        batches = iter(DataLoader(Waiting(), 1, num_workers=1, multiprocessing_context=how.partition("-")[2]))
        pid = int(next(batches))  # torch has installed its own handler by now
        return pid, batches
    if how == "system":
        os.system("sleep 600 & echo $! > pid")
        return int(open("pid").read()), None
    if how == "os.fork":
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        return pid, None
    if how == "spawnp":
        return os.posix_spawnp("sleep", ["sleep", "600"], os.environ), None
    if how == "script":
        with open("script", "w") as script:
            script.write("#! /bin/sh\\nsleep 600\\n")
        os.chmod("script", 0o700)
    options = {"shell": {"shell": True}, "session": {"start_new_session": True}}.get(how, {})
    command = {"shell": "sleep 600; true", "script": ["./script"]}.get(how, ["sleep", "600"])
    child = subprocess.Popen(command, **options)
    return child.pid, child

def alive(pid):
    os.kill(pid, signal.SIGSTOP)  # the kernel ends a process for a deadly signal before it stops it
    while True:
        state = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0]
        if state in "TZX":
            os.kill(pid, signal.SIGCONT)
            return state == "T"
        time.sleep(0.01)

if __name__ == "__main__":
    signals.install()
    pid, child = child_of(sys.argv[1])
    for number in signals.END_SIGNALS:
        os.kill(pid, number)
    is_alive = alive(pid)  # a deadly signal takes effect before the process runs again
    if isinstance(child, subprocess.Popen):
        child.terminate()
        child.wait(60)
    elif child is None:
        os.kill(pid, signal.SIGKILL)
    elif sys.argv[1] in ("fork", "spawn", "forkserver"):
        child.terminate()
        child.join(60)
        assert child.exitcode == -signal.SIGKILL
    print("survived" if is_alive else "killed")
"""
WAYS = (
    "fork",
    "spawn",
    "forkserver",
    "loader-fork",
    "loader-spawn",
    "loader-forkserver",
    "os.fork",
    "system",
    "spawnp",
)


def run_rank(words: list[str], folder: Path, env: dict[str, str]) -> int:
    """Return a program's exit code. What it prints is in the files ``out`` and ``err``.

    What a shell has started outlives it, and would hold a pipe open.
    """
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        rank = subprocess.Popen(
            [sys.executable, *words], cwd=folder, env=env, stdout=out, stderr=err, start_new_session=True
        )
    try:
        return rank.wait(PATIENCE * 60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)


@pytest.mark.sample(4)
@pytest.mark.parametrize("how", [*WAYS, "popen", "shell", "script", "session"])
def test_a_child_of_a_rank_outlives_stop_signals_and_ends_with_terminate(how: str, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    env = {
        **os.environ,
        "TOOLKIT_SUPERVISED": "1",
        "TOOLKIT_SIGNALS_ALL": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    code = run_rank(["rank.py", how], tmp_path, env)
    assert (tmp_path / "out").read_text() == "survived\n", (tmp_path / "err").read_text()
    assert code == 0


#: Starts a child where Slurm signals the rank alone, and ends it by ``os.kill``.
ALONE = """
import os, signal, subprocess, sys, time

def masks(pid):
    status = open(f"/proc/{pid}/status").read()
    return {int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigBlk", "SigIgn"))}

if __name__ == "__main__":
    from toolkit.base import signals
    from rank import alive, child_of

    signal.signal(signal.SIGUSR2, lambda *_: os._exit(9))
    before = masks(os.getpid())
    signals.install()
    pid, child = child_of(sys.argv[1])
    if sys.argv[1] not in ("fork", "os.fork", "loader-fork"):
        # A shell blocks some for a moment when it starts a program.
        while any(mask >> number - 1 & 1 for mask in masks(pid) - before for number in signals.STOP_SIGNALS):
            time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    while alive(pid):  # a fork may not have its own handlers yet
        time.sleep(0.01)
    if sys.argv[1] == "os.fork":
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
        again, _ = child_of("os.fork")
        os.kill(again, signal.SIGUSR2)  # the handler that a script had set before
        assert os.waitstatus_to_exitcode(os.waitpid(again, 0)[1]) == 9
    print("ended")
    os._exit(0)
"""


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "how", ["fork", "spawn", "loader-fork", "os.fork", "system", "spawnp", "popen", "shell", "session"]
)
def test_where_slurm_signals_ranks_alone_a_child_ends_by_any_signal_of_its_rank(how: str, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "alone.py").write_text(ALONE)
    env = {**os.environ, "TOOLKIT_SUPERVISED": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    run_rank(["alone.py", how], tmp_path, env)
    assert (tmp_path / "out").read_text() == "ended\n", (tmp_path / "err").read_text()


#: Starts a child that may hear the signal, and that ignores further ones while it cleans up.
HEARS = """
import os, signal, subprocess, sys
from pathlib import Path
from tests.waiting import wait_for
from toolkit.base import signals

CHILD = '''
import signal, sys, time
from pathlib import Path

def clean_up(number, frame):
    signal.signal(number, signal.SIG_IGN)
    Path("cleaning").touch()
    time.sleep(0.2)
    sys.exit(7)

signal.signal(signal.SIGTERM, clean_up)
if sys.argv[1] == "unblocked":
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
Path("ready").touch()
time.sleep(600)
'''

def kill(pid, number):
    plain_kill(pid, number)
    if number == signal.SIGTERM:
        wait_for(Path("cleaning").exists, 60, "the child's handler")

earlier = signal.getsignal(signal.SIGTERM)
signals.install()
if sys.argv[1] == "ours is gone":
    signal.signal(signal.SIGTERM, earlier)
child = subprocess.Popen([sys.executable, "-c", CHILD, sys.argv[1]])
wait_for(Path("ready").exists, 60, "the child")
plain_kill, os.kill = os.kill, kill
child.terminate()
sys.exit(child.wait(60))
"""


@pytest.mark.parametrize("why", ["unblocked", "ours is gone"])
def test_a_child_that_hears_the_signal_may_clean_up(why: str, tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(HEARS)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "rank.py", why], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE * 60
    )
    assert done.returncode == 7, done.stderr
