"""What `toolkit evaluate` finds on one process is what the ranks of a real run found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit import rundir

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]
TOOLKIT = [sys.executable, "-m", "toolkit"]


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 1), ("ddp", 3), ("fsdp", 4)])
def test_the_figures_are_those_of_the_runs_own_last_evaluation(strategy: str, ranks: int, tmp_path: Path) -> None:
    env = {**os.environ, "TOOLKIT_RUNS": str(tmp_path), "OMP_NUM_THREADS": "1"}
    settings = [f"strategy.name={strategy}", f"cluster.tasks_per_node={ranks}", "train.max_steps=12"]
    submit = [*TOOLKIT, "submit", "configs/digits_ddp.yaml", *settings, "model.name=lenet", "--executor", "local"]
    subprocess.run([*submit, "--wait"], cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL, timeout=120)
    run = rundir.find("digits-ddp", tmp_path)
    argv = [*TOOLKIT, "evaluate", str(run.path), "--json"]
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found, result = json.loads(done.stdout), run.result()
    assert result is not None
    assert found["step"] == result["step"] == 12
    assert found["metrics"]["eval/accuracy"] == result["metrics"]["eval/accuracy"]
    assert found["metrics"]["eval/loss"] == pytest.approx(result["metrics"]["eval/loss"], rel=1e-6)
    assert found["recorded"] == {name: value for name, value in result["metrics"].items() if name.startswith("eval/")}
