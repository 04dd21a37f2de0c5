"""Ranks as threads around torch's own in-process store, and file operations that are recorded or fail on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore

from toolkit import chaos
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.reader import Loaded, load
from toolkit.checkpoint.writer import save
from toolkit.ranks.state import Entry, Replicated, State


def on_ranks(count: int, body: Callable[[int, HashStore], Any]) -> list[Any]:
    """What `body(rank, kv)` returned or raised on each rank, all of them running at the same time."""
    kv = HashStore()

    def run(rank: int) -> Any:
        try:
            return body(rank, kv)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def alone(checkpoints: CheckpointFolder, step: int, state: State, **meta: Any) -> Path:
    """Save with one rank."""
    return save(checkpoints, step, state, meta, rank=0, world_size=1, kv=None)


def load_alone(checkpoints: CheckpointFolder, state: State, **how: Any) -> Loaded | None:
    """Load with one rank."""
    return load(checkpoints, state, rank=0, world_size=1, kv=None, **how)


def weights(value: float) -> State:
    """A small state whose every element is `value`."""
    return {"model/weight": Replicated(torch.full((3, 4), value)), "optim/count": Replicated(int(value))}


def tensor_of(entry: Entry) -> torch.Tensor:
    """The value of an entry that holds a tensor."""
    assert isinstance(entry.value, torch.Tensor)
    return entry.value


def blank(path: Path) -> None:
    """Make every byte of the file 0."""
    path.write_bytes(bytes(path.stat().st_size))


class Killed(BaseException):
    """The process is dead: no handler of an Exception sees it."""


@contextmanager
def file_operations(seen: Callable[[str, str], None]) -> Iterator[None]:
    """`chaos.watch` for the thread that entered; others are left alone."""
    thread = threading.get_ident()
    with chaos.watch(lambda operation, path: seen(operation, path) if threading.get_ident() == thread else None):
        yield
