"""Finds the modules that ranks import before their first step, for the zygote.

Rank 0 writes the names of installed ones into the run folder after its first step. The zygote imports them while the
ranks train, and at the start of the run's next job. Not every package can be imported before the fork: one may read a
rank's variables, start a thread or open the GPU. A trial process imports them first, and such packages are left to the
ranks. A C extension's reads by getenv() are not noticed.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import sysconfig
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.base import fsio
from toolkit.files.records import JsonRecord, read_or_none
from toolkit.nodes.agent.die_with_parent import die_with

NAME = "imports.json"
#: A trial that takes longer is given up, and nothing is learnt.
TRIAL_S = 120

#: The modules that this process had when it was forked; None in a fresh interpreter.
inherited: frozenset[str] | None = None


def record_imports(path: Path) -> None:
    """Write the names of the installed modules that this process imported after its fork, if it is one."""
    if inherited is None:
        return
    noted = _read(path).modules
    # Modules of the standard library and of installed packages; an editable install is a user's own.
    folders = [sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    installed = tuple(f"{folder}{os.sep}" for folder in folders if folder)
    new: list[str] = []
    for name, module in [*sys.modules.items()]:
        spec = getattr(module, "__spec__", None)
        if spec is None or spec.name != name or name in inherited or name in noted:
            continue
        if str(spec.origin or "").startswith(installed):
            new.append(name)
    if new:
        _write(path, _Imports([*noted, *new]))


def import_recorded(path: Path, varying: Collection[str]) -> list[str]:
    """Import the modules of the file, and return those imported. Packages that a trial found harmful are left out.

    ``varying`` are the environment variables in which the ranks differ. Before a rank has been forked there are none,
    and there is no trial. Its outcome is added to the file, and not tried again.
    """
    noted = _read(path)
    left_out = noted.left_out
    wanted = [name for name in noted.modules if name not in sys.modules]
    if left_out is None and not varying:
        return []
    if wanted and left_out is None:
        left_out = _try(wanted, varying)
        _write(path, _Imports(noted.modules, left_out))
    harmless = [name for name in wanted if _package(name) not in (left_out or [])]
    return [name for name in harmless if import_quietly(name)]


def import_quietly(name: str) -> bool:
    """Import the module. Return False where that fails, for any reason: the ranks will report the error."""
    try:
        importlib.import_module(name)
    except (Exception, SystemExit):
        return False
    return True


@dataclass(frozen=True)
class _Imports(JsonRecord):
    modules: list[str]
    left_out: list[str] | None = None  #: packages; None before the first trial


def _read(path: Path) -> _Imports:
    return read_or_none(path, _Imports) or _Imports([])


def _write(path: Path, imports: _Imports) -> None:
    with contextlib.suppress(OSError):  # on a full disk the next restart is a little slower
        fsio.write_json(path, imports.to_json(), durable=False)


def _package(name: str) -> str:
    return name.partition(".")[0]


def _try(modules: Sequence[str], varying: Collection[str]) -> list[str]:
    """Return the packages that may not be imported before the fork. A separate process imports them all."""
    packages = list(dict.fromkeys(map(_package, modules)))
    reading, writing = os.pipe()
    # The trial is a fork, so that a harmful import leaves the zygote as it was.
    zygote, trial = os.getpid(), os.fork()
    if trial == 0:
        die_with(zygote, signal.SIGKILL)
        signal.alarm(TRIAL_S)
        with contextlib.suppress(BaseException):  # without an answer all are left out
            os.write(writing, json.dumps(_harmful(packages, modules, varying)).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(trial, 0)
    try:
        return [str(package) for package in json.loads(text)]
    except ValueError:  # it crashed, or took too long
        return packages


def _harmful(packages: Sequence[str], modules: Sequence[str], varying: Collection[str]) -> list[str]:
    """Return the harmful packages. The last one is imported first: what a package imports comes after it."""
    found: list[str] = []
    for package in reversed(packages):
        before, threads = set(sys.modules), _threads()
        with _watched(varying) as reads:
            imported = [import_quietly(name) for name in modules if _package(name) == package]
        has_opened_gpu = fork_breaks_gpu()  # asked once: it takes a fork of all that is imported
        if reads or not all(imported) or _threads() != threads or has_opened_gpu:
            found += {package, *map(_package, sys.modules.keys() - before)} & {*packages}
        if has_opened_gpu:  # the packages after it can no longer be judged
            return list(packages)
    return found


@contextlib.contextmanager
def _watched(varying: Collection[str]) -> Iterator[list[str]]:
    """Yield a list that gets each read of these environment variables. A loop over all of them counts, too."""
    reads: list[str] = []
    kind = type(os.environ)
    get, iterate = kind.__getitem__, kind.__iter__

    def getitem(self: os._Environ[str], key: str) -> str:
        if key in varying:
            reads.append(key)
        return get(self, key)

    def iterate_all(self: os._Environ[str]) -> Iterator[str]:
        reads.append("all")
        return iterate(self)

    # Methods are looked up in the class, so the class of os.environ is changed for the trial.
    kind.__getitem__, kind.__iter__ = getitem, iterate_all  # type: ignore[method-assign]
    try:
        yield reads
    finally:
        kind.__getitem__, kind.__iter__ = get, iterate  # type: ignore[method-assign]


def _threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def fork_breaks_gpu() -> bool:
    """True if a fork of this process could not use its GPU.

    That GPU was opened, or its runtime was asked how many there are, as torch does where the driver does not answer.
    """
    if "torch" not in sys.modules:
        return False
    from toolkit.devices import accelerator

    # torch tells it only to a fork.
    pid = os.fork()
    if pid == 0:
        os._exit(int(accelerator.is_in_bad_fork()))
    return bool(os.waitpid(pid, 0)[1]) and accelerator.count() > 0
