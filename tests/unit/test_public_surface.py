"""The names that users may import: ``toolkit.__all__``, lazily, each with a docstring. The jobs use nothing else."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import toolkit

ROOT = Path(__file__).parents[2]
#: The public packages beside ``toolkit`` itself.
PACKAGES = ("toolkit.integrations", "toolkit.testing")


@pytest.mark.parametrize("name", toolkit.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name: str) -> None:
    thing = getattr(toolkit, name)
    if get_args(thing):  # a union or a callable type, documented where it is defined
        return
    assert thing.__doc__, f"toolkit.{name} has no docstring"
    assert f"`toolkit.{name}`" in (ROOT / "docs/api.md").read_text(), f"docs/api.md does not tell of {name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_public_package_lists_its_names(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__doc__
    assert module.__all__ == sorted(module.__all__)


def test_the_package_is_imported_without_torch() -> None:
    code = "import sys, toolkit; dir(toolkit); print('torch' in sys.modules, 'submitit' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.py")), ids=lambda path: path.name)
def test_jobs_use_nothing_of_the_toolkit_but_its_public_surface(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = {node.module for node in imported if node.module and node.module.partition(".")[0] == "toolkit"}
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {name for name in plain if name.partition(".")[0] == "toolkit"}
    assert modules <= {"toolkit", *PACKAGES}
    named = {alias.name for node in imported if node.module == "toolkit" for alias in node.names}
    named |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "toolkit"
    }
    assert named <= set(toolkit.__all__)


@pytest.mark.parametrize(("name", "most"), [("classify", 50), ("language_model", 110), ("custom", 50)])
def test_a_job_is_few_lines_of_code(name: str, most: int) -> None:
    source = (ROOT / f"jobs/{name}.py").read_text()
    tree = ast.parse(source)
    strings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    code = [
        line
        for number, line in enumerate(source.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#") and number not in strings
    ]
    assert len(code) <= most
