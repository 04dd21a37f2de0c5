"""The file operations of the code under test: recorded, or failing on demand."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

#: Functions of ``os`` that the writers of the toolkit use directly or through ``pathlib``.
OPERATIONS = ("mkdir", "chmod", "open", "fchmod", "fsync", "fdatasync", "replace", "rename", "unlink", "rmdir")


class Killed(BaseException):
    """Stands for the death of the process. No handler of an Exception catches it."""


@contextmanager
def killed_at(number: int) -> Iterator[None]:
    """Die at operation ``number`` of this thread, from 0 on. The dead do nothing more: each later one raises, too."""
    count = 0

    def die(name: str, path: str) -> None:
        nonlocal count
        count += 1
        if count > number:
            raise Killed

    with pytest.raises(Killed), file_operations(die):
        yield


@contextmanager
def file_operations(seen: Callable[[str, str], None]) -> Iterator[None]:
    """Call ``seen`` with name and path before each operation of this thread that changes the disk; it may raise.

    A ``write`` to a file of `os.fdopen` is seen when half of it is in the file: what raises there leaves a torn one.
    """
    thread = threading.get_ident()

    def note(name: str, target: Any) -> None:
        if threading.get_ident() == thread:
            is_open = isinstance(target, int)
            seen(name, str(Path(f"/proc/self/fd/{target}").readlink()) if is_open else os.fspath(target))

    def noting(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            if name != "open" or (args and args[0] & os.O_CREAT):  # opening a file for reading changes nothing
                note(name, target)
            return real(target, *args, **kwargs)

        return call

    real_fdopen = os.fdopen

    def fdopen(fd: int, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        file = real_fdopen(fd, mode, *args, **kwargs)
        return _InHalves(file, lambda: note("write", fd)) if "w" in mode else file

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, noting(name, getattr(os, name)))
        patch.setattr(os, "fdopen", fdopen)
        yield


class _InHalves:
    """A file that is written in two halves."""

    def __init__(self, file: Any, between: Callable[[], None]) -> None:
        self._file, self._between = file, between

    def write(self, data: bytes | memoryview) -> int:
        half = len(data) // 2
        self._file.write(data[:half])
        self._file.flush()
        self._between()
        self._file.write(data[half:])
        return len(data)

    def __enter__(self) -> _InHalves:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
