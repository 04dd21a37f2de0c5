"""Finds and reads the job's own file on the login node. It is not imported, because it imports torch."""

from __future__ import annotations

import ast
import importlib
import os
import shlex
import sys
from collections.abc import Iterator
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from toolkit import registry
from toolkit.base.errors import ConfigError, did_you_mean
from toolkit.config.schema import CALLED_JOB, SCRIPT_JOB, JobConfig
from toolkit.config.source import PythonSource, project_files, read_source
from toolkit.constraints import one_of

#: The class that a job derives from.
_BASE = "toolkit.Job"


class JobFiles:
    """The jobs' files in ``project``. Each is read once, however many configs name it: a sweep has thousands."""

    def __init__(self, project: Path | None) -> None:
        self._project = project
        self._loops: dict[str, bool] = {}
        self._checked = set[tuple[str, str, str]]()

    def is_loop(self, job: str) -> bool:
        if job not in self._loops:
            self._loops[job] = is_loop(job, self._project)
        return self._loops[job]

    def check(self, config: JobConfig) -> None:
        """Call :func:`check_job`, once for all configs that are equal in the keys that it reads."""
        looked_at = (config.job, config.strategy.name, config.model.name)
        if looked_at not in self._checked:
            check_job(config, self._project)
            self._checked.add(looked_at)


def check_job(config: JobConfig, project: Path | None) -> None:
    """Raise ConfigError unless the file holds one job. It is parsed and not imported, because it imports torch."""
    source = read_source(job_source(config.job, project))
    jobs = _job_classes(source, project)
    if len(jobs) > 1:
        lines = " and ".join(f"{node.name} (line {node.lineno})" for node in jobs)
        raise ConfigError(f"job: {source.path}: {lines} are both jobs; leave one in this file, and move the other out")
    if jobs:
        _check_step_owner(config, jobs[0])
    else:
        main = main_of(source)
        if main is None:
            what = "and as a script it would do nothing, for it calls nothing"
            if _calls_something(source, project):
                path = shlex.quote(str(source.path))
                what = f"so it is a script of its own: `toolkit submit {path}` runs it, or job: with its path"
            raise ConfigError(
                f"job: {config.job} ({source.path}) has no function main(config) that is left to the toolkit, no class "
                f"derived from toolkit.Job, and no loop with toolkit.start(), {what}"
            )
        # It must be callable with one argument: at most one is required, and one can be passed.
        takes = main.args
        most = len(takes.posonlyargs + takes.args)
        least = most - len(takes.defaults)
        if least > 1 or (most == 0 and takes.vararg is None):
            raise ConfigError(
                f"job: {source.place(main)}: main is called with one argument, the config: write def main(config); a "
                "script of its own calls main itself, below `if __name__ == '__main__':`"
            )
    models = _declared_models(source.tree)
    if models is not None:
        one_of("model.name", config.model.name, models)


def _job_classes(source: PythonSource, project: Path | None) -> list[ast.ClassDef]:
    """Return the classes of a file that derive from ``toolkit.Job``. Base classes of others in it are left out."""
    derived = _derived(source, project or Path.cwd())
    above = {source.full_name(base) for node in derived.values() for base in node.bases}
    return [node for name, node in derived.items() if name not in above]


def _derived(source: PythonSource, project: Path) -> dict[str, ast.ClassDef]:
    """Return all classes of a file that derive from ``toolkit.Job``.

    A class may derive from it through other files of the project.
    """
    derived: dict[str, ast.ClassDef] = {}
    for name, node in source.classes.items():  # a base class comes before the classes that derive from it
        bases = [source.full_name(base) for base in node.bases]
        if any(base in (_BASE, *derived) or _elsewhere(base, source, project) for base in bases):
            derived[name] = node
    return derived


def _elsewhere(name: str, source: PythonSource, project: Path) -> PythonSource | None:
    """Return the project's other file in which ``name`` is a job's class, or None."""
    module, _, kind = name.rpartition(".")
    path = module.lstrip(".")
    folders = [project, project / "src", source.path.parent]
    if module.startswith("."):  # a relative import, whose first dot is the folder of the file
        folders = [source.path.parents[len(module) - len(path) - 1]]
    for folder in folders if path else []:
        file = folder / f"{path.replace('.', '/')}.py"
        if file.is_file() and file != source.path:
            other = read_source(file)
            return other if kind in _derived(other, project) else None
    return None


def params_source(source: PythonSource, project: Path | None) -> PythonSource:
    """Return the file that declares the keys of the job in ``source``, by the class ``Params``.

    That is the file itself, or the one that has the class from which its job derives. ``params_of`` finds the same keys
    on a rank.
    """
    folder = project or Path.cwd()
    if "Params" in source.classes or source.is_imported("Params"):
        return source
    for node in _derived(source, folder).values():
        for base in node.bases:
            other = _elsewhere(source.full_name(base), source, folder)
            if other is not None and "Params" in (found := params_source(other, folder)).classes:
                return found
    return source


def is_loop(job: str, project: Path | None = None) -> bool:
    """True if the job has its own loop or a library's. Raises ConfigError where the job is not there.

    Such a file calls ``toolkit.start()``, or an adapter.
    """
    if job == CALLED_JOB:
        return True
    names = read_source(job_source(job, project)).called
    return "toolkit.start" in names or any(
        name.startswith(f"{adapter}.") for adapter in registry.names("adapters").values() for name in names
    )


def uses_toolkit_steps(job: str) -> bool:
    """True if the steps of a job are the toolkit's, also those of a user's own loop, but not of a library's.

    Those of a plain function ``main(config)`` are taken for the toolkit's.
    """
    if job == SCRIPT_JOB or not is_loop(job):
        return job != SCRIPT_JOB
    return "toolkit.start" in read_source(job_source(job)).called


def is_plain(job: str, project: Path | None = None) -> bool:
    """True if the job is a script that runs by itself, as under torchrun, and none of the toolkit's kinds of jobs.

    A file that calls nothing is none. Raises ConfigError where the job is not there.
    """
    if not job.endswith(".py") or is_loop(job, project):
        return False
    source = read_source(job_source(job, project))
    return not _job_classes(source, project) and main_of(source) is None and _calls_something(source, project)


def is_class(job: str, project: Path | None = None) -> bool:
    """True if the file has a class derived from ``toolkit.Job``. Raises ConfigError where the job is not there."""
    return bool(_job_classes(read_source(job_source(job, project)), project))


@lru_cache(maxsize=16)
def main_of(source: PythonSource) -> ast.FunctionDef | None:
    """Return the function ``main`` that a file leaves to the toolkit to call; None without one.

    A script calls its ``main`` itself, or has a library call it: ``fire.Fire(main)``, ``@app.command()`` and ``app()``.
    One that gives it a config of the toolkit's, or submits it, is left to the toolkit all the same.
    """
    functions = {node.name: node for node in source.tree.body if isinstance(node, ast.FunctionDef)}
    main = functions.get("main")
    calls = (source.full_name(node.func) for node in ast.walk(source.tree) if isinstance(node, ast.Call))
    if main is None or any(name in ("toolkit.load_config", "toolkit.submit") for name in calls):
        return main
    # Follow what runs when the file is run, through its functions.
    used, called, run = {"main": False}, set[str](), [*_at_top_level(source)]
    for node in run:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.add(node.func.id)
        if isinstance(node, ast.Name) and not used.get(node.id):
            used[node.id] = True
            run += ast.walk(functions[node.id]) if node.id in functions else ()
    decorators = {node.id for each in main.decorator_list for node in ast.walk(each) if isinstance(node, ast.Name)}
    return None if used["main"] or called & decorators else main


def _calls_something(source: PythonSource, project: Path | None) -> bool:
    """True if a file, run as a script, does more than to define: it calls, or only imports a module of the project."""
    if any(isinstance(node, ast.Call) for node in _at_top_level(source)):
        return True
    defines = any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in source.tree.body)
    return not defines and len(project_files(source, project or Path.cwd())) > 1


def _at_top_level(source: PythonSource) -> Iterator[ast.AST]:
    """Yield the nodes of what runs when the file is run, without imports and definitions."""
    passed_over = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    for statement in source.tree.body:
        if not isinstance(statement, passed_over):
            yield from ast.walk(statement)


def _check_step_owner(config: JobConfig, job: ast.ClassDef) -> None:
    """Raise ConfigError where the job's step and ``strategy.name`` do not go together.

    A job with its own step needs ``custom``, and ``custom`` needs such a job.
    """
    own = "train_step" in [node.name for node in job.body if isinstance(node, ast.FunctionDef)]
    is_custom = config.strategy.name == "custom"
    if own and not is_custom:
        raise ConfigError(
            f"strategy.name: {config.strategy.name} is not what {config.job} does: its step is its own (train_step of "
            f"{job.name}); set it to custom"
        )
    # A base class without a dot in its name may define the step itself; its methods are not read.
    may_inherit = not all("." in ast.unparse(base) for base in job.bases)
    if is_custom and not own and not may_inherit:
        raise ConfigError(
            f"strategy.name: custom is for a job with a step of its own, a method train_step (see jobs/custom.py), and "
            f"{job.name} of {config.job} has none: use ddp"
        )


def job_source(job: str, project: Path | None = None) -> Path:
    """Return the file of a job, by its module or its path, without importing it.

    It is looked for in ``project`` (the current folder) first, as the ranks will. Raises ConfigError.
    """
    project = project or Path.cwd()
    if job.endswith(".py"):
        path = project / job
        if os.path.isfile(path):  # noqa: PTH113  # Path's own raises for a name that is too long
            return path
        paths = [*project.glob("*.py"), *project.glob("jobs/*.py")]
        scripts = sorted(str(path.relative_to(project)) for path in paths)
        raise ConfigError(f"job: there is no file {path}; {did_you_mean(job, scripts)}".rstrip("; "))
    spec = _spec(job.split("."), project)
    if spec is None or spec.origin is None or not spec.has_location:
        file = Path(job.replace(".", "/") + ".py")
        # A package of the same name elsewhere on the path wins over a folder without __init__.py. Path's own is_file
        # raises for a name that is too long.
        if os.path.isfile(project / file):  # noqa: PTH113
            raise ConfigError(f"job: {file} is there but cannot be imported; add {file.parent / '__init__.py'}")
        module = job.rpartition(".")[0]
        above = _spec(module.split("."), project) if module else None
        if above is not None and above.submodule_search_locations is None:
            raise ConfigError(f"job: {job}: name the module alone, `job: {module}`; its class is found automatically")
        found = sorted(f"{p.parent.name}.{p.stem}" for p in project.glob("jobs/*.py") if p.stem != "__init__")
        there = f"there are: {', '.join(found)}" if found else "run from the folder that holds the jobs/ package"
        raise ConfigError(f"job: no module {job!r}; {did_you_mean(job, found)}{there}")
    return Path(spec.origin)


def _spec(parts: list[str], project: Path) -> ModuleSpec | None:
    """Return where a module is: in the project, in its ``src`` folder, or installed.

    The packages above it are not imported, as importlib.util.find_spec would do: those of an installed one import
    torch.
    """
    first, *rest = parts
    importlib.invalidate_caches()
    try:
        spec = PathFinder.find_spec(first, [str(project), str(project / "src"), *sys.path])
        if spec is None:  # an editable installation has its own finder
            others = (finder.find_spec(first, None) for finder in sys.meta_path if finder is not PathFinder)
            spec = next((found for found in others if found is not None), None)
        # Look into each package's folder without importing the package.
        for name in rest:
            if spec is None or spec.submodule_search_locations is None:
                return None
            if spec.has_location and spec.origin is not None:
                read_source(Path(spec.origin))  # raises here what the ranks could not import
            spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    except (ImportError, ValueError):  # not a module's name
        return None
    return spec


def missing_imports(source: PythonSource, project: Path) -> Iterator[str]:
    """Yield the imports at a file's top level that this Python would not find, each with its line. Imports nothing.

    A file that changes ``sys.path`` has none. Nor are those found that the file tries, or makes under a condition.
    """
    if any(source.full_name(node) == "sys.path" for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)):
        return
    for node in source.tree.body:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        for name in dict.fromkeys(name.partition(".")[0] for name in names):
            is_there = any(_spec([name], folder) for folder in (source.path.parent, project))
            if name not in sys.stdlib_module_names and not is_there:
                yield f"{source.place(node)}: {sys.executable} finds no module {name!r}, and would end there"


def _declared_models(tree: ast.Module) -> list[str] | None:
    """Return the models that a job declares by its literal ``MODELS = (...)``. None without one.

    ``"torchvision"`` among them stands for every classification model of torchvision.
    """
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    value = next((node.value for node in assigned if "MODELS" in map(ast.unparse, node.targets)), None)
    if value is None:
        return None
    try:
        names = [str(name) for name in ast.literal_eval(value)]
    except (ValueError, TypeError):
        raise ConfigError(
            f"job: line {value.lineno}: MODELS must be a literal such as ('mlp', 'lenet'), for it is read without "
            "running the job; or leave it out"
        ) from None
    if "torchvision" in names:
        names.remove("torchvision")
        names += torchvision_models()
    return names


@lru_cache(maxsize=1)
def torchvision_models() -> list[str]:
    """Return the classification models of torchvision. They are listed in this package: the import takes 7 s."""
    return Path(__file__).with_name("torchvision_models.txt").read_text().split()
