"""Faults of a disk, a kernel or a scheduler on demand, for tests.

They strike a writer at an exact point. In a test's own process, :func:`hook_disk_operations` sees each operation that
changes a file before it is done, and may raise, sleep or kill instead. In the ranks of a real run, ``TOOLKIT_CHAOS``
has a list of faults, of which each rank takes its own::

    TOOLKIT_CHAOS='[{"kind": "SIGKILL", "rank": 0, "attempt": 1, "operation": 17}]' toolkit submit CONFIG

kills rank 0 of the first attempt in the middle of its 17th operation on a file of the run's checkpoints. ``kind`` is a
signal, an error (``ENOSPC``, ``EDQUOT``, ``EIO``, ...) for ``count`` operations in a row, or ``slow``: each of them
takes ``seconds`` longer.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.base.errors import ConfigError

CHAOS_VARIABLE = "TOOLKIT_CHAOS"
#: Functions of ``os`` that the writers of this package use directly or through ``pathlib``. A ``write`` to a file
#: object is reported when half of it is in the file: a process that dies there leaves a torn file behind.
OPERATIONS = ("mkdir", "chmod", "open", "fchmod", "fsync", "fdatasync", "replace", "rename", "unlink", "rmdir")

#: Called with the name of an operation and its path, before it is done. What it raises is the operation's outcome.
Seen = Callable[[str, str], None]


@contextmanager
def hook_disk_operations(seen: Seen) -> Iterator[None]:
    """Call ``seen`` before each operation that changes the disk, in any thread of this process."""
    # Patches ``os`` itself: pathlib and the writers call its functions by their names there.
    kept = {name: getattr(os, name) for name in (*OPERATIONS, "fdopen")}
    try:
        for name in OPERATIONS:
            setattr(os, name, _watched(name, kept[name], seen))

        def fdopen(fd: int, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            file = kept["fdopen"](fd, mode, *args, **kwargs)
            return _File(file, _path(fd), seen) if "w" in mode else file

        os.fdopen = fdopen
        yield
    finally:
        for name, real in kept.items():
            setattr(os, name, real)


def _watched(name: str, real: Callable[..., Any], seen: Seen) -> Callable[..., Any]:
    def call(target: Any, *args: Any, **kwargs: Any) -> Any:
        if name != "open" or (args and args[0] & os.O_CREAT):  # opening a file for reading changes nothing
            seen(name, _path(target))
        return real(target, *args, **kwargs)

    return call


def _path(target: Any) -> str:
    return str(Path(f"/proc/self/fd/{target}").readlink()) if isinstance(target, int) else os.fspath(target)


class _File:
    """A file being written, whose writes are seen."""

    def __init__(self, file: Any, path: str, seen: Seen) -> None:
        self._file, self._path, self._seen = file, path, seen

    def write(self, data: bytes | memoryview) -> int:
        # In two halves, so that a fault between them leaves a torn file.
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._seen("write", self._path)
        self._file.write(data[half:])
        return len(data)

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@dataclass(frozen=True)
class Fault:
    """``kind`` at the ``operation``-th operation, counted from 1, and at ``count`` operations in a row."""

    kind: str
    operation: int
    count: int = 1
    seconds: float = 0.1
    rank: int = 0
    attempt: int = 1

    def __post_init__(self) -> None:
        if self.kind != "slow" and not hasattr(signal, self.kind) and not hasattr(errno, self.kind):
            raise ConfigError(f"{CHAOS_VARIABLE}: {self.kind!r} is not a signal, a system error or slow")

    def strike(self, operation: str, path: str) -> None:
        """Apply the fault to the ``operation`` on ``path``. Removing needs no room: a full disk lets it pass."""
        if self.kind == "slow":
            time.sleep(self.seconds)
        elif self.kind.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, self.kind))
        elif self.kind not in ("ENOSPC", "EDQUOT") or operation not in ("unlink", "rmdir"):
            number = getattr(errno, self.kind)
            raise OSError(number, os.strerror(number), path)


def parse(text: str) -> list[Fault]:
    """Return the faults in ``TOOLKIT_CHAOS``. Raises ConfigError."""
    try:
        return [Fault(**fields) for fields in json.loads(text)]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f'{CHAOS_VARIABLE}: {text!r} is not a list such as [{{"kind": "SIGKILL", "operation": 17}}]: {error}'
        ) from error


def fault_hook(faults: list[Fault], folder: str = "/checkpoints/") -> Seen:
    """Return a hook that counts operations on paths with ``folder``, and applies the faults."""
    numbers, lock = itertools.count(1), threading.Lock()

    def seen(operation: str, path: str) -> None:
        if folder not in path:
            return
        # One count for all threads.
        with lock:
            number = next(numbers)
        for fault in faults:
            if fault.operation <= number < fault.operation + fault.count:
                fault.strike(operation, path)

    return seen


@contextmanager
def of_environment(rank: int, attempt: int) -> Iterator[None]:
    """Apply the faults that the environment has for this rank in this attempt."""
    faults = [f for f in parse(os.environ.get(CHAOS_VARIABLE, "[]")) if (f.rank, f.attempt) == (rank, attempt)]
    if not faults:
        yield
        return
    with hook_disk_operations(fault_hook(faults)):
        yield
