"""Ranks as threads around torch's in-process store."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.distributed import HashStore

from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.reader import Loaded, load
from toolkit.checkpoint.writer import save
from toolkit.ranks.state import Entry, Replicated, State


def on_ranks(count: int, body: Callable[[int, HashStore], Any]) -> list[Any]:
    """Run ``body(rank, kv)`` on all ranks at the same time. Returns what each returned or raised, by rank."""
    kv = HashStore()

    def run(rank: int) -> Any:
        try:
            return body(rank, kv)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def save_on(folder: Path, states: Sequence[State], step: int = 3, **how: Any) -> list[Any]:
    """Save on as many ranks as there are states. Returns the path that each has got, or its error."""

    def run(rank: int, kv: HashStore) -> Path:
        return save(CheckpointFolder(folder), step, states[rank], {}, rank=rank, world_size=len(states), kv=kv, **how)

    return on_ranks(len(states), run)


def load_on(folder: Path, states: Sequence[State], **how: Any) -> list[Any]:
    """Load into each rank's state. Returns what each rank has loaded, or its error."""

    def run(rank: int, kv: HashStore) -> Loaded | None:
        return load(CheckpointFolder(folder), states[rank], rank=rank, world_size=len(states), kv=kv, **how)

    return on_ranks(len(states), run)


def alone(checkpoints: CheckpointFolder, step: int, state: State, **meta: Any) -> Path:
    """Save with one rank."""
    return save(checkpoints, step, state, meta, rank=0, world_size=1, kv=None)


def load_alone(checkpoints: CheckpointFolder, state: State, **how: Any) -> Loaded | None:
    """Load with one rank."""
    return load(checkpoints, state, rank=0, world_size=1, kv=None, **how)


def weights(value: float) -> State:
    """Return a small state whose every element is `value`."""
    return {"model/weight": Replicated(torch.full((3, 4), value)), "optim/count": Replicated(int(value))}


def tensor_of(entry: Entry) -> torch.Tensor:
    """Return the value of an entry that holds a tensor."""
    assert isinstance(entry.value, torch.Tensor)
    return entry.value


def blank(path: Path) -> None:
    """Make every byte of the file 0."""
    path.write_bytes(bytes(path.stat().st_size))


class Bomb:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)
