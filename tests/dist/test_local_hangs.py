"""Ranks that hang, on this machine: the one that is behind is named.

The run completes with the undisturbed result.
"""

import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import hangs
from tests.dist.test_local_runs import END_S, TOOLKIT, ranks, reached, the_run
from tests.waiting import PATIENCE, nobody_left, wait_for
from toolkit.files.run_files import RunResult
from toolkit.files.rundir import RANK_VARIABLE, RunDir
from toolkit.plugins.node_watch.silent_scripts import RankProcesses, SilentRankDetector

pytestmark = [pytest.mark.dist, pytest.mark.sample(1)]

#: Half of it is the bound, 0.8 of it until the first step has ended: three imports of torch on two busy cores.
TIMEOUT_S = 60


def start(env: dict[str, str], folder: Path, kind: str, *overrides: str, pause_s: float = 0.0) -> subprocess.Popen[str]:
    """Submit the job that hangs in this way."""
    hangs.write_project(folder, kind, pause_s)
    argv = [*TOOLKIT, "submit", "hangs.yaml", "--executor", "local", "--wait", f"dist.timeout_s={TIMEOUT_S}"]
    return subprocess.Popen([*argv, *overrides], cwd=folder, env=env, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """The result of the same run in which nothing hangs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    env = {**os.environ, "TOOLKIT_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1"}
    with start(env, folder, "none") as process:
        assert process.wait(PATIENCE * END_S) == 0
    result = the_run(env).result()
    assert result is not None
    return result


def hangs_itself(env: dict[str, str], run: RunDir) -> int:
    """The job does it; which rank it was."""
    wait_for(lambda: list(run.path.glob("hung-*")), END_S, "a rank that hangs")
    return hangs.hung_rank(run.path)


def is_stopped(env: dict[str, str], run: RunDir) -> int:
    reached(run, 100)  # by then each rank has reported
    os.kill(ranks(env)[1], signal.SIGSTOP)
    return 1


#: What hangs, how, and what is said about it.
STORIES: dict[str, tuple[str, list[str], Callable[[dict[str, str], RunDir], int], str]] = {
    "endless loader": ("sample", [], hangs_itself, "waiting for data"),
    "deadlocked worker": ("sample", ["data.workers=1"], hangs_itself, "waiting for data"),
    "collective never entered": ("collective", [], hangs_itself, "in a step"),
    "stopped": (
        "none",
        ["train.max_steps=600", "train.epochs=100"],
        is_stopped,
        "does not answer (stopped, or its node is gone)",
    ),
}


@pytest.mark.parametrize(
    "story", [pytest.param(name, marks=[] if name == "stopped" else pytest.mark.soak) for name in STORIES]
)
def test_the_rank_that_is_behind_is_named_and_the_run_completes(
    env: dict[str, str], tmp_path: Path, undisturbed: RunResult, story: str
) -> None:
    kind, overrides, act, doing = STORIES[story]
    with start(env, tmp_path, kind, *overrides) as process:
        run = the_run(env)
        rank = act(env, run)
        out, _ = process.communicate(timeout=PATIENCE * END_S)
    assert process.returncode == 0, out
    hung, after = run.attempts()
    assert (hung.cause, hung.decision, after.cause) == ("hang", "restart", "completed")
    named = hung.first_failure
    assert (named.rank, named.host) == (rank, hung.nodes[0])
    # The stopped rank stands anywhere: after a step that is logged the others gather its losses. It may have sent its
    # part of the call before to one of the two.
    others = "2 others in all_reduce"
    if story == "stopped":
        others = "(?:2 others in all_(?:reduce|gather_single)|1 other in all_reduce, 1 in all_gather_single)"
    told = re.fullmatch(rf"{re.escape(doing)}(?: \(hangs\.py:\d+\))?, (\d+) s; {others}", named.how)
    assert told is not None, named
    assert int(told[1]) >= TIMEOUT_S / 2
    why = subprocess.run([*TOOLKIT, "why", run.id, "--all"], env=env, capture_output=True, text=True, check=True).stdout
    assert f"rank {rank} on {named.host}, attempt 1: {named.how}" in why
    assert ("in hang_for_ever" in why) == (story != "stopped")
    assert ("the stack of its data worker 0" in why) == (story == "deadlocked worker")
    assert recorded(run, 0)["entries"]
    # The story of the stopped rank has more steps than the undisturbed run.
    if kind != "none":
        assert run.result().metrics == undisturbed.metrics
    wait_for(lambda: nobody_left(env), 10, "no process of the run")


#: Rank 0 makes a call alone. The others continue, and wait for it in the next step or where an epoch begins.
ALONE = """
import torch, toolkit
from torch import nn
run = toolkit.start()
model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
run.resumable(model=model)
"""
IN_A_STEP = """
for _ in run.steps(range(40), total=40):
    model(torch.ones(8, 4)).sum().backward()
    if run.rank == 0 and run.step == 5:
        torch.distributed.barrier()
"""
BETWEEN_EPOCHS = """
for epoch in run.epochs(2):
    for _ in run.steps(range(6)):
        model(torch.ones(8, 4)).sum().backward()
    if run.rank == 0:
        torch.distributed.barrier()
"""


@pytest.mark.parametrize(
    ("loop", "named"),
    [
        (
            IN_A_STEP,
            r"in barrier \(train.py:11\), \d+ s; 2 others in \w+ \(train.py:9\); "
            r"collective \d+ was barrier \(train.py:11\) on rank 0, and \w+ \(train.py:9\) on rank 1",
        ),
        (BETWEEN_EPOCHS, r"in barrier \(train.py:12\), \d+ s; 2 others waiting for the others \(train.py:8\)"),
    ],
    ids=["step", "epoch"],
)
def test_a_call_that_one_rank_makes_alone_is_named_with_its_rank_and_line(
    env: dict[str, str], tmp_path: Path, loop: str, named: str
) -> None:
    (tmp_path / "train.py").write_text(ALONE + loop)
    argv = [*TOOLKIT, "submit", "train.py", "--executor", "local", "--wait", "cluster.tasks_per_node=3"]
    argv += ["dist.timeout_s=40", "retry.max_failures=0"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE * END_S)
    assert done.returncode == 1, done.stderr
    (hung,) = the_run(env).attempts()
    assert (hung.cause, hung.first_failure.rank) == ("hang", 0)
    assert re.fullmatch(named, hung.first_failure.how), hung.first_failure


#: Knows nothing of the toolkit. Rank 1 hangs in the first attempt, and rank 0 waits for it in a barrier of gloo.
SCRIPT = """
import os, sys, threading, time
from pathlib import Path
import torch.distributed as dist

def hang_for_ever():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

dist.init_process_group("gloo")
if dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    hang_for_ever()
dist.barrier()
dist.destroy_process_group()
"""
#: Half of it is the bound. Ranks are silent while they wait for their store, which imports torch at the same time.
SILENCE_S = 14


#: Would continue to its next line once the script has ended.
SHELL = f'{sys.executable} train.py; code=$?; touch "ended-$TOOLKIT_ATTEMPT"; exit $code'


@pytest.mark.parametrize("command", [["sh", "-c", SHELL], [sys.executable, "train.py"]], ids=["shell", "fork"])
def test_a_script_that_knows_nothing_of_us_and_is_silent_is_started_again(
    env: dict[str, str], tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = [
        "--executor",
        "local",
        "--wait",
        "cluster.tasks_per_node=2",
        f"dist.timeout_s={SILENCE_S}",
        "name=script",
    ]
    argv = [*TOOLKIT, "exec", *options, "--", *command]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE * END_S)
    assert done.returncode == 0, done.stderr
    run = the_run(env)
    hung, after = run.attempts()
    assert (hung.cause, hung.decision, after.cause) == ("hang", "restart", "completed")
    named = hung.first_failure
    assert (named.rank, named.host) == (1, hung.nodes[0])
    assert re.fullmatch(r"silent \(train\.py:9\), \d+ s; 1 other in barrier \(train\.py:14\)", named.how), named
    page = subprocess.run(
        [*TOOLKIT, "why", run.id, "--all"], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert f"rank 1 on {named.host}, attempt 1: {named.how}" in page
    assert "in hang_for_ever" in page
    # The shell of the hung attempt must die as well, before it continues to its next line.
    assert [path.name for path in tmp_path.glob("ended-*")] == (["ended-2"] if command[0] == "sh" else [])
    wait_for(lambda: nobody_left(env), 10, "no process of the run")


#: Scripts that are alive and show it in one way each, and one that does not.
ALIVE = {
    "computes": "while True: sum(range(100000))",
    "sleeps and prints": "while True: time.sleep(1); print('.', flush=True)",
    "sleeps and writes": "while True: time.sleep(1); Path(sys.argv[1], 'file').write_text('x')",
    "waits for a child": "subprocess.run([sys.executable, '-c', 'while True: sum(range(100000))'])",
    "starts programs": "while True: time.sleep(1); subprocess.run(['true'])",
    "is silent": "time.sleep(600)",
}


def test_scripts_that_show_that_they_live_are_not_taken_for_dead(tmp_path: Path) -> None:
    """Each is watched as a run of its own, so that none hides another. The watch ends with the silent one."""
    watches: dict[str, SilentRankDetector] = {}
    processes = []
    try:
        for number, (name, code) in enumerate(ALIVE.items()):
            run = RunDir(tmp_path / str(number))
            run.path.mkdir()
            # The watch finds the processes of a run by this variable.
            marked = {**os.environ, RANK_VARIABLE: run.rank_tag(1, 0)}
            argv = [
                sys.executable,
                "-S",
                "-c",
                f"import subprocess, sys, time\nfrom pathlib import Path\n{code}",
                str(run.path),
            ]
            processes.append(subprocess.Popen(argv, env=marked, stdout=subprocess.DEVNULL, start_new_session=True))
            watches[name] = SilentRankDetector(RankProcesses(run, 1), 5.0, lambda: False)
        silent: set[str] = set()

        def silent_is_found() -> bool:
            for name, watch in watches.items():
                silent.update(name for news in watch.look() if news["state"] == "silent")
            return "is silent" in silent

        wait_for(silent_is_found, PATIENCE * END_S, "the silent one")
        assert silent == {"is silent"}
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def recorded(run: RunDir, rank: int) -> dict[str, Any]:
    """What torch's flight recorder has seen on a rank."""
    content: dict[str, Any] = pickle.loads((run.attempt_logs(1) / f"flight-{rank}").read_bytes())
    return content


@pytest.mark.soak
def test_what_is_slow_but_moves_is_not_taken_for_a_hang(env: dict[str, str], tmp_path: Path) -> None:
    """An evaluation is longer than the bound on all ranks, a save on rank 0."""
    overrides = ["train.max_steps=10", "train.eval_every=10", "checkpoint.every_steps=10"]
    with start(env, tmp_path, "slow", *overrides, pause_s=TIMEOUT_S / 2 / 6) as process:
        out, _ = process.communicate(timeout=PATIENCE * 2 * END_S)
    assert process.returncode == 0, out
    run = the_run(env)
    (attempt,) = run.attempts()
    assert attempt.cause == "completed"
    assert run.status().progress.save_s > TIMEOUT_S / 2
