"""Traces of a run's secrets where others may look.

Secrets are planted, and every file, command line and variable is searched.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE
from toolkit.files import rundir

pytestmark = [pytest.mark.dist, pytest.mark.sample(1)]

SECRET = "hunter2-correct-horse"
TOOLKIT = [sys.executable, "-m", "toolkit"]
#: Trains, and notes what any user of the node could see meanwhile.
JOB = """
import os, pathlib
from jobs.classify import Classify, Params

def main(config):
    run = pathlib.Path(os.environ["TOOLKIT_RUN_DIR"])
    with (run / "command-lines").open("wb") as file:
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                file.write(path.read_bytes())
            except OSError:
                pass
    (run / "variables").write_text("\\n".join(f"{name}={value}" for name, value in os.environ.items()))
    Classify.main(config, Params())
"""
CONFIG = "job: own.look\ncluster: {tasks_per_node: 1}\ntrain: {max_steps: 4}\ncheckpoint: {every_steps: 2}\n"
FILES = [".env", ".netrc", ".ssh/id_ed25519", ".aws/credentials", "deploy.key", "own/kaggle.json"]


def test_no_planted_secret_is_in_any_file_command_line_or_variable_of_ours(tmp_path: Path) -> None:
    """Under the most open umask; and all that was written is its owner's alone."""
    project, planted = tmp_path / "project", {"WANDB_API_KEY": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET}
    for name in FILES:
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(SECRET)
    (project / "own/__init__.py").write_text("")
    (project / "own/look.py").write_text(JOB)
    (project / "look.yaml").write_text(CONFIG)
    environ = {**os.environ, **planted, "TOOLKIT_RUNS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    argv = [*TOOLKIT, "submit", "look.yaml", "--executor", "local", "--wait"]
    done = subprocess.run(
        argv, cwd=project, env=environ, umask=0, timeout=PATIENCE * 120, capture_output=True, text=True
    )
    (run,) = rundir.all_runs(tmp_path / "runs")
    assert run.result().state == "completed", done.stdout + done.stderr
    assert list(run.tensorboard.glob("*tfevents*"))

    allowed = {f"{name}={SECRET}" for name in planted}  # the user's own variables reach the job, as everywhere
    lines = [line for line in (run.path / "variables").read_text().splitlines() if SECRET in line]
    assert set(lines) == allowed
    (run.path / "variables").unlink()
    everything = [path for path in (tmp_path / "runs").rglob("*") if not path.is_symlink()]
    holders = [path for path in everything if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert holders == []
    assert SECRET not in done.stdout + done.stderr
    modes = {path: path.stat().st_mode & 0o777 for path in everything}
    assert {str(path): oct(mode) for path, mode in modes.items() if mode & 0o077} == {}
    assert b"toolkit" in (run.path / "command-lines").read_bytes()


#: Trains with the secrets, prints both, and fails with one in its error. Notes the processes that show it.
LEAKING_JOB = """
import json, os, pathlib
from jobs.classify import Classify, Params

def main(config):
    token = os.environ["API_TOKEN"]
    run, holders = pathlib.Path(os.environ["TOOLKIT_RUN_DIR"]), []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (process / "environ").read_bytes() + (process / "cmdline").read_bytes():
                holders.append((process / "cmdline").read_text())
        except OSError:
            pass
    print("printed", token, os.environ["WANDB_API_KEY"], flush=True)
    (run / "seen.json").write_text(json.dumps([len(token), len(os.environ["WANDB_API_KEY"]), holders]))
    Classify.main(config, Params())
    raise RuntimeError(f"401 Unauthorized for {token}")
"""


def test_ranks_alone_read_secrets_and_mask_them_in_output_and_errors(tmp_path: Path) -> None:
    project, token = tmp_path / "project", tmp_path / "token"
    (project / "own").mkdir(parents=True)
    (project / "own/__init__.py").write_text("")
    (project / "own/look.py").write_text(LEAKING_JOB)
    secrets = f"secrets: {{API_TOKEN: {token}, WANDB_API_KEY: env}}\nretry: {{max_failures: 0}}\n"
    (project / "look.yaml").write_text(CONFIG.replace("tasks_per_node: 1", "tasks_per_node: 2") + secrets)
    runs, in_shell = tmp_path / "runs", "key-of-the-shell"
    environ = {**os.environ, "WANDB_API_KEY": in_shell, "TOOLKIT_RUNS": str(runs), "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    output = []

    def toolkit(*argv: str) -> int:
        argv = (*TOOLKIT, *argv)
        done = subprocess.run(
            argv, cwd=project, env=environ, timeout=PATIENCE * 120, capture_output=True, text=True, check=False
        )
        output.append(done.stdout + done.stderr)
        return done.returncode

    submit = ("submit", "look.yaml", "--executor", "local")
    assert toolkit(*submit) == 2  # the file is missing
    assert "secrets.API_TOKEN" in output[-1]
    token.write_text(SECRET)
    token.chmod(0o600)
    assert toolkit(*submit, "--dry-run") == 0
    assert toolkit(*submit, "--wait") == 1
    (run,) = rundir.all_runs(runs)
    for command in (["why"], ["why", "--json"], ["status"], ["logs", "--rank", "0"]):
        toolkit(*command, run.id)
    lengths_and_holders = (run.path / "seen.json").read_text()
    assert lengths_and_holders == f"[{len(SECRET)}, {len(in_shell)}, []]"
    assert "printed [secret API_TOKEN] [secret WANDB_API_KEY]" in output[-1]
    assert "401 Unauthorized for [secret API_TOKEN]" in output[3]
    values = (SECRET, in_shell)
    assert [text for text in output if any(value in text for value in values)] == []
    files = [path for path in runs.rglob("*") if path.is_file()]
    holders = [path for path in files if any(value.encode() in path.read_bytes() for value in values)]
    assert holders == []
    assert list(run.tensorboard.glob("*tfevents*"))
