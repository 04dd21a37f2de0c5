"""What a run leaves where others may look: secrets are planted, and every file, command line and variable searched."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE
from toolkit import rundir

pytestmark = pytest.mark.dist

SECRET = "hunter2-correct-horse"
TOOLKIT = [sys.executable, "-m", "toolkit"]
#: Trains, and notes what any user of the node could see meanwhile.
JOB = """
import os, pathlib
from jobs.classify import Classify

def main(config):
    run = pathlib.Path(os.environ["TOOLKIT_RUN_DIR"])
    with (run / "command-lines").open("wb") as file:
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                file.write(path.read_bytes())
            except OSError:
                pass
    (run / "variables").write_text("\\n".join(f"{name}={value}" for name, value in os.environ.items()))
    Classify.main(config, None)
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
