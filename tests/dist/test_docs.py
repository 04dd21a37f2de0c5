"""What docs/ shows runs as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.S)


def ran(*argv: str, cwd: Path, runs: Path) -> str:
    env = {**os.environ, "TOOLKIT_RUNS": str(runs), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE * 240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_each_example_of_the_public_names_runs(tmp_path: Path) -> None:
    code = "\n".join(
        f"exec(compile({block!r}, 'docs/api.md', 'exec'), {{}})" for block in blocks("docs/api.md", "python")
    )
    told = ran(sys.executable, "-c", code, cwd=ROOT, runs=tmp_path)
    assert "did you mean 'model.name'?" in told
    assert float(told.split()[0]) > 0.9, "the accuracy of three epochs"


def test_the_job_of_the_page_on_jobs_trains_with_its_own_keys(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(blocks("docs/job.md", "python")[0])
    (tmp_path / "train.yaml").write_text(blocks("docs/job.md", "yaml")[0])
    toolkit = [sys.executable, "-m", "toolkit"]
    told = ran(*toolkit, "submit", "train.yaml", "--help", cwd=tmp_path, runs=tmp_path / "runs")
    assert "params.width" in told
    local = ["--executor", "local", "--follow"]
    ran(*toolkit, "submit", "train.yaml", "params.width=16", *local, cwd=tmp_path, runs=tmp_path / "runs")
    (config,) = (tmp_path / "runs").glob("*/*/config.yaml")
    assert "width: 16" in config.read_text()
    result = json.loads((config.parent / "result.json").read_text())
    told = json.loads(ran(*toolkit, "evaluate", str(config.parent), "--json", cwd=tmp_path, runs=tmp_path / "runs"))
    assert told["metrics"]["eval/accuracy"] == result["metrics"]["eval/accuracy"]
