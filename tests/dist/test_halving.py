"""Successive halving of real runs on this machine, one of which dies just when it should end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_for
from toolkit.files.rundir import RunDir

pytestmark = pytest.mark.dist

END_S = 120

#: Its loss is the width. A width of 9 dies in its first attempt, once it is known that it is to end.
SCRIPT = """
import os, signal, time
from dataclasses import dataclass
from pathlib import Path
import torch
import toolkit

@dataclass
class Params:
    width: int

with toolkit.start() as run:
    width = run.config.params["width"]
    run.resumable(model=torch.nn.Linear(1, 1))
    is_doomed = width == 9 and os.environ["TOOLKIT_ATTEMPT"] == "1"
    for step in run.steps(range(60), total=60):
        time.sleep(0.1)
        if is_doomed and list(Path(os.environ["RUNGS"]).glob("rung-*/*.ended")):
            os.kill(os.getpid(), signal.SIGKILL)
        run.log(loss=float(width))
"""


def test_a_bad_run_that_dies_before_it_has_stopped_is_not_forgotten(env: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(SCRIPT)
    env = {**env, "RUNGS": f"{env['TOOLKIT_RUNS']}/.sweeps/loop"}

    def toolkit(*argv: str) -> Any:
        command = [sys.executable, "-m", "toolkit", *argv]
        return subprocess.run(command, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout

    asked = ["params.width=1,9", "--halving=2", "--metric=-train/loss", "--max-running=1", "--executor=local"]
    toolkit("sweep", "loop.py", *asked, "train.log_every=2")

    def ended() -> list[dict[str, Any]] | None:
        rows: list[dict[str, Any]] = json.loads(toolkit("sweep", "status", "loop", "--json"))
        return rows if {row["state"] for row in rows} <= {"completed", "stopped", "failed"} else None

    good, bad = wait_for(ended, END_S, "the end of both runs")
    run = RunDir(Path(bad["path"]))
    assert (good["state"], bad["state"]) == ("completed", "stopped")
    first, second = run.attempts()
    assert first.cause == "crashed"
    assert second.line.startswith("ended by halving at step ")
    assert second.line.partition(";")[0].endswith("train/loss 9 is number 2 of 2, and the best 1 go on")
    toolkit("resume", run.id, "--follow")  # its user wants it, and no rung ends it again
    result = run.result()
    assert result is not None
    assert (result.state, result.step) == ("completed", 60)
