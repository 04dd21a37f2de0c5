"""A run without Slurm, and the evaluation that waits for its end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_for
from toolkit.files import rundir

pytestmark = pytest.mark.dist


def test_an_evaluation_waits_for_the_run_and_finds_its_own_figures(tmp_path: Path) -> None:
    environ = {**os.environ, "TOOLKIT_RUNS": str(tmp_path), "TOOLKIT_SITE": os.devnull}

    def toolkit(*words: str) -> None:
        subprocess.run([sys.executable, "-m", "toolkit", *words], env=environ, check=True, stdout=subprocess.PIPE)

    toolkit("submit", "configs/digits_ddp.yaml", "train.epochs=1", "--executor=local")
    trained = rundir.find("digits-ddp", tmp_path)
    toolkit("evaluate", trained.id, "--submit")
    evaluating = rundir.find("evaluate-digits-ddp", tmp_path)
    wait_for(lambda: evaluating.result() is not None, 120, "the evaluation")
    assert evaluating.result().state == "completed", evaluating.result().why
    found = json.loads((trained.path / "evaluation.json").read_text())
    assert found["metrics"] == {name: pytest.approx(value) for name, value in trained.result().metrics.items()
                                if name.startswith("eval/")}  # fmt: skip
    assert found["step"] == trained.result().step
    assert (trained.path / "result.json").stat().st_mtime < (evaluating.path / "attempts.jsonl").stat().st_mtime
