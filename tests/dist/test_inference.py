"""`toolkit evaluate` on one process finds the figures of a real run's ranks.

An exported program needs only torch.
"""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jobs.models import lenet
from tests.pages import blocks
from tests.waiting import PATIENCE
from toolkit.files import rundir
from toolkit.files.rundir import RunDir

pytestmark = [pytest.mark.dist, pytest.mark.sample(1)]

ROOT = Path(__file__).parents[2]
TOOLKIT = [sys.executable, "-m", "toolkit"]


#: With what docs/inference.md shows in the middle.
ALONE = f"""
import json, os, sys, torch
os.chdir(sys.argv[3])
images = torch.load(sys.argv[1])
{blocks("docs/inference.md", "python")[0]}
torch.save(logits, sys.argv[2])
print(json.dumps([name for name in sys.modules if name.partition(".")[0] in ("toolkit", "jobs", "omegaconf")]))
"""


def trained(runs: Path, strategy: str, ranks: int) -> RunDir:
    env = {**os.environ, "TOOLKIT_RUNS": str(runs), "OMP_NUM_THREADS": "1"}
    settings = [f"strategy.name={strategy}", f"cluster.tasks_per_node={ranks}", "train.max_steps=12"]
    submit = [*TOOLKIT, "submit", "configs/digits_ddp.yaml", *settings, "model.name=lenet", "--executor", "local"]
    subprocess.run(
        [*submit, "--wait"], cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE * 120
    )
    return rundir.find("digits-ddp", runs)


def said(*argv: str, folder: Path) -> str:
    """From a folder in which there is nothing of the project."""
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=PATIENCE * 120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.sample(1)
@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 1), ("ddp", 3), ("fsdp", 4)])
def test_the_figures_are_those_of_the_runs_own_last_evaluation(strategy: str, ranks: int, tmp_path: Path) -> None:
    run = trained(tmp_path, strategy, ranks)
    found, result = json.loads(said(*TOOLKIT, "evaluate", str(run.path), "--json", folder=tmp_path)), run.result()
    assert found["step"] == result.step == 12
    assert found["metrics"]["eval/accuracy"] == result.metrics["eval/accuracy"]
    assert found["metrics"]["eval/loss"] == pytest.approx(result.metrics["eval/loss"], rel=1e-6)
    assert found["recorded"] == {name: value for name, value in result.metrics.items() if name.startswith("eval/")}


def test_an_exported_program_needs_torch_alone(tmp_path: Path) -> None:
    out, inputs = tmp_path / "digits", torch.randn(5, 1, 8, 8)
    said(*TOOLKIT, "export", str(trained(tmp_path, "ddp", 2).path), str(out), folder=tmp_path)
    torch.save(inputs, tmp_path / "inputs.pt")
    # Another number of threads rounds differently, and other tests of this process may have set it.
    kept = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": torch.get_num_threads()}
    kept["PYTHONPATH"] = sysconfig.get_path("purelib")
    bare = ["env", "-i", *(f"{name}={value}" for name, value in kept.items()), sys.executable]
    files = [str(tmp_path / "inputs.pt"), str(tmp_path / "outputs.pt"), str(tmp_path)]
    # -S: no .pth file is read there, and so the project is not found
    assert json.loads(said(*bare, "-S", "-P", "-c", ALONE, *files, folder=tmp_path)) == []
    model = lenet(10, (1, 8, 8)).eval()
    model.load_state_dict(load_file(out / "model.safetensors"))
    assert torch.equal(torch.load(tmp_path / "outputs.pt"), model(inputs))
