"""The guard, in processes of its own. It forks, and its signal handlers must not stay with the test runner."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_for

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from tests.waiting import wait_for
from toolkit.nodes.agent.die_with_parent import SIGNALS
from toolkit.base.errors import ToolkitError
from toolkit.run.supervise.entry import guarded

folder = Path(sys.argv[1])

def end_by_signal():
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(75))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    (folder / "ready").touch()
    time.sleep(60)

def await_signal():
    (folder / "awaiting").touch()
    wait_for((folder / "sent").exists, 20, "the signal")

def supervise(earlier_death):
    deaths = len(list(folder.glob("started-*")))
    (folder / f"started-{deaths}").write_text(f"{os.getpid()} {earlier_death}")
    {BODY}

try:
    code = guarded(supervise, lambda: {STEP})
except ToolkitError as error:
    (folder / "error").write_text(str(error))
    code = 1
raise SystemExit(code)
"""
WAITS = "end_by_signal()"
STEPS = 'len(list(folder.glob("step-*")))'


def start(folder: Path, body: str, step: str = STEPS) -> subprocess.Popen[bytes]:
    program = PROGRAM.replace("{BODY}", body).replace("{STEP}", step)
    return subprocess.Popen([sys.executable, "-c", program, str(folder)])


def started(folder: Path, number: int) -> str:
    return wait_for(lambda: path.read_text() if (path := folder / f"started-{number}").exists() else "", 20, "a start")


def test_the_exit_code_is_the_supervisors(tmp_path: Path) -> None:
    assert start(tmp_path, "return 75").wait(20) == 75
    assert started(tmp_path, 0).endswith("None")


def test_a_killed_supervisor_is_replaced_by_one_that_knows(tmp_path: Path) -> None:
    guard = start(tmp_path, "return 3 if deaths else os.kill(os.getpid(), signal.SIGKILL)")
    assert guard.wait(20) == 3
    assert started(tmp_path, 1).endswith(f"the supervisor on {os.uname().nodename} was killed by SIGKILL")


def test_the_third_death_is_the_last(tmp_path: Path) -> None:
    assert start(tmp_path, "os.kill(os.getpid(), signal.SIGSEGV)").wait(20) == 1
    assert len(list(tmp_path.glob("started-*"))) == 3
    assert "killed by SIGSEGV, and 2 others before it" in (tmp_path / "error").read_text()


def test_deaths_between_which_the_run_gets_on_are_not_counted_together(tmp_path: Path) -> None:
    body = "(folder / f'step-{min(deaths, 4)}').touch(); os.kill(os.getpid(), signal.SIGKILL)"
    assert start(tmp_path, body).wait(20) == 1
    assert len(list(tmp_path.glob("started-*"))) == 5 + 2


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_signals_are_handed_on_and_a_supervisor_that_dies_of_one_stays_dead(
    tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    """SIGTERM is Slurm's, at the end of the job."""
    guard = start(tmp_path, WAITS)
    wait_for((tmp_path / "ready").exists, 20, "the supervisor")
    guard.send_signal(sent)
    assert guard.wait(20) == code
    assert len(list(tmp_path.glob("started-*"))) == 1


@pytest.mark.parametrize(
    ("body", "step"),
    [
        ("await_signal(); end_by_signal()", STEPS),
        (
            "end_by_signal() if deaths else os.kill(os.getpid(), signal.SIGKILL)",
            "(folder / 'started-0').exists() and await_signal() or 0",
        ),
    ],
    ids=["before there are handlers", "between two supervisors"],
)
def test_a_signal_that_comes_too_early_is_not_lost(tmp_path: Path, body: str, step: str) -> None:
    guard = start(tmp_path, body, step)
    wait_for((tmp_path / "awaiting").exists, 20, "the moment")
    guard.send_signal(signal.SIGUSR1)
    (tmp_path / "sent").touch()
    assert guard.wait(20) == 75


def test_the_supervisor_dies_with_its_guard(tmp_path: Path) -> None:
    guard = start(tmp_path, WAITS)
    wait_for((tmp_path / "ready").exists, 20, "the supervisor")
    pid = int(started(tmp_path, 0).split()[0])
    guard.kill()
    guard.wait(20)
    wait_for(lambda: not _runs(pid), 20, "the supervisor to end")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
