"""Imports the job's module. Ranks, `toolkit evaluate` and `toolkit export` do it in the same way."""

from __future__ import annotations

import importlib
import sys
import traceback
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import toolkit
from toolkit import config as configs
from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig

#: Errors of an import whose code is wrong, and would fail again. A disk's or a GPU's errors are passed on.
_FAULTS = (
    *(ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError, LookupError, ArithmeticError),
    AssertionError,
)


def load(job: str, folder: Path) -> ModuleType:
    """Import a job, by its module or its path, from the sources in ``folder``.

    The folder of a file is the first on the path, so that it imports the files beside it. A file in a package is
    imported as a module of that package. Raises ConfigError that names the line where the code is wrong.
    """
    source = configs.job_source(job, folder)
    is_file = job.endswith(".py")
    name, root = _name_and_root(job, source, folder)
    # The last one comes first on the path.
    firsts = [folder / "src", folder, root]
    if is_file:
        firsts.append(source.parent)
    for first in firsts:
        if first.is_dir():
            sys.path[:] = [str(first), *(other for other in sys.path if other != str(first))]
    importlib.invalidate_caches()
    try:
        # A file outside of packages is imported by its path.
        if is_file and root == source.parent:
            return _of_file(name, source)
        # Modules of this package that are not from here are from another run's copy of the sources.
        package = name.partition(".")[0]
        for other, module in [*sys.modules.items()]:
            file = getattr(module, "__file__", None)
            if other.partition(".")[0] == package and not (file and Path(file).is_relative_to(root)):
                del sys.modules[other]
        return importlib.import_module(name)
    except _FAULTS as error:
        if isinstance(error, ImportError) and (error.path or "").endswith(".so"):  # a library that this node lacks
            raise
        why = error.msg if isinstance(error, SyntaxError) else error
        place = _place_of(error, source, (root / name.partition(".")[0], source.parent, folder))
        raise ConfigError(
            f"job: {place}: {type(error).__name__}: {why} (when {job} is imported); fix that line, or install what it "
            "lacks where the ranks run, then submit again"
        ) from error


def _name_and_root(job: str, source: Path, folder: Path) -> tuple[str, Path]:
    """Return the full name of the job's module and its top package's parent folder."""
    if not job.endswith(".py"):
        return job, source.parents[job.count(".") + (source.name == "__init__.py")]
    name, root = source.stem, source.parent
    while root != folder and (root / "__init__.py").is_file():
        name, root = f"{root.name}.{name}", root.parent
    return name, root


def _of_file(name: str, source: Path) -> ModuleType:
    """Import a file under its own name, or under a free one. Spawned data workers find its classes by that name."""
    if name in sys.modules or name in sys.stdlib_module_names or "." in name:
        name = f"job_{name}".replace(".", "_")
    spec = spec_from_file_location(name, source)
    assert spec is not None
    assert spec.loader is not None, "the name of a job's file ends in .py"
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _place_of(error: BaseException, source: Path, folders: tuple[Path, ...]) -> str:
    """Return file and line of the fault: the innermost that is the user's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    # Innermost frame first; installed libraries are not the user's.
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        for folder in folders:
            path = Path(frame.filename)
            if path.is_relative_to(folder) and "site-packages" not in path.relative_to(folder).parts:
                return f"{path}, line {frame.lineno}"
    return str(source)


def job_class(module: ModuleType) -> Any:
    """Return the class of a job's module that derives from ``toolkit.Job``, if any. Raises ConfigError for several."""
    base: Any = toolkit.Job  # looked up here: it imports torch
    own = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, base)]
    above = {parent for kind in own for parent in kind.__bases__}
    leaves = [kind for kind in own if kind.__module__ == module.__name__ and kind not in above]
    if len(leaves) > 1:
        names = ", ".join(kind.__name__ for kind in leaves)
        raise ConfigError(f"job: {module.__file__} has several classes derived from toolkit.Job: {names}; leave one")
    return leaves[0] if leaves else None


def params_of(kind: type, config: JobConfig) -> Any:
    """Return the config's ``params`` as the ``Params`` of the job's module or that of a base class; None without."""
    base: Any = toolkit.Job
    modules = [sys.modules[parent.__module__] for parent in kind.__mro__ if issubclass(parent, base)]
    params = next((module.Params for module in modules if hasattr(module, "Params")), None)
    return None if params is None else configs.filled(params, config.params)
