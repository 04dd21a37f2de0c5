"""The job's own module, found and read on the login node without importing it: it imports torch."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from toolkit.config.schema import JobConfig
from toolkit.config.words import one_of
from toolkit.errors import ConfigError, nearest


def check_job(config: JobConfig, project: Path | None) -> None:
    """Raise ConfigError unless the job has a ``main``. It is parsed and not imported, for it imports torch."""
    source = job_source(config.job, project)
    tree = _parsed(source)
    if not any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
        raise ConfigError(
            f"job: {config.job} ({source}) has no function main(config), and no loop with toolkit.start(); a script "
            "that knows nothing of the toolkit runs by `toolkit exec -- python SCRIPT`"
        )
    _check_step_owner(config, tree)
    models = _declared_models(tree)
    if models is not None:
        one_of("model.name", config.model.name, models)


def is_loop(job: str, project: Path | None = None) -> bool:
    """True for a script, named by its path, with a loop of its own: it calls ``toolkit.start()``.

    Raises ConfigError for one that is not there.
    """
    if not job.endswith(".py"):
        return False
    tree = _parsed(job_source(job, project))
    names = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "toolkit"
        for alias in node.names
        if alias.name == "start"
    }
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return bool(calls & {"toolkit.start", *names})


def _parsed(source: Path) -> ast.Module:
    """Return the syntax tree of a Python file, in the encoding that it declares. Raises ConfigError."""
    try:
        return ast.parse(source.read_bytes(), filename=str(source))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        why = getattr(error, "msg", None) or str(error) or type(error).__name__
        raise ConfigError(f"job: {source}{line}: is no Python that can be imported: {why}") from None


def _check_step_owner(config: JobConfig, tree: ast.Module) -> None:
    """A job that makes its own step has no use for a strategy of ours, and one that asks for ours has none of its own.

    Which of the two it is shows in the names that it uses; a job that uses both may be either.
    """
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    own, ours = "Custom" in used, "build_strategy" in used
    if ours and not own and config.strategy.name == "custom":
        raise ConfigError(
            f"strategy.name: custom is for a job with a step of its own, a subclass of toolkit.strategies.Custom (see "
            f"jobs/custom.py), and {config.job} asks for one of the toolkit's: use ddp"
        )
    if own and not ours and config.strategy.name != "custom":
        raise ConfigError(
            f"strategy.name: {config.strategy.name} is not what {config.job} does: its step is its own (a subclass of "
            "toolkit.strategies.Custom); set it to custom"
        )


def job_source(dotted: str, project: Path | None = None) -> Path:
    """Return the file of a job, by its module or its path, looked for in ``project`` (the current folder) first, as the
    ranks will. Raises ConfigError."""
    project = project or Path.cwd()
    if dotted.endswith(".py"):
        path = project / dotted
        if os.path.isfile(path):  # noqa: PTH113  # Path's own raises for a name that is too long
            return path
        scripts = sorted(str(p.relative_to(project)) for p in (*project.glob("*.py"), *project.glob("jobs/*.py")))
        raise ConfigError(f"job: there is no file {path}; {nearest(dotted, scripts)}".rstrip("; "))
    with _as_if_started_in(project, dotted.partition(".")[0]):
        try:
            spec = importlib.util.find_spec(dotted)
        except (ImportError, ValueError):
            spec = None
        except Exception as error:  # the packages above the module are imported, and they are the user's
            raise ConfigError(
                f"job: {dotted}: the package that it is in cannot be imported: {type(error).__name__}: {error}"
            ) from None
    if spec is None or spec.origin is None or not spec.has_location:
        file = Path(dotted.replace(".", "/") + ".py")
        # A package of the same name elsewhere on the path wins over a folder without __init__.py. Path's own is_file
        # raises for a name that is too long.
        if os.path.isfile(project / file):  # noqa: PTH113
            raise ConfigError(f"job: {file} is there but cannot be imported; add {file.parent / '__init__.py'}")
        found = sorted(f"{p.parent.name}.{p.stem}" for p in project.glob("jobs/*.py") if p.stem != "__init__")
        there = f"there are: {', '.join(found)}" if found else "run from the folder that holds the jobs/ package"
        raise ConfigError(f"job: no module {dotted!r}; {nearest(dotted, found)}{there}")
    return Path(spec.origin)


@contextmanager
def _as_if_started_in(folder: Path, package: str) -> Iterator[None]:
    """``folder`` first on the path, and ``package`` not imported yet: it may be another project's ``jobs``."""
    here = str(folder)
    hidden = {name: sys.modules.pop(name) for name in _modules_of(package)}
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(here)
        for name in _modules_of(package):
            del sys.modules[name]
        sys.modules.update(hidden)


def _modules_of(package: str) -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == package]


def _declared_models(tree: ast.Module) -> list[str] | None:
    """The names that a job says it can build, by its literal ``MODELS = (...)``; None when it does not say.

    ``"torchvision"`` among them stands for every classification model of torchvision.
    """
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "MODELS" for t in node.targets):
            names = _literal_names(node.value)
            return [n for n in names if n != "torchvision"] + (torchvision_models() if "torchvision" in names else [])
    return None


def _literal_names(node: ast.expr) -> list[str]:
    try:
        return [str(name) for name in ast.literal_eval(node)]
    except (ValueError, TypeError):
        raise ConfigError(
            f"job: line {node.lineno}: MODELS must be a literal such as ('mlp', 'lenet'), for it is read without "
            "running the job; or leave it out"
        ) from None


@lru_cache(maxsize=1)
def torchvision_models() -> list[str]:
    """The classification models of torchvision, from the list we ship: importing torchvision takes 7 s."""
    return Path(__file__).with_name("torchvision_models.txt").read_text().split()
