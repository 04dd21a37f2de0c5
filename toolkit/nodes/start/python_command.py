"""Runs ``python train.py`` or ``python -m train`` in a fork that has imported torch, as a fresh interpreter would.

The supervisor reads the sources (:func:`gains_by_fork`), each rank checks its own node (:func:`why_not_in_process`).
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import importlib
import os
import pkgutil
import re
import runpy
import shutil
import sys
import warnings
from collections.abc import Mapping, Sequence
from ctypes import c_ssize_t, py_object, pythonapi
from importlib.machinery import PathFinder, SourceFileLoader
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

from toolkit.base import logs, staged
from toolkit.base.process_limits import limits
from toolkit.files import error_file
from toolkit.nodes.agent.zygote import reset_main_module

#: Variables that torch and the libraries below it read when they are loaded. A script that names one usually sets it
#: before it imports torch. In a fork that would be too late.
READ_AT_LOAD = re.compile(
    r"(GOMP|KMP|OMP|MKL|OPENBLAS|DNNL|ONEDNN|ATEN|KINETO|PYTORCH|TORCHDYNAMO|TORCHINDUCTOR|TORCH(?!_NCCL|_HOME))_\w+"
)
#: Modules that change torch when they are imported before it, and fail to when imported after it.
BEFORE_TORCH = {"comet_ml"}

log = logs.get(__name__)


class PythonCommand(NamedTuple):
    """A command that this interpreter can run in-process."""

    executable: str  #: ``sys.executable`` of a fresh interpreter
    is_module: bool  #: whether ``target`` comes after ``-m``
    target: str
    arguments: list[str]
    faulthandler: bool  #: ``-X faulthandler``

    @property
    def folder(self) -> str:
        """Return the first entry of a fresh interpreter's path."""
        return str(Path.cwd() if self.is_module else Path(self.target).resolve().parent)


def parse(command: Sequence[str], search_path: str | None) -> PythonCommand | None:
    """Return how this interpreter runs ``command``; None for other programs, and options that need a new one."""
    executable = shutil.which(command[0], path=search_path)
    if executable is None:
        return None
    # Another name of this interpreter? A virtual environment's is a link, and its folder tells them apart.
    theirs, ours = staged.origin(executable), staged.origin(sys.executable)
    if theirs.resolve() != ours.resolve() or theirs.parent.resolve() != ours.parent.resolve():
        return None
    executable, words, has_faulthandler = str(Path(executable).absolute()), list(command[1:]), False
    while words:
        match words:
            case ["-u", *words]:  # ranks are unbuffered in any case, by PYTHONUNBUFFERED
                pass
            case ["-X", "faulthandler", *words] | ["-Xfaulthandler", *words]:
                has_faulthandler = True
            case ["-m", module, *arguments]:
                return PythonCommand(executable, True, module, arguments, has_faulthandler)
            case [script, *arguments] if not script.startswith("-"):
                return PythonCommand(executable, False, script, arguments, has_faulthandler)
            case _:  # other options, and -c
                return None
    return None


# ----------------------------------------------------------------------------------------------------- the supervisor


def gains_by_fork(command: Sequence[str]) -> bool:
    """True if ranks that run ``command`` are better forked: for a Python program whose own sources import torch.

    Other programs would pay for an import that they do not need: 3 s of a CPU and 400 MB on each node.
    """
    python = parse(command, os.environ.get("PATH"))
    if python is None:
        return False
    why = _against_fork(python)
    if why is not None:
        log.info("ranks start as fresh interpreters: %s", why)
    return why is None


def _against_fork(python: PythonCommand) -> str | None:
    sources = _ProgramSources(python.folder)
    try:
        if python.is_module:
            sources.add_modules(python.target, f"{python.target}.__main__")
        else:
            sources.add_modules(*sources.scan(Path(python.target), package=""))
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        return f"{python.target}: {error}"
    # A fork helps only if the program imports torch, and sets up nothing before that import.
    if "torch" not in sources.others:
        return f"{python.target} does not import torch"
    if early := sorted(BEFORE_TORCH & sources.others):
        return f"{early[0]} has to be imported before torch"
    for text in sorted(sources.texts):
        if READ_AT_LOAD.fullmatch(text):
            return f"{python.target} names {text}, which is read when torch is loaded"
    return None


class _ProgramSources:
    """What a program's own modules import and name. Installed packages cannot rely on coming before torch."""

    def __init__(self, folder: str) -> None:
        installed = (f"{sys.prefix}{os.sep}", f"{sys.base_prefix}{os.sep}")
        own = [
            path
            for path in sys.path
            if not path.startswith(installed) and not path.endswith("-packages") and not Path(path, "torch").is_dir()
        ]
        self.others: set[str] = set()  #: names of imported modules that are not the program's own
        self.texts: set[str] = set()  #: literals, and names of keyword arguments
        self._path = [folder, *own]
        self._seen: set[str] = set()
        self._bytes = 0

    def add_modules(self, *names: str) -> None:
        """Add these modules, if they exist, and what they import. Raises OSError for too much source."""
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in self._seen:
                self._seen.add(name)
                waiting += self._look_into(name)
            if self._bytes > limits().imported_source_bytes:
                raise OSError(f"it imports {self._bytes} bytes of sources that are not installed")

    def _look_into(self, name: str) -> list[str]:
        """Return the names that a module, or a name within one, imports, and the package that holds it."""
        parts, path, spec = name.split("."), self._path, None
        # Walk down the packages. A module outside the program's folders is only noted by its top name.
        for part in parts:
            spec = PathFinder.find_spec(part, path)
            if spec is None or parts[0] == "toolkit":
                if path is self._path:
                    self.others.add(parts[0])
                return []
            path = list(spec.submodule_search_locations or [])
        package = name if path else name.rpartition(".")[0]
        imported = [name.rpartition(".")[0]] if "." in name else []
        if spec is not None and str(spec.origin).endswith(".py"):
            with contextlib.suppress(ImportError, OSError, SyntaxError, ValueError):  # its importer may expect that
                imported += self.scan(Path(str(spec.origin)), package)
        return imported

    def scan(self, path: Path, package: str) -> list[str]:
        """Return the names that a source imports. Raises OSError, SyntaxError or ValueError."""
        imported: list[str] = []
        source = path.read_bytes()
        self._bytes += len(source)
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
        # Collect imports, and all texts: the name of a variable may be anywhere.
        for node in ast.walk(tree):
            match node:
                case ast.Import(names):
                    imported += [alias.name for alias in names]
                case ast.ImportFrom(module, names, level) if package or not level:
                    origin = str(module)
                    if level:
                        origin = resolve_name("." * level + (module or ""), package)
                    imported += [origin, *(f"{origin}.{alias.name}" for alias in names)]
                case ast.Constant(str(text)) | ast.keyword(str(text)):
                    self.texts.add(text)
        return imported


# ----------------------------------------------------------------------------------------------------------- the rank


def why_not_in_process(python: PythonCommand, environ: Mapping[str, str]) -> str | None:
    """Return why this process cannot replace a fresh interpreter with ``environ``; None where it can."""
    different = {name for name in {*environ, *os.environ} if environ.get(name) != os.environ.get(name)}
    for name in sorted(different - {"PYTHONFAULTHANDLER", "PYTHONSAFEPATH"}):  # become() sets these later
        if name.startswith(("PYTHON", "LD_")) or READ_AT_LOAD.fullmatch(name):
            return f"torch has been loaded with another {name}"
    if not python.is_module and (not Path(python.target).is_file() or pkgutil.get_importer(python.target)):
        return f"{python.target} is not a script"  # it is missing, a folder or an archive
    for name, module in list(sys.modules.items()):
        if "." in name or name in ("__main__", "toolkit"):  # the toolkit's modules are always imported anew
            continue
        origin = getattr(getattr(module, "__spec__", None), "origin", None)
        if origin in ("built-in", "frozen"):
            continue
        # Would a fresh interpreter import another module of this name?
        spec = PathFinder.find_spec(name, [python.folder])
        if spec is None or spec.origin is None:  # a folder without __init__.py hides nothing
            continue
        if origin is None or os.path.realpath(spec.origin) != os.path.realpath(origin):
            return f"a module in {python.folder} has the name of one that is loaded, {name}"
    return None


def run_in_process(python: PythonCommand, command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run the command in this process, as a fresh interpreter with ``environ`` would.

    Return, or raise what ended the program: then only the interpreter is left to end, and a traceback has been printed.
    """
    # Set what a fresh interpreter would derive from the command and its environment.
    os.environ.clear()
    os.environ.update(environ)
    sys.path.insert(0, python.folder)
    sys.argv = ["-m" if python.is_module else python.target, *python.arguments]
    sys.orig_argv = list(command)
    sys.executable = python.executable
    _unset_safe_path()
    if python.faulthandler:
        sys._xoptions["faulthandler"] = True
    if python.faulthandler or environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    importlib.invalidate_caches()
    for name in [name for name in sys.modules if name.partition(".")[0] == "toolkit"]:
        del sys.modules[name]  # the program may have a package of this name on a path that it adds
    main = reset_main_module()
    try:
        if python.is_module:
            runpy._run_module_as_main(python.target)  # type: ignore[attr-defined]  # what `python -m` itself calls
        else:
            # the name that a fresh interpreter gives it, which pathlib would shorten
            path = python.target if python.target.startswith("/") else f"{Path.cwd()}/{python.target}"
            main.__dict__.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
            exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), main.__dict__)
    except SystemExit as ended:
        if isinstance(ended.code, str):  # the reason, in words
            _report(ended, environ)
        raise
    except BaseException as error:
        _report(error, environ)
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = lambda *_: None
        raise  # the interpreter ends as for any exception: KeyboardInterrupt is an end by SIGINT


def _report(error: BaseException, environ: Mapping[str, str]) -> None:
    """Drop the frames of this module from the traceback, and tell the supervisor unless torch's ``record`` has."""
    while error.__traceback__ and error.__traceback__.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = error.__traceback__.tb_next
    if not Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).is_file():
        error_file.write(error, int(environ.get("RANK", "0")))


def _unset_safe_path() -> None:
    """Clear ``-P`` in ``sys.flags``: processes that the program starts would inherit it."""
    place = sys.flags.__match_args__.index("safe_path")
    set_item = pythonapi.PyStructSequence_SetItem
    set_item.argtypes, set_item.restype = [py_object, c_ssize_t, py_object], None
    set_item(sys.flags, place, False)
