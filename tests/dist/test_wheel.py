"""The wheel, installed without a checkout: it has all its files, and runs a job."""

import re
import subprocess
import tarfile
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks
from tests.waiting import PATIENCE, processes_with, wait_for
from tests.wheel import Installed, build, install_wheel

pytestmark = [pytest.mark.dist, pytest.mark.sample(1)]

END_S = 120
#: What the script of docs/loop.md has of its own.
PARTS = """
import numpy as np
from torch import nn
from torch.utils.data import TensorDataset
from toolkit.data.datasets import build_datasets
from toolkit.config import DataConfig

digits = build_datasets(DataConfig(name="digits")).train
inputs, targets = digits.batch(np.arange(len(digits)))
dataset = TensorDataset(inputs.flatten(1), targets)

def Net():
    return nn.Linear(64, 10)

"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(autouse=True)
def nothing_left(installed: Installed) -> Iterator[None]:
    yield
    ours = f"TOOLKIT_RUNS={installed.environ['TOOLKIT_RUNS']}"
    wait_for(lambda: not processes_with(ours), 10, "no process of the wheel's")


def toolkit(installed: Installed, folder: Path, *words: str) -> str:
    done = subprocess.run(
        [installed.toolkit, *words],
        cwd=folder,
        env=installed.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE * END_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(installed: Installed) -> None:
    """Templates, lists and data sets as well as modules."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "toolkit"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    there = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    held = {name for name in zipfile.ZipFile(installed.wheel).namelist() if ".dist-info/" not in name}
    examples = {name for name in held if name.startswith("toolkit/examples/")}
    assert held - examples == there
    assert {"toolkit/examples/jobs/classify.py", "toolkit/examples/configs/digits_ddp.yaml"} <= examples
    assert {"toolkit/py.typed", "toolkit/config/sbatch_flags.txt", "toolkit/data/files/digits.csv.gz"} <= held


def test_a_wheel_made_from_the_source_archive_has_the_same_bytes(installed: Installed, tmp_path: Path) -> None:
    """So the archive holds all that the wheel needs, and whoever builds it again can compare."""
    with tarfile.open(build("sdist", ROOT, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert build("wheel", folder, tmp_path).read_bytes() == installed.wheel.read_bytes()


def test_a_script_of_ones_own_trains_in_an_empty_folder(installed: Installed, tmp_path: Path) -> None:
    """The script is that of docs/loop.md, with a network and a data set. It imports the wheel's package."""
    (block, *_) = blocks("docs/loop.md", "python")
    script = block.replace("with toolkit.start()", f"{PARTS}\nprint('from', toolkit.__file__)\nwith toolkit.start()")
    (tmp_path / "train.py").write_text(script.replace("10_000", "12"))
    assert "submit a run to Slurm" in toolkit(installed, tmp_path, "--help")
    options = ["--executor", "local", "--wait", "cluster.tasks_per_node=2", "train.log_every=4"]
    toolkit(installed, tmp_path, "submit", "train.py", *options)
    (log,) = Path(installed.environ["TOOLKIT_RUNS"]).glob("train/*/logs/attempt-001/rank-0.log")
    assert f"from {installed.toolkit.parents[1]}/lib/" in log.read_text()
    assert "completed" in toolkit(installed, tmp_path, "why", "train")
    assert opens_tensorboard(installed, tmp_path)


def test_a_new_project_trains_and_its_own_test_passes(installed: Installed, tmp_path: Path) -> None:
    toolkit(installed, tmp_path, "new", "demo")
    toolkit(installed, tmp_path / "demo", "submit", "demo.yaml", "train.epochs=2", "--executor", "local", "--follow")
    python = str(installed.toolkit.with_name("python"))
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "demo",
        env=installed.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE * END_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def opens_tensorboard(installed: Installed, folder: Path) -> bool:
    """Whether TensorBoard shows the run's loss on the address that it tells."""
    argv = [str(installed.toolkit), "tensorboard", "train", "--port", "0"]
    with subprocess.Popen(argv, cwd=folder, env=installed.environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            address = next(found[0] for line in process.stderr if (found := re.findall(r"http://\S+", line)))
            tags = f"{address}data/plugin/scalars/tags"
            wait_for(lambda: "loss" in urllib.request.urlopen(tags).read().decode(), END_S, "the loss")
        finally:
            process.kill()
    return True
