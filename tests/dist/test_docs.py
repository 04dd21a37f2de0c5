"""What docs/ shows runs as it stands there."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks
from tests.waiting import PATIENCE

pytestmark = pytest.mark.dist


def ran(*argv: str, cwd: Path, runs: Path) -> str:
    folders = {"TOOLKIT_RUNS": str(runs), "XDG_CACHE_HOME": str(runs / "cache"), "PYTHONPATH": str(ROOT)}
    env = {**os.environ, **folders, "OMP_NUM_THREADS": "1"}
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


#: What a reader of a fragment has of their own.
OWN = """
from dataclasses import dataclass
import torch, toolkit
from torch import nn
from torch.nn.functional import cross_entropy, softplus
from torch.nn.parallel import DistributedDataParallel
from torchmetrics.functional.classification import binary_auroc

@dataclass
class Params:
    width: int = 8

class MyImages(torch.utils.data.Dataset):
    def __init__(self, part): ...
    def __len__(self): return 48
    def __getitem__(self, index): return {"image": torch.full((4,), float(index)), "label": index % 2}

def Net(width=8): return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
def generator(): return nn.Linear(16, 4)
def discriminator(): return nn.Linear(4, 1)
def roc_auc_score(labels, scores): return binary_auroc(torch.as_tensor(scores), torch.as_tensor(labels)).item()
dataset = torch.utils.data.TensorDataset(torch.randn(512, 4), torch.arange(512) % 2)
"""
TRAIN_SET = """
    def train_set(self): return dataset
"""
LOSS = """
    eval_set = train_set
    def model(self): return Net()
    def loss(self, model, batch): return toolkit.Loss.mean(cross_entropy(model(batch.inputs), batch.targets))
"""


def fragments() -> dict[str, tuple[str, str, str]]:
    """Return for each fragment its script, further config keys, and a figure of its run."""
    readme, config = blocks("README.md", "python"), blocks("docs/config.md", "python")
    scores = textwrap.indent(blocks("docs/job.md", "python")[1], "    ")
    keys = textwrap.indent(f"\nconfig = run.config\n{config[1]}assert params.width == 256", "    ")
    loop = readme[0].replace("10_000", "12")
    return {
        "loop of the README": (loop, "", "train/loss"),
        "job of the README": (readme[1], "params: {width: 8}\n", "train/loss"),
        "figures over the whole set": (f"class Job(toolkit.Job):{TRAIN_SET}{LOSS}\n{scores}", "", "eval/auc"),
        "networks that train each other": (
            blocks("docs/own-step.md", "python")[0] + TRAIN_SET,
            "strategy: {name: custom}\n",
            "train/loss",
        ),
        "keys of a loop": (
            f"{config[0]}\n{loop.replace('as run:', f'as run:{keys}')}",
            "params: {width: 256}\n",
            "train/loss",
        ),
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", fragments())
def test_each_fragment_of_a_page_runs(name: str, tmp_path: Path) -> None:
    script, keys, figure = fragments()[name]
    (tmp_path / "train.py").write_text(OWN + script)
    data = (
        "" if "global_batch_size=" in script else "data: {global_batch_size: 12}\n"
    )  # else the loop would not read it
    train = "train: {max_steps: 12, log_every: 4}\n"
    (tmp_path / "mine.yaml").write_text(f"job: train.py\n{data}{train}{keys}")
    ran(sys.executable, "-m", "toolkit", "run", "mine.yaml", cwd=tmp_path, runs=tmp_path / "runs")
    (run,) = (tmp_path / "runs").glob("*/*/config.yaml")
    curves = run.parent / "tensorboard/metrics.jsonl"
    assert f'"{figure}"' in curves.read_text()
