"""srun's lines, and processes that do not outlive their parent."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from tests.process_limits import ChangeLimits
from toolkit.files import rundir
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agent_starters import SrunAgents
from toolkit.nodes.start.agents import Endpoint
from toolkit.nodes.start.children import with_death_signal
from toolkit.nodes.start.launcher import LaunchFailed, NodeFailed, RanksExited
from toolkit.nodes.start.srun import Srun, parse_srun_line
from toolkit.slurm.srun_commands import SrunStep

TIMEOUT_S = 20


@pytest.mark.parametrize(
    ("line", "ranks", "host", "how", "number"),
    [
        ("srun: error: node1: task 0: Killed", (0,), "node1", "killed by SIGKILL (Killed)", signal.SIGKILL),
        ("srun: error: node2: tasks 2-3: Exited with exit code 1", (2, 3), "node2", "exit code 1", None),
        ("srun: error: node2: tasks 2,5-6: Exited with exit code 75", (2, 5, 6), "node2", "exit code 75", None),
        (
            "srun: error: n-01: task 7: Segmentation fault (core dumped)",
            *((7,), "n-01", "killed by SIGSEGV (Segmentation fault (core dumped))", signal.SIGSEGV),
        ),
        ("srun: error: node1: task 4: Terminated", (4,), "node1", "killed by SIGTERM (Terminated)", signal.SIGTERM),
        (
            "srun: error: node1: task 4: Out Of Memory",
            *((4,), "node1", "killed by SIGKILL (Out Of Memory)", signal.SIGKILL),
        ),
        ("srun: error: node1: task 4: Aborted", (4,), "node1", "killed by SIGABRT (Aborted)", signal.SIGABRT),
    ],
)
def test_srun_says_which_rank_ended_how(
    line: str, ranks: tuple[int, ...], host: str, how: str, number: signal.Signals | None
) -> None:
    ended = parse_srun_line(line + "\n", ["node1"] * 8)
    assert isinstance(ended, RanksExited)
    assert (ended.ranks, ended.host, ended.how, ended.signal) == (ranks, host, how, number)


@pytest.mark.parametrize(
    "line",
    [
        "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.",
        "slurmstepd: error: *** STEP 1.0 ON node1 CANCELLED AT 2026-11-20T15:00:00 ***",
        "srun: error: Application launch failed: Communication connection failure",
        "srun: error: Aborting, io error and missing step on node 2",
        "srun: error: task 2 launch failed: Slurmd could not connect IO",
        "",
    ],
)
def test_other_lines_of_srun_end_no_rank(line: str) -> None:
    assert parse_srun_line(line, ["node1", "node2"]) is None


def test_a_node_that_srun_gives_by_its_number_is_found_in_slurms_order() -> None:
    line = "srun: error: Aborting, io error and missing step on node 1\n"
    assert parse_srun_line(line, ["node10", "node10", "node9", "node11"]) == NodeFailed("node10")


@pytest.mark.parametrize(
    ("line", "event"),
    [
        (
            "srun: error: task 2 launch failed: Slurmd could not connect IO",
            LaunchFailed((2,), "node9", "Slurmd could not connect IO"),
        ),
        (
            "srun: error: Task launch for StepId=3.0 failed on node node10: Communication connection failure",
            LaunchFailed((0, 1), "node10", "Communication connection failure"),
        ),
        (
            "srun: error: Unable to create step for job 3: Requested node configuration is not available",
            LaunchFailed((), None, "Unable to create step for job 3: Requested node configuration is not available"),
        ),
    ],
)
def test_ranks_that_srun_could_not_start_are_named_with_their_node(line: str, event: LaunchFailed) -> None:
    """As Slurm 22.05 prints them. With the first line, srun's exit code is 0."""
    assert parse_srun_line(line + "\n", ["node10", "node10", "node9", "node11"]) == event


#: As a shell prints it whose job is over.
OVER = "srun: error: Unable to confirm allocation for job 3: Invalid job id specified"


def test_a_step_of_a_job_that_is_over_is_refused_and_no_node_is_at_fault() -> None:
    failed = parse_srun_line(OVER, ["node1"])
    assert isinstance(failed, LaunchFailed)
    assert failed.advice == "the job is over: submit another one"


REFUSED = "srun: error: Unable to create step for job 3: Memory required by task is not available"


def srun_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits, times: int
) -> Path:
    """Put an srun on the path whose step is refused ``times`` times, and then runs.

    Returns the file in which it counts its starts.
    """
    starts = tmp_path / "starts"
    script = f"""#!/bin/sh
echo x >> {starts}
[ $(wc -l < {starts}) -gt {times} ] && exit 0
echo '{REFUSED}' >&2
exit 1
"""
    (tmp_path / "srun").write_text(script)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    change_limits(retry_every_s=0.05)
    return starts


def started(tmp_path: Path) -> tuple[Srun, SimpleQueue[Any]]:
    """Start an srun and wait for it in a thread. The queue gets its events, and its exit code at the end."""
    said: SimpleQueue[Any] = SimpleQueue()
    plan = SrunStep(command=["true"], hosts=["node1"], cpus_per_task=1, output=None)
    srun = Srun(plan, dict(os.environ), tmp_path / "hosts")
    threading.Thread(target=lambda: said.put(srun.wait(said.put)), daemon=True).start()
    return srun, said


def test_a_step_refused_until_the_end_of_an_earlier_one_is_known_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    """The controller was away while the checks of the nodes ended. It still counts their memory."""
    starts = srun_that_is_refused(tmp_path, monkeypatch, change_limits, times=3)
    _, said = started(tmp_path)
    assert said.get(timeout=TIMEOUT_S) == 0
    assert starts.read_text().count("x") == 4


def test_a_step_that_is_refused_for_good_has_failed_to_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    srun_that_is_refused(tmp_path, monkeypatch, change_limits, times=10**6)
    change_limits(give_up_after_s=0.3)
    _, said = started(tmp_path)
    assert said.get(timeout=TIMEOUT_S) == LaunchFailed((), None, REFUSED.removeprefix("srun: error: "))
    assert said.get(timeout=TIMEOUT_S) == 1


def test_a_step_that_is_refused_is_not_started_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    starts = srun_that_is_refused(tmp_path, monkeypatch, change_limits, times=10**6)
    change_limits(retry_every_s=3600.0)
    srun, said = started(tmp_path)
    await_true(lambda: srun._process.poll() is not None)
    srun.given_up.set()
    assert isinstance(said.get(timeout=TIMEOUT_S), LaunchFailed)
    assert said.get(timeout=TIMEOUT_S) == 1
    assert starts.read_text().count("x") == 1


def test_a_step_with_more_gpus_than_other_nodes_is_started_on_each_node_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm 22.05 refuses it by ``--gres``. Later versions let the other option wait for ever, so it comes second."""
    calls = tmp_path / "calls"
    words = "Unable to create step for job 1: Invalid generic resource (gres) specification"
    (tmp_path / "srun").write_text(
        f"""#!/bin/sh
echo $(cat $SLURM_HOSTFILE): "$@" | grep -oE '^[^:]*:|--(gres|gpus)=[^ ]*' | xargs >> {calls}
case "$*" in *--gres=gpu:4*) echo 'srun: error: {words}' >&2; exit 1 ;; esac
"""
    )
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    allocation = Allocation(("node1", "node2", "node3"), (1, 1, 1), 1, (4, 4, 2), job_id="1")
    failed: SimpleQueue[tuple[list[str], str]] = SimpleQueue()

    def note(hosts: Collection[str], why: str, *, is_certain: bool = True) -> None:
        failed.put((list(hosts), why))

    agents = SrunAgents(rundir.create("test", tmp_path / "runs"), allocation)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        agents.start(allocation.hosts, Endpoint(listening, "", b"", tmp_path / "key"), dict(os.environ), note)
        ended = [failed.get(timeout=TIMEOUT_S) for _ in range(3)]
    # Of the refusal itself nothing is told: what each agent's own srun says comes next.
    assert sorted(ended) == [([host], "the agents' srun ended with exit code 0") for host in allocation.hosts]
    assert sorted(calls.read_text().splitlines()) == [
        "node1 node2: --gres=gpu:4",
        "node1: --gpus=4",
        "node2: --gpus=4",
        "node3: --gres=gpu:2",
    ]


def test_agents_of_each_component_have_its_threads_and_no_gpus_of_the_batch_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm sets CUDA_VISIBLE_DEVICES where a step has GPUs. To a node that has none at all srun would hand ours."""
    (tmp_path / "srun").write_text(
        f"""#!/bin/sh
echo $(cat $SLURM_HOSTFILE) $OMP_NUM_THREADS ${{CUDA_VISIBLE_DEVICES:-none}} >> {tmp_path}/calls
echo "$@" | grep -oE '[-]-(gres|het-group)=[^ ]*' | xargs >> {tmp_path}/calls-$SLURM_JOB_ID
"""
    )
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    allocation = Allocation(("node1", "node2", "node3"), (1, 1, 1), 2, (4, 0, 0), job_id="1")
    allocation = replace(allocation, task_cpus=(8, 2, 2), components=(0, 1, 1))
    failed: SimpleQueue[str] = SimpleQueue()
    agents = SrunAgents(rundir.create("test", tmp_path / "runs"), allocation)
    environ = {**os.environ, "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_JOB_ID": "1"}
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        endpoint = Endpoint(listening, "", b"", tmp_path / "key")
        agents.start(allocation.hosts, endpoint, environ, lambda hosts, why, *, is_certain=True: failed.put(why))
        for _ in range(2):
            failed.get(timeout=TIMEOUT_S)
    assert sorted((tmp_path / "calls").read_text().splitlines()) == ["node1 8 none", "node2 node3 2 none"]
    assert sorted((tmp_path / "calls-1").read_text().splitlines()) == [
        "--gres=gpu:4 --het-group=0",
        "--gres=none --het-group=1",
    ]


def test_a_line_of_srun_that_is_no_text_does_not_hide_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, such a line ended the listening thread. The wait for the step then never ended."""
    (tmp_path / "srun").write_text("#!/bin/sh\nprintf 'no \\377 text\\n' >&2; exit 3\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    _, said = started(tmp_path)
    assert said.get(timeout=TIMEOUT_S) == 3


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def await_true(condition: Any) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_bound_process_dies_with_its_parent_however_that_dies(tmp_path: Path) -> None:
    """The parent starts a sleeper that is bound to it, and prints its pid. Then the parent is killed with SIGKILL."""
    code = (
        "import subprocess, signal, time\n"
        "from toolkit.nodes.start.children import with_death_signal\n"
        "child = subprocess.Popen(with_death_signal(['sleep', '600'], signal.SIGKILL), start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        # it calls prctl before it becomes `sleep`: until then it would notice by itself
        await_true(lambda: b"sleep" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0])
        parent.kill()
    await_true(lambda: gone(child))


def test_a_bound_process_whose_parent_is_already_dead_starts_nothing() -> None:
    command = with_death_signal(["true"], signal.SIGKILL)
    command[4] = "1"  # the pid that was our parent's
    assert subprocess.run(command).returncode == 1


def test_a_process_that_ignores_signals_survives_what_slurm_sends_to_all() -> None:
    with subprocess.Popen(with_death_signal(["sleep", "600"], signal.SIGKILL, ignore_signals=True)) as child:
        await_true(lambda: b"sleep" in Path(f"/proc/{child.pid}/cmdline").read_bytes().split(b"\0")[0])
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
            child.send_signal(number)
        child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL


def test_a_command_that_is_not_there_is_named() -> None:
    done = subprocess.run(with_death_signal(["no-such-program"], signal.SIGKILL), capture_output=True, text=True)
    assert "no-such-program: cannot be started" in done.stderr
