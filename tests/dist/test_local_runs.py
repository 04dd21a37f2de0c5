"""The whole lifecycle on this machine: submit, crash, Ctrl-C, a killed supervisor, resume. Nothing is left behind."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.waiting import PATIENCE, nobody_left, processes_with, wait_for
from toolkit.checkpoint.folder import newest_step
from toolkit.files import rundir
from toolkit.files.run_files import FirstFailure, RunStatus
from toolkit.files.rundir import RunDir

pytestmark = [pytest.mark.dist, pytest.mark.sample(1)]

ROOT = Path(__file__).parents[2]
TOOLKIT = [sys.executable, "-m", "toolkit"]
START_S = 60
END_S = 120
SHORT = ["train.max_steps=60", "checkpoint.every_steps=20"]
#: Long enough to be interrupted: 45,000 steps take minutes.
LONG = ["train.epochs=2000", "checkpoint.every_steps=20"]


def start(env: dict[str, str], *overrides: str) -> subprocess.Popen[str]:
    argv = [*TOOLKIT, "submit", "configs/digits_ddp.yaml", "--executor", "local", "--follow", *overrides]
    return subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)


def toolkit(env: dict[str, str], *words: str, cwd: Path = ROOT) -> tuple[int, str]:
    """Return exit code and output of a command. It is read to the end of its pipe."""
    argv = [*TOOLKIT, *words]
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE * END_S)
    return done.returncode, done.stdout + done.stderr


def the_run(env: dict[str, str]) -> RunDir:
    def only() -> RunDir | None:
        runs = rundir.all_runs(Path(env["TOOLKIT_RUNS"]))
        return runs[0] if runs else None

    return wait_for(only, START_S, "a run folder")


def reached(run: RunDir, step: int) -> RunStatus:
    """The status once the run has passed ``step``."""

    def passed() -> RunStatus | None:
        status = run.status()
        return status if (status.progress.step or 0) >= step else None

    return wait_for(passed, START_S, f"step {step}")


def ranks(env: dict[str, str]) -> dict[int, int]:
    """pid by rank, of the ranks that run."""
    found = {}
    for pid, command in processes_with(f"TOOLKIT_RUNS={env['TOOLKIT_RUNS']}").items():
        if "toolkit run" in command:
            environ = dict(p.split("=", 1) for p in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in p)
            found[int(environ["RANK"])] = pid
    return found


def test_a_run_that_is_cancelled_in_its_first_moment_never_trains(env: dict[str, str]) -> None:
    code = "from toolkit import submit; submit('configs/digits_ddp.yaml', executor='local').cancel()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True)
    run = the_run(env)
    assert wait_for(run.result, END_S, "a result").state == "cancelled"
    assert [attempt.step_end for attempt in run.attempts()] in ([], [None])


def test_a_killed_rank_ends_the_attempt_and_the_next_one_resumes(env: dict[str, str]) -> None:
    with start(env, "train.epochs=120", "checkpoint.every_steps=20") as process:
        run = the_run(env)
        reached(run, 40)
        os.kill(ranks(env)[1], signal.SIGKILL)
        out, _ = process.communicate(timeout=PATIENCE * END_S)
    assert process.returncode == 0, out
    first, second = run.attempts()
    assert (first.cause, first.decision) == ("crashed", "restart")
    assert first.first_failure == FirstFailure(1, first.nodes[0], "killed by SIGKILL")
    assert (second.cause, second.decision) == ("completed", "finish")
    assert second.step_start >= 20
    assert second.step_start % 20 == 0
    result = run.result()
    assert (result.state, result.attempts, result.step) == ("completed", 2, 2695)
    # The killed attempt logged steps beyond its checkpoint, and the curve has none of them twice.
    steps = [json.loads(line)["step"] for line in (run.tensorboard / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps))


def test_ctrl_c_ends_everything_and_says_how_to_go_on(env: dict[str, str]) -> None:
    with start(env, *LONG) as process:
        run = the_run(env)
        reached(run, 40)
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does
        out, _ = process.communicate(timeout=START_S)
    assert process.returncode == 75
    assert f"toolkit resume {run.id}" in out
    (attempt,) = run.attempts()
    assert (attempt.cause, attempt.decision) == ("stopped", "finish")
    assert newest_step(run.checkpoints) == attempt.step_end


def test_a_resumed_run_continues_from_its_checkpoint_to_the_undisturbed_result(env: dict[str, str]) -> None:
    with start(env, "train.epochs=150", "checkpoint.every_steps=20") as process:
        run = the_run(env)
        reached(run, 40)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=START_S)
    assert run.result() is not None
    code, out = toolkit(env, "resume", run.id, "--wait")
    assert code == 0, out
    # The run's own config is that of the undisturbed one.
    code, out = toolkit(env, "submit", str(run.config), "--executor", "local", "--wait", "name=undisturbed")
    assert code == 0, out
    undisturbed = rundir.find("undisturbed", Path(env["TOOLKIT_RUNS"]))
    first, second = run.attempts()
    assert second.step_start == first.step_end
    ours, theirs = run.result(), undisturbed.result()
    assert (ours.step, ours.metrics) == (theirs.step, theirs.metrics)


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(env: dict[str, str]) -> None:
    with start(env, *LONG) as process:
        run = the_run(env)
        reached(run, 40)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=START_S)
    saved = newest_step(run.checkpoints)
    metrics = (run.tensorboard / "metrics.jsonl").read_bytes()
    away = run.checkpoints.rename(run.path / "away")
    run.checkpoints.mkdir(0o700)
    code, out = toolkit(env, "resume", run.id, f"train.max_steps={saved + 20}")
    assert code == 0, out
    log = run.rank_log(2, 0)
    wait_for(lambda: log.exists() and "has no checkpoint, but had one before" in log.read_text(), START_S, "the wait")
    assert (run.tensorboard / "metrics.jsonl").read_bytes() == metrics
    run.checkpoints.rmdir()
    away.rename(run.checkpoints)
    assert wait_for(run.result, END_S, "a result").state == "completed"
    assert [attempt.step_start for attempt in run.attempts()] == [0, saved]


def test_nothing_outlives_a_supervisor_killed_with_sigkill(env: dict[str, str]) -> None:
    with start(env, *LONG) as process:
        run = the_run(env)
        status = reached(run, 20)
        os.kill(status.pid, signal.SIGKILL)
        out, _ = process.communicate(timeout=START_S)
    assert process.returncode == 1
    assert "wrote no result" in out


def test_a_run_cancelled_from_elsewhere_ends_for_the_one_who_waits(env: dict[str, str]) -> None:
    with start(env, *LONG) as process:
        run = the_run(env)
        reached(run, 20)
        assert toolkit(env, "cancel", run.id)[0] == 0
        process.communicate(timeout=START_S)
    assert process.returncode == 1
    assert run.result().state == "cancelled"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the run gets its GPUs here")
def test_gpus_that_are_not_there_end_the_run_before_it_trains(env: dict[str, str]) -> None:
    """Before, it trained on the CPU and completed."""
    env["CUDA_VISIBLE_DEVICES"] = ""
    asked = ["cluster.tasks_per_node=2", "cluster.gpus_per_node=2"]
    assert toolkit(env, "submit", "configs/digits_ddp.yaml", "--executor", "local", "--wait", *SHORT, *asked)[0] == 1
    (only,) = the_run(env).attempts()
    assert (only.decision, only.step_end) == ("give_up", None)
    assert "cluster.gpus_per_node asks for 2 GPUs" in only.line
    assert "sees none on" in only.line


def test_a_job_that_always_fails_is_given_up_with_its_own_words_and_somebody_is_told(
    env: dict[str, str], tmp_path: Path
) -> None:
    project = tmp_path / "project"
    (project / "jobs").mkdir(parents=True)
    (project / "jobs/__init__.py").touch()
    (project / "jobs/broken.py").write_text("def main(config):\n    raise ValueError('no such thing')\n")
    (project / "broken.yaml").write_text(
        "job: jobs.broken\nretry: {max_failures: 1}\nnotify: {command: [sh, tell.sh]}\n"
    )
    # The command gets the result on its standard input, and may ask for the cause itself.
    (project / "tell.sh").write_text(f'cat; {sys.executable} -m toolkit why "$TOOLKIT_RUN" > told\n')
    code, out = toolkit(env, "submit", "broken.yaml", "--executor", "local", "--wait", cwd=project)
    assert code == 1
    assert "ValueError: no such thing" in out
    run = the_run(env)
    assert [line.decision for line in run.attempts()] == ["restart", "give_up"]
    wait_for(lambda: nobody_left(env), 30, "the end of the command that tells somebody")
    assert json.loads((run.logs / "notify.log").read_text()) == run.result().to_json()
    assert "ValueError: no such thing" in (project / "told").read_text()


def test_the_first_step_of_an_unchanged_script_is_told_while_it_runs(env: dict[str, str], tmp_path: Path) -> None:
    told, script = tmp_path / "told", tmp_path / "train.py"
    lines = ["import os, time", "print('step 3/900 loss 0.25')", "while not os.path.exists(TOLD): time.sleep(0.1)"]
    script.write_text("\n".join(lines).replace("TOLD", repr(str(told))))
    tell = [f"notify.command=[sh, -c, 'echo $TOOLKIT_EVENT $TOOLKIT_WHY > {told}']", "notify.when=[first_step]"]
    code, out = toolkit(env, "exec", "--executor", "local", "--wait", *tell, "--", sys.executable, str(script))
    assert code == 0, out
    assert told.read_text() == "first_step ~step 3 is made\n"


def test_the_python_door_submits_waits_and_returns_the_result(env: dict[str, str]) -> None:
    code = (
        "from toolkit import submit\n"
        f"run = submit('configs/digits_ddp.yaml', {SHORT!r}, executor='local')\n"
        "assert run.wait()['state'] == 'completed'\n"
        "print(run.result()['step'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=PATIENCE * END_S
    )
    assert done.stdout.strip() == "60", done.stderr
    run = the_run(env)
    for path in run.path.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


KILLED = """
import os, signal, sys, time
attempt, rank = os.environ["TOOLKIT_ATTEMPT"], os.environ["RANK"]
note = f"torch={'torch' in sys.modules} toolkit={'toolkit' in sys.modules} {sys.path[:2]} {os.environ['PYTHONPATH']}"
with open(f"{attempt}-{rank}.txt", "w") as file:
    print(note, file=file)
import torch.distributed as dist
dist.init_process_group("gloo")
if (attempt, rank) == ("1", "1"):
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
dist.destroy_process_group()
"""


def test_the_ranks_of_a_script_are_forked_in_every_attempt(env: dict[str, str], tmp_path: Path) -> None:
    """Also where the import path has empty entries, and one of ours before them."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").write_text(KILLED)
    words = ["exec", "--executor", "local", "--wait", "cluster.tasks_per_node=2", "--", sys.executable, "own/train.py"]
    code, out = toolkit({**env, "PYTHONPATH": f":{tmp_path}/lib"}, *words, cwd=tmp_path)
    assert code == 0, out
    assert [line.cause for line in the_run(env).attempts()] == ["crashed", "completed"]
    # Whether the restart has gained anything cannot be seen, and a reader is told so.
    remark = "a script that is started again continues only if it looks for its own checkpoint"
    for told in (out, toolkit(env, "why", the_run(env).id)[1].replace("\n", " ")):
        assert told.count(remark) == 1
    assert (the_run(env).logs / "supervisor.log").read_text().count(remark) == 1
    notes = {path.name: path.read_text() for path in tmp_path.glob("*.txt")}
    expected = f"torch=True toolkit=False {[f'{tmp_path}/own', f'{tmp_path}/lib']} {tmp_path}/lib\n"
    assert notes == dict.fromkeys(["1-0.txt", "1-1.txt", "2-0.txt", "2-1.txt"], expected)


def test_a_local_run_frees_the_pipe_hears_a_cancel_and_is_resumed_by_one_of_two(env: dict[str, str]) -> None:
    """The cancel may come before the supervisor has written down its pid. The ranks need no torch.

    The last commands name the run by another spelling of its path.
    """
    code, out = toolkit(env, "exec", "--executor", "local", "--", "sleep", "600")
    assert (code, out.count("(on this machine)")) == (0, 1)  # `$(toolkit exec ...)` returns while the run continues
    run = the_run(env)
    assert run.result() is None
    assert toolkit(env, "cancel", run.id)[0] == 0
    assert wait_for(run.result, START_S, "a result").state == "cancelled"
    assert toolkit(env, "cancel", run.id) == (0, f"run {run.id} has already ended: cancelled\n")
    wait_for(lambda: nobody_left(env), START_S, "the end of the first supervisor")
    resumes = [subprocess.Popen([*TOOLKIT, "resume", run.id], cwd=ROOT, env=env, text=True) for _ in range(2)]
    assert sorted(process.wait(START_S) for process in resumes) == [0, 2]
    wait_for(lambda: run.status().state == "starting", START_S, "the start of the ranks")
    link = run.path.parent.parent.with_name("link")
    link.symlink_to(run.path.parent.parent)
    spelling = str(link / run.name / ".." / run.name / run.id)
    code, out = toolkit(env, "resume", spelling)
    assert (code, "it can be resumed when it has ended" in out) == (2, True), out
    code, out = toolkit({**env, "TOOLKIT_RUN_DIR": spelling}, "run", "configs/digits_ddp.yaml")
    assert (code, "two would write its files" in out) == (2, True), out
    assert toolkit(env, "stop", spelling)[0] == 0
    assert wait_for(run.result, START_S, "a result").state == "stopped"
    assert [line.attempt for line in run.attempts()] == [run.status().attempt]


@pytest.mark.soak  # on Slurm the same holds for all launchers
def test_one_rank_alone_torchrun_and_torchs_minimal_environment_reach_the_same_loss(env: dict[str, str]) -> None:
    job = ["run", "configs/digits_ddp.yaml", *SHORT]
    alone = [*TOOLKIT, *job]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    torchrun += ["--rdzv-endpoint=localhost:0", "-m", "toolkit", *job]
    for argv, name in ((alone, "alone"), (torchrun, "torchrun")):
        subprocess.run([*argv, f"name={name}"], cwd=ROOT, env=env, check=True, timeout=PATIENCE * END_S)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    # Only the variables that torch's documentation asks for, from no launcher.
    minimal = {**env, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    argv = [*TOOLKIT, *job, "name=minimal"]
    ranks = [subprocess.Popen(argv, cwd=ROOT, env={**minimal, "RANK": str(rank)}) for rank in range(2)]
    assert [process.wait(PATIENCE * END_S) for process in ranks] == [0, 0]
    names = ("alone", "torchrun", "minimal")
    results = [rundir.find(name, Path(env["TOOLKIT_RUNS"])).result() for name in names]
    losses = [result.metrics["train/loss"] for result in results if result]
    assert losses == [pytest.approx(losses[0], rel=1e-5)] * 3


def test_several_launches_on_one_machine_do_not_meet(env: dict[str, str]) -> None:
    """Ports cannot collide: each supervisor binds its own before anything starts."""
    processes = [start(env, *SHORT, f"name=run{i}") for i in range(2)]
    for process in processes:
        process.communicate(timeout=PATIENCE * END_S)
        assert process.returncode == 0


def test_a_run_whose_loss_is_not_finite_is_given_up_at_once_and_everything_says_why(env: dict[str, str]) -> None:
    # Such a rate makes the loss infinite within a few steps.
    diverges = ["optim.lr=1e4", "optim.warmup_steps=0"]
    with start(env, *diverges, "train.log_every=5", "checkpoint.every_steps=4") as process:
        run = the_run(env)
        out, _ = process.communicate(timeout=PATIENCE * END_S)
    assert process.returncode == 1, out
    (attempt,) = run.attempts()
    assert (attempt.cause, attempt.decision) == ("crashed", "give_up")
    result = run.result()
    assert result.state == "failed"
    told = re.search(r"train.on_nan: the loss is not finite since step (\d+)", result.why)
    assert told, result.why
    bad = int(told[1])
    assert bad <= attempt.step_end <= bad + 10, "what two lines of the log tell apart"
    assert "would fail again unchanged" in result.why
    for command in ("status", "why"):
        assert result.why in toolkit(env, command, run.id)[1]
    newest = newest_step(run.checkpoints)
    assert newest is None or newest < bad, "no checkpoint of such weights was made"


def test_the_lines_of_the_setup_come_first_also_without_slurm(env: dict[str, str], tmp_path: Path) -> None:
    """Before, they were left out without a word. As in a batch script, one that fails does not end the others."""
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("import os\nprint(os.environ['SEEN'], oct(os.umask(0)))\n")
    setup = "cluster.setup=['export SEEN=\"a b\" PYTHONPATH=/nowhere', 'module load nothing', 'umask 027']"
    argv = [*TOOLKIT, "exec", "--executor", "local", "--wait", setup, "--", sys.executable, "train.py"]
    done = subprocess.run(
        argv, cwd=project, env=env, capture_output=True, text=True, timeout=PATIENCE * END_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert the_run(env).rank_log(1, 0).read_text().splitlines()[-1] == "a b 0o27"
