"""What each package that need not be installed is asked for, and what is said where it is missing."""

import ast
import re
import sys
import tomllib
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from jobs import models
from toolkit import config as configs
from toolkit.base import torch_version
from toolkit.base.errors import ConfigError, RequestError
from toolkit.cli.commands import serve
from toolkit.config import DataConfig
from toolkit.data.datasets import ImagePreprocessor
from toolkit.plugins.formats import dataset_catalog
from toolkit.plugins.formats.images import photographs, small
from toolkit.plugins.formats.shards.parquet import ParquetFormat
from toolkit.plugins.formats.tokens.folder import load_tokenizer
from toolkit.plugins.sweep.axes import Discrete, suggest_points
from toolkit.plugins.trackers import build_tracker

ROOT = Path(__file__).parents[2]


def submit(key: str, _: Path, *others: str) -> None:
    configs.check_places(configs.load_config(None, [key, *others], site=False))


def serve_runs(_: Path) -> None:
    serve.run(Namespace(run=[], name=None, since=None, port=0))


#: Not looked at before the package is missing.
ANY_RUN: Any = None
ONE = Discrete(["1", "2"])
IMAGES = r"torchvision is not installed for .*python.*: pip install 'slurm-batch-toolkit\[images\]'"
#: The missing package, what is called, with the test's folder, and what that says.
CASES: list[tuple[str, Callable[[Path], Any], str]] = [
    *(
        ("torchvision", partial(submit, f"data.name={name}"), IMAGES)
        for name in (*dataset_catalog.FILES, "image_folder")
    ),
    ("torchvision", lambda path: small.fetch("mnist", str(path)), IMAGES),
    ("torchvision", lambda path: small.fetch_weights("ResNet18_Weights.IMAGENET1K_V1", str(path)), IMAGES),
    ("torchvision", lambda _: small.build(DataConfig("mnist")), IMAGES),
    ("torchvision", lambda path: photographs.build(DataConfig("image_folder", root=str(path))), IMAGES),
    (
        "torchvision",
        lambda _: models.build_model("resnet18", 10, (3, 32, 32)),
        "resnet18 needs torchvision: pip install",
    ),
    ("PIL", lambda path: ImagePreprocessor((3, 8, 8), (0.0,), (1.0,)).read(path / "a.png"), IMAGES),
    ("pyarrow", lambda _: ParquetFormat(), r"need pyarrow: pip install 'slurm-batch-toolkit\[shards\]'"),
    ("tokenizers", load_tokenizer, r"pip install 'slurm-batch-toolkit\[tokenizers\]'"),
    ("optuna", lambda _: suggest_points({"a": ONE}, 1, 0, [], less_is_better=True), r"slurm-batch-toolkit\[optuna\]'"),
    ("mpi4py", lambda _: import_module("toolkit.plugins.mpi.backend"), r"pip install slurm-batch-toolkit\[mpi\]"),
    *(
        (name, serve_runs, rf"needs {name}.*: pip install 'slurm-batch-toolkit\[web\]'")
        for name in ("starlette", "uvicorn")
    ),
    ("mlflow", lambda _: build_tracker("mlflow", ANY_RUN), "pip install mlflow"),
    ("wandb", lambda _: build_tracker("wandb", ANY_RUN), "pip install wandb"),
]
#: Modules that would not be imported again, though a package of theirs is missing.
AGAIN = ("toolkit.plugins.mpi.backend", "torchvision.", "toolkit.plugins.report.server", "starlette.", "uvicorn.")
#: Imported where a test of their own leaves them out, or brought by a package that is a dependency.
ELSEWHERE = {"accelerate", "lightning", "transformers", "pandas", "jobs", "markupsafe"}


@pytest.mark.parametrize(("package", "call", "message"), CASES)
def test_a_package_that_is_missing_is_named_with_what_installs_it(
    package: str,
    call: Callable[[Path], Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    # Pillow comes with torchvision, and goes with it.
    for name in {package, "torchvision"} if package == "PIL" else {package}:
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith(AGAIN)]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises((ConfigError, RequestError), match=message):
        call(tmp_path)


def test_a_login_node_whose_python_is_not_the_ranks_submits_images(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    submit("cluster.container=pyxis:site/torch:2.15", tmp_path, "data.name=mnist")
    monkeypatch.setattr(torch_version, "installed", lambda: None)
    submit("data.name=mnist", tmp_path)


def test_each_package_that_need_not_be_installed_has_been_tried_without() -> None:
    requirements = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    installed = {re.split("[<>=]", text)[0].strip() for text in requirements} | {
        "yaml",
        "toolkit",
        *sys.stdlib_module_names,
    }
    imported: set[str] = set()
    for path in [*(ROOT / "toolkit").rglob("*.py"), *(ROOT / "jobs").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import():
                    imported |= {alias.name for alias in node.names}
                case ast.ImportFrom(module=str(module), level=0):
                    imported.add(module)
                case ast.Call(func=ast.Name("import_module"), args=[ast.Constant(str(module))]):
                    imported.add(module)
    assert {name.partition(".")[0] for name in imported} - installed - ELSEWHERE == {package for package, *_ in CASES}
