"""Ranks as threads around torch's own in-process store, and file operations that are recorded or fail on demand."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed import HashStore

from toolkit.checkpoint.reader import Loaded, load
from toolkit.checkpoint.store import CheckpointStore
from toolkit.checkpoint.writer import save
from toolkit.dist.state import Replicated, State

T = TypeVar("T")
OPERATIONS = ("mkdir", "chmod", "open", "fchmod", "fsync", "replace", "rename", "unlink", "rmdir")


def on_ranks(count: int, body: Callable[[int, HashStore], T]) -> list[T | Exception]:
    """What `body(rank, kv)` returned or raised on each rank, all of them running at the same time."""
    kv = HashStore()

    def run(rank: int) -> T | Exception:
        try:
            return body(rank, kv)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def alone(store: CheckpointStore, step: int, state: State, **meta: Any) -> Path:
    """Save with one rank."""
    return save(store, step, state, meta, rank=0, world_size=1, kv=None)


def load_alone(store: CheckpointStore, state: State, *, read_only: bool = False) -> Loaded | None:
    """Load with one rank."""
    return load(store, state, rank=0, world_size=1, kv=None, read_only=read_only)


def weights(value: float) -> State:
    """A small state whose every element is `value`."""
    return {"model/weight": Replicated(torch.full((3, 4), value)), "optim/count": Replicated(int(value))}


class Killed(BaseException):
    """The process is dead: no handler of an Exception sees it."""


@contextmanager
def file_operations(seen: Callable[[str, str], None]) -> Iterator[None]:
    """Call `seen(operation, path)` before each operation of `os` that changes the disk; what it raises is the outcome.

    Other threads than the one that entered are left alone.
    """
    thread = threading.get_ident()

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *args: Any, **kwargs: Any) -> Any:
            changes = name != "open" or (args and args[0] & os.O_CREAT)
            if changes and threading.get_ident() == thread:
                path = Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else os.fspath(target)
                seen(name, str(path))
            return real(target, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, watched(name, getattr(os, name)))
        yield
