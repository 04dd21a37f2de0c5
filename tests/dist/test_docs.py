"""What docs/ shows runs as it stands there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks
from tests.waiting import PATIENCE

pytestmark = pytest.mark.dist


def ran(*argv: str, cwd: Path, runs: Path) -> str:
    env = {**os.environ, "TOOLKIT_RUNS": str(runs), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE * 240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


#: In a process of its own: a run that is started belongs to a process.
EXAMPLES = """
import doctest, pathlib, sys, numpy, torch, toolkit

known = {"toolkit": toolkit, "torch": torch, "numpy": numpy, "folder": pathlib.Path(sys.argv[1])}
runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
for name in toolkit.__all__:
    tests = doctest.DocTestFinder(recurse=False).find(getattr(toolkit, name), name, globs=dict(known))
    assert sum(runner.run(test).attempted for test in tests) or name in ("Dataset", "Forward"), f"{name} has no example"
sys.exit(runner.failures)
"""


def test_each_public_name_has_an_example_that_runs(tmp_path: Path) -> None:
    ran(sys.executable, "-c", EXAMPLES, str(tmp_path), cwd=ROOT, runs=tmp_path / "runs")


def test_each_example_of_the_page_on_the_public_names_runs(tmp_path: Path) -> None:
    page = "\n".join(blocks("docs/api.md", "python"))
    ran(sys.executable, "-c", page, cwd=ROOT, runs=tmp_path)


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
