"""`toolkit shell` without Slurm, in real processes; and what it asks Slurm for."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import Command
from toolkit import config as configs
from toolkit.cli import shell_environment
from toolkit.files import rundir

SHELL = [sys.executable, "-m", "toolkit", "shell"]
LOOK = "import mine, os; print(mine.__file__, os.getcwd(), os.environ['FROM_SETUP'], os.environ['OMP_NUM_THREADS'])"


@pytest.fixture
def run(tmp_path: Path) -> rundir.RunDir:
    """Make a run with a copy of its sources, whose project has changed since."""
    project = tmp_path / "project"
    run = rundir.create("gpt")
    for folder in (project, run.path / ".code/1"):
        folder.mkdir(parents=True)
        (folder / "mine.py").write_text("")
    (project / "mine.py").write_text("raise SystemExit('of the project')")
    (run.path / ".code/1/SNAPSHOT.json").write_text(f'{{"project": "{project}"}}')
    rundir.link_code(run.path, "1")
    setup = "[\"export FROM_SETUP='a b'\"]"
    run.config.write_text(f"name: gpt\njob: mine\ncluster: {{cpus_per_task: 3, spare_nodes: 1, setup: {setup}}}\n")
    return run


def said(*words: str, code: int = 0, **env: str) -> str:
    done = subprocess.run(
        [*SHELL, *words],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def test_a_command_finds_the_runs_sources_folder_and_variables(run: rundir.RunDir, tmp_path: Path) -> None:
    shown = said(run.id, "--executor", "local", "--", "python", "-c", LOOK)
    assert f"{run.path}/.code/now/mine.py {tmp_path}/project a b 3\n" in shown
    assert "which is not touched" in shown
    assert said("gpt", "--executor", "local", "--", "sh", "-c", "exit 7", code=7)


def test_inside_a_job_it_is_right_here(run: rundir.RunDir) -> None:
    assert " a b 3\n" in said(
        "gpt", "--", "python", "-c", LOOK, SLURM_JOB_ID="7", PATH=f"/nothing:{os.environ['PATH']}"
    )


def test_a_script_keeps_its_own_path(run: rundir.RunDir) -> None:
    run.config.write_text(f"name: gpt\njob: {configs.SCRIPT_JOB}\nargv: [python, train.py, --epochs, '3']\n")
    shown = said("gpt", "--executor", "local", "--", "env", PYTHONPATH="/mine")
    assert "\nPYTHONPATH=/mine\n" in f"\n{shown}"
    assert "PYTHONSAFEPATH" not in shown
    assert "command: python train.py --epochs 3" in shown


@pytest.mark.skipif(shutil.which("script") is None, reason="script(1) makes the terminal")
def test_a_terminal_gets_a_shell_that_says_whose_it_is(run: rundir.RunDir, tmp_path: Path) -> None:
    environ = {**os.environ, "HOME": str(tmp_path), "TERM": "dumb", "SLURM_JOB_ID": "7"}
    (tmp_path / ".bashrc").write_text("export FROM_SETUP=mine OF_BASHRC=1\n")
    done = subprocess.run(
        ["script", "-qec", shlex.join([*SHELL, run.id]), "/dev/null"],
        input="echo got:$FROM_SETUP:$OF_BASHRC:$PWD:$PS1:; exit 5\n",
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 5, done.stdout
    assert f"got:a b:1:{tmp_path}/project:(gpt {run.id[-8:]}) " in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["gpt"], "this is not a terminal; `toolkit shell RUN -- CMD`"),
        (["nosuch", "--", "true"], "nosuch"),
        (["nosuch.yaml", "--", "true"], "there is no nosuch.yaml here"),
        (["gpt", "cluster.nods=2", "--", "true"], "did you mean"),
        (["gpt", "--executor", "debug", "--", "true"], "valid: slurm, local"),
    ],
)
def test_what_it_cannot_do_is_refused(
    run: rundir.RunDir,
    words: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    command: Command,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert says in command.refuses("shell", *words)


def test_slurm_is_asked_for_what_the_job_had_without_what_only_a_script_has(run: rundir.RunDir) -> None:
    options = shell_environment.environment_of(
        "gpt", ["cluster.nodes=2", "cluster.time_min=9", "cluster.extra={comment: a b}"]
    ).options()
    assert {"--nodes=2", "--time=9", "--cpus-per-task=3", "--comment=a b", "--job-name=gpt"} <= {*options}
    names = {option.partition("=")[0] for option in options}
    assert not {"--output", "--signal", "--open-mode", "--error"} & names
    parts = "cluster.components=[{nodes: 1}, {nodes: 2, partition: gpu}]"
    first, second = " ".join(shell_environment.environment_of("gpt", ["cluster.spare_nodes=0", parts]).options()).split(
        " : "
    )
    assert "--nodes=1" in first
    assert "--nodes=2" in second
    assert "--partition=gpu" in second
