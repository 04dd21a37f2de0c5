"""The names that users may import: ``toolkit.__all__``, lazily, each with a docstring. The jobs use nothing else."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

import toolkit
from toolkit.base.errors import RequestError
from toolkit.files import rundir
from toolkit.files.run_files import RunResult, RunState
from toolkit.run.records import ownership

ROOT = Path(__file__).parents[2]
#: The public packages beside ``toolkit`` itself.
PACKAGES = ("toolkit.plugins.integrations", "toolkit.plugins.testing")


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


def test_a_shell_completes_the_public_names_only() -> None:
    assert {name for name in dir(toolkit) if not name.startswith("_")} == set(toolkit.__all__)


@pytest.mark.parametrize(
    "given", [["optim.lr=0.5", "name=x1"], {"optim.lr": 0.5, "name": "x1"}, {"optim": {"lr": 0.5}, "name": "x1"}]
)
def test_overrides_are_texts_or_values_by_key(given: list[str] | dict[str, object]) -> None:
    config = toolkit.load_config(None, given)
    assert (config.optim.lr, config.name) == (0.5, "x1")


def test_one_override_may_be_a_text() -> None:
    assert toolkit.load_config(None, "optim.lr=0.5").optim.lr == 0.5


def test_values_by_key_keep_their_types() -> None:
    values = {
        "optim.lr": 1e-5,
        "cluster.extra": {"comment": "007"},
        "data.root": Path("/data/a b"),
        "train.max_steps": None,
    }
    config = toolkit.load_config(None, values)
    assert (config.optim.lr, config.cluster.extra) == (1e-5, {"comment": "007"})
    assert (config.data.root, config.train.max_steps) == ("/data/a b", None)
    with pytest.raises(toolkit.ConfigError, match=r"optim.lrr.*did you mean 'optim.lr'"):
        toolkit.load_config(None, {"optim.lrr": 1})
    with pytest.raises(toolkit.ConfigError, match=r"set.*numbers, texts"):
        toolkit.load_config(None, {"optim.lr": {1}})


def test_earlier_runs_are_found_by_name_and_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_RUNS", str(tmp_path))
    made = [rundir.create(name) for name in ("gpt-a", "gpt-b", "digits")]
    for run in made:
        run.config.write_text("")
        ownership.note_jobs(run, ownership.submit_as(run, "slurm", ownership.take(run, 0)), "7")
    made[0].write_result(RunResult(RunState.COMPLETED))
    # Runs of one second are in the order of their random digits.
    assert {run.dir for run in toolkit.runs("gpt-*")} == {*made[:2]}
    assert [run.dir for run in toolkit.runs(state="completed")] == made[:1]
    assert toolkit.find("digits").dir == made[2]
    assert toolkit.find(made[1].id[-8:]).dir == made[1]
    with pytest.raises(RequestError, match="did you mean 'completed'"):
        toolkit.runs(state="complete")
    with pytest.raises(RequestError, match="no run 'gtp'"):
        toolkit.find("gtp")
