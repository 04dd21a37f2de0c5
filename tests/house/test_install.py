"""The wheel, installed into environments that have a torch of their own: it stays. All packages are empty ones."""

import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.pages import ROOT
from tests.wheel import build, made

UV = Path(sys.executable).with_name("uv")
#: Each torchvision wants one torch. The newest of both is what an index has first.
PUBLISHED = {"2.15.0": "0.29.2", "2.7.0": "0.22.0", "2.7.0+rocm6.3": "0.22.0+rocm6.3"}
DEPENDENCIES = ("submitit", "omegaconf", "pyyaml", "tensorboard", "numpy", "rich", "safetensors", "jinja2")


def empty_wheel(folder: Path, name: str, version: str, needs: Sequence[str] = ()) -> Path:
    """Make a wheel without modules."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    about = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", "\n".join(about) + "\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture(scope="module")
def links(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the toolkit's wheel, and with what an index would have."""
    folder = tmp_path_factory.mktemp("links")
    build("wheel", ROOT, folder)
    for torch, torchvision in PUBLISHED.items():
        empty_wheel(folder, "torch", torch)
        empty_wheel(folder, "torchvision", torchvision, [f"torch=={torch.partition('+')[0]}"])
    for name in DEPENDENCIES:
        empty_wheel(folder, name, "99.0")
    return folder


@pytest.mark.sample(2)
@pytest.mark.parametrize("by", ["pip", "uv"])
@pytest.mark.parametrize(
    "own",
    [
        ["torch==2.7.0+rocm6.3"],
        ["torch==2.7.0+rocm6.3", "torchvision==0.22.0+rocm6.3"],
        ["torch==2.6.0a0+df5bbc09d1.nv24.12"],  # a container's
    ],
    ids=["torch alone", "torch and torchvision", "a pre-release"],
)
def test_a_torch_of_ones_own_is_left_alone(tmp_path: Path, links: Path, own: list[str], by: str) -> None:
    if by == "uv" and not UV.exists():
        pytest.skip("this environment was not made by make, and has no uv")
    made(sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv"))
    python = str(tmp_path / "venv/bin/python")
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "--python", python, "install"]
    offline = ["--quiet", "--no-index", "--find-links", str(links)]
    for each in own:
        name, _, version = each.partition("==")
        made(*pip, "--quiet", "--no-index", "--no-deps", str(empty_wheel(tmp_path, name, version)))
    with_uv = [str(UV), "pip", "install", "--no-config", "--python", python]
    made(*(with_uv if by == "uv" else pip), *offline, "slurm-batch-toolkit")
    frozen = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "list", "--format=freeze"]
    there = subprocess.run(frozen, capture_output=True, text=True, check=True).stdout.split()
    assert [line for line in there if line.startswith("torch")] == own
    assert {line.partition("==")[0].lower() for line in there} >= {*DEPENDENCIES, "slurm-batch-toolkit"}
