"""How long a training waits for a save of 1 GB, in one process.

Compared are our saves and those of torch, DCP and Lightning. `blocked` is the time that the loop waits: the median over
the saves after the first. The first one, in brackets, also pays for new memory. `written` is the time until the bytes
are on the disk, where the way tells. A plain copy into memory that exists already is the lower bound of every way that
lets the training continue: one is made before each save, which is compared with it. Loading is measured last: ours
verifies every byte, ``torch.load`` verifies nothing.

    python -m tests.bench.checkpoint [--mib 1024] [--rounds 8]
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.bench import record
from toolkit.base import logs
from toolkit.checkpoint.folder import CheckpointFolder
from toolkit.checkpoint.reader import load
from toolkit.config import CheckpointConfig
from toolkit.hang import Activity
from toolkit.ranks.state import Replicated
from toolkit.train.run_checkpoints import Checkpoints

TENSORS = 16

#: Saves step n; returns a call that waits until it is on the disk.
Save = Callable[[int], Callable[[], None]]
Weights = Mapping[str, torch.Tensor]


def nothing() -> None:
    """It is on the disk already, or nobody says when."""


def plain_copy(weights: Weights, folder: Path) -> Save:
    kept = {name: torch.empty_like(value) for name, value in weights.items()}

    def save(step: int) -> Callable[[], None]:
        for name, value in weights.items():
            kept[name].copy_(value)
        return nothing

    return save


def torch_save(weights: Weights, folder: Path) -> Save:
    def save(step: int) -> Callable[[], None]:
        with (folder / f"{step}.pt").open("wb") as file:
            torch.save(weights, file)
            file.flush()
            os.fsync(file.fileno())
        return nothing

    return save


def dcp_save(weights: Weights, folder: Path) -> Save:
    def save(step: int) -> Callable[[], None]:
        dcp.save(dict(weights), checkpoint_id=folder / str(step))
        return nothing

    return save


def dcp_async_save(weights: Weights, folder: Path) -> Save:
    def save(step: int) -> Callable[[], None]:
        future: Any = dcp.async_save(dict(weights), checkpoint_id=folder / str(step))
        return lambda: future.result() and None

    return save


def lightning(weights: Weights, folder: Path) -> Save:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)

    def save(step: int) -> Callable[[], None]:
        fabric.save(folder / f"{step}.ckpt", dict(weights))
        return nothing

    return save


def ours(weights: Weights, folder: Path, *, background: bool) -> Save:
    place = {"rank": 0, "world_size": 1, "attempt": 1, "store": None, "is_main": True, "device": torch.device("cpu")}
    session: Any = SimpleNamespace(**place, run_dir=folder, activity=Activity(), owns_run=lambda: True)
    strategy: Any = SimpleNamespace(state=lambda: {name: Replicated(value) for name, value in weights.items()})
    checkpoints = Checkpoints(CheckpointConfig(background=background), session, strategy, {})

    def save(step: int) -> Callable[[], None]:
        checkpoints.saver.save(step, {})
        return checkpoints.saver.await_save

    return save


PLAIN = "plain copy in memory"
WAYS: Mapping[str, Callable[[Weights, Path], Save]] = {
    PLAIN: plain_copy,
    "torch.save + fsync": torch_save,
    "DCP save": dcp_save,
    "DCP async_save": dcp_async_save,
    "Lightning Fabric.save": lightning,
    "ours, in the foreground": lambda weights, folder: ours(weights, folder, background=False),
    "ours": lambda weights, folder: ours(weights, folder, background=True),
}


def one_way(
    make: Callable[[Weights, Path], Save], weights: Weights, folder: Path, rounds: int
) -> list[tuple[float, float, float]]:
    """(blocked, written, a plain copy just before) of each save."""
    folder.mkdir()
    save, copy = make(weights, folder), plain_copy(weights, folder)
    times = []
    for step in range(1, rounds + 2):
        for value in weights.values():
            value.add_(1.0)
        started = time.perf_counter()
        copy(step)
        copied = time.perf_counter() - started
        for value in weights.values():
            value.add_(1.0)
        started = time.perf_counter()
        wait = save(step)
        blocked = time.perf_counter() - started
        wait()
        times.append((blocked, time.perf_counter() - started, copied))
        shutil.rmtree(folder / str(step - 1), ignore_errors=True)
        (folder / f"{step - 1}.pt").unlink(missing_ok=True)
    return times


def loading(weights: Weights, folder: Path) -> dict[str, float]:
    """Seconds to read what was saved, from the page cache."""
    torch.save(weights, folder / "all.pt")
    found = {}
    started = time.perf_counter()
    torch.load(folder / "all.pt")
    found["torch.load"] = time.perf_counter() - started
    state = {name: Replicated(torch.empty_like(value)) for name, value in weights.items()}
    started = time.perf_counter()
    load(CheckpointFolder(folder / "ours/checkpoints"), state, rank=0, world_size=1, kv=None)
    found["ours, verified"] = time.perf_counter() - started
    return found


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=8)
    record.add_option(parser)
    args = parser.parse_args()
    rows = []
    logs.setup()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    weights = {f"layer{i}": torch.randn(args.mib * 2**18 // TENSORS) for i in range(TENSORS)}
    print(f"{args.mib} MiB{'':20}{'blocked':>9}{'first':>10}{'ratio':>7}{'written':>9}")
    with tempfile.TemporaryDirectory() as name:
        for way, make in WAYS.items():
            try:
                first, *later = one_way(make, weights, Path(name) / way, args.rounds)
            except ImportError:
                continue
            blocked, written, copied = ([*column] for column in zip(*later, strict=True))
            to = [] if way == PLAIN else copied
            rows.append(record.row(f"{way}: blocked", blocked, to=to, peer="a plain copy in memory"))
            rows.append(record.row(f"{way}: written", written))
            held, on_disk = statistics.median(blocked), statistics.median(written)
            ratio = statistics.median(ours / plain for ours, plain in zip(blocked, copied, strict=True))
            told = f"{on_disk:9.2f}" if on_disk > 1.05 * held else ""
            print(f"{way:26}{held:9.3f}{f'({first[0]:.3f})':>10}{ratio:7.1f}{told}", flush=True)
        print()
        plain, own = (loads := loading(weights, Path(name))).values()
        for way, seconds in loads.items():
            print(f"{way:26}{seconds:9.3f}")
        rows.append(record.row("load, ours, verified", [own], to=[plain], peer="torch.load, which verifies nothing"))
    record.write(args.json, rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
