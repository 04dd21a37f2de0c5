"""``evidence_rank.py PART``: the script of the runs that `toolkit doctor --prove --gpus` submits.

``measure``: rank 0 writes what the ranks find into ``evidence.json`` of the run, after each piece. ``train``: a
training for `toolkit resume-check`. ``hang N`` and ``lose N``: the last rank of the first N attempts hangs, or
raises the error of a GPU that is gone. It runs as a copy, as a script of a user's would.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import toolkit
from toolkit.base import fsio
from toolkit.config import StrategyConfig
from toolkit.data.datasets import InMemory
from toolkit.devices import accelerator
from toolkit.plugins.site import gpu_measure
from toolkit.ranks.batch import Batch, Share
from toolkit.ranks.session import Session
from toolkit.slurm.network import SYSFS, read_interface
from toolkit.strategies import build_strategy, criterion_objective

RECORD = "evidence.json"
MIB = 2**20
REDUCED_BYTES, REDUCTIONS = 64 * MIB, 10
#: Bytes of the state that is saved by each rank, and how often.
SAVED_BYTES, SAVES = 64 * MIB, 3
#: Steps of a training, samples of each, and of a data set of three epochs.
STEPS, SAMPLES, SET = 20, 16, 160
#: For each length of a step in ms: steps in one turn. The bare loop and ours take turns.
MOST_STEPS = 10_000  #: more than are made
TURNS, TURN_STEPS = 4, {1: 50, 10: 20, 100: 3}


def measure(run: toolkit.TrainingRun) -> Iterator[dict[str, Any]]:
    """Yield the figures, piece by piece. Every rank does the same."""
    device, is_cpu = run.device, run.device.type == "cpu"
    yield {
        "gpu": "" if is_cpu else accelerator.name_of(device),
        "backend": str(dist.get_backend()),
        "interfaces": sorted({*run.gather(os.environ.get("GLOO_SOCKET_IFNAME", ""))} - {""}),
        "others": sorted(set.intersection(*map(set, run.gather(_other_interfaces())))),
        "nodes": len({*run.gather(socket.gethostname())}),
        "ranks": run.world_size,
    }
    values = torch.ones(REDUCED_BYTES // 4, device=device)
    dist.all_reduce(values)
    is_summed = all(run.gather(bool((values == run.world_size).all())))
    seconds = 0.0
    for _ in range(2):  # the first time may load kernels
        began = time.perf_counter()
        for _ in range(REDUCTIONS):
            dist.all_reduce(values)
        _wait(device)
        seconds = time.perf_counter() - began
    moved = 2 * (run.world_size - 1) / run.world_size * REDUCED_BYTES * REDUCTIONS  # as nccl-tests count bus bandwidth
    yield {"is_summed": is_summed, "bus_gb_s": min(run.gather(moved / seconds)) / 1e9}
    if sys.argv[1] == "network":
        return
    size = (256, 16 * MIB, 0.2, 0.2) if is_cpu else (gpu_measure.EDGE, gpu_measure.COPY_BYTES, 2.0, 1.0)
    speeds = gpu_measure.measure([device], *size)
    yield {f"{name}_s": min(run.gather(speed[0])) for name, speed in speeds.items()}
    # In steps of a run, whose state is of the size of a small model.
    run.resumable(state=torch.zeros(SAVED_BYTES // 4, device=device))
    found: dict[str, float] = {}
    pieces = _in_steps(run, found)
    for _ in run.steps(range(MOST_STEPS), total=MOST_STEPS):
        if next(pieces, None) is None:
            break
    yield found
    for name in ("ddp", "fsdp"):
        yield {name: max(run.gather(_distance(run._session, name)))}


def _in_steps(run: toolkit.TrainingRun, found: dict[str, float]) -> Iterator[bool]:
    """Measure across steps. At each ``yield`` a step of the run ends, and the next one begins."""
    yield True
    for length_ms, count in TURN_STEPS.items():
        overhead = yield from _overhead_ms(run, length_ms, count)
        found[f"overhead_{length_ms}_ms"] = max(run.gather(overhead))
    stall = yield from _stall_ms(run)
    found["stall_ms"] = max(run.gather(stall))


def _other_interfaces() -> list[str]:
    """Return this node's network cards that are up, but those that the ranks use."""
    chosen = os.environ.get("NCCL_SOCKET_IFNAME", "").lstrip("=").split(",")
    names = [name for _, name in socket.if_nameindex() if (SYSFS / "class/net" / name / "device").exists()]
    return [name for name in names if name not in chosen and read_interface(SYSFS, name).operstate == "up"]


def _overhead_ms(run: toolkit.TrainingRun, length_ms: int, count: int) -> Generator[bool, None, float]:
    """Return how much longer a step of ``length_ms`` is in our loop than in a bare one: the difference of medians.

    The ranks of both meet in each step.
    """
    matrix = torch.ones(256, 256, device=run.device)
    products = max(1, round(length_ms / 1000 * gpu_measure.rate(lambda: matrix @ matrix, run.device, 0.05)))
    seconds: dict[str, list[float]] = {"bare": [], "ours": []}
    for name in [*seconds] * TURNS:
        began = time.perf_counter()
        for _ in range(count):
            for _ in range(products):
                torch.mm(matrix, matrix)
            _wait(run.device)
            dist.barrier()
            if name == "ours":
                run.log(loss=0.0)
                yield True
            now = time.perf_counter()
            seconds[name].append(now - began)
            began = now
    bare, ours = (statistics.median(each) for each in seconds.values())
    return 1000 * (ours - bare)


def _stall_ms(run: toolkit.TrainingRun) -> Generator[bool, None, float]:
    """Return how much longer a step with a save is than one without, medians."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for saves in [False, True] * SAVES:
        for _ in range(10):  # a save that is still written delays the next one
            time.sleep(0.05)
            yield True
        dist.barrier()
        began = time.perf_counter()
        if saves:
            run.save()
        yield True
        seconds[saves].append(time.perf_counter() - began)
    return 1000 * (statistics.median(seconds[True]) - statistics.median(seconds[False]))


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _model() -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)
    return nn.Sequential(nn.Flatten(), *layers)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _batch(share: Share, step: int, device: torch.device) -> Batch:
    draw = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(SAMPLES, 64, generator=draw), torch.randint(10, (SAMPLES,), generator=draw)
    start, stop = share.bounds(SAMPLES)
    return Batch((inputs[start:stop], targets[start:stop]), torch.arange(start, stop), SAMPLES).to(device)


def _distance(session: Session, name: str) -> float:
    """Train on all ranks, and by hand on this rank's device alone. Return the largest relative distance of losses."""
    device = session.device
    strategy = build_strategy(StrategyConfig(name), session)
    criterion = criterion_objective(lambda outputs, targets: (cross_entropy(outputs, targets, reduction="sum"), None))
    strategy.build(_model, _optimizer, criterion, _batch(strategy.share, 0, device))
    model = _model().to(device)
    optimizer, farthest = _optimizer(model), 0.0
    for step in range(STEPS):
        output = strategy.step(_batch(strategy.share, step, device), 0.1)
        batch = _batch(Share(0, 1), step, device)
        loss = cross_entropy(model(batch.inputs), batch.targets)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        expected = loss.item()
        farthest = max(farthest, abs(strategy.sum({"loss": output.loss})["loss"] - expected) / expected)
    return farthest


def train(run: toolkit.TrainingRun) -> None:
    """Train with dropout and AdamW, over several epochs: all of it is state."""
    draw = torch.Generator().manual_seed(0)
    samples = InMemory(torch.randn(SET, 1, 8, 8, generator=draw), torch.randint(10, (SET,), generator=draw))
    model = DistributedDataParallel(nn.Sequential(_model(), nn.Dropout(0.1)).to(run.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run.resumable(model=model, optimizer=optimizer)
    for batch in run.steps(run.loader(samples, global_batch_size=SAMPLES, workers=0), total=3 * SET // SAMPLES):
        loss = cross_entropy(model(batch.inputs), batch.targets)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
        run.log(loss=loss)


def fail(run: toolkit.TrainingRun, how: str) -> None:
    """Make some steps. The last rank of the first attempts does not come to the end of the third."""
    is_bad = run.rank == run.world_size - 1 and int(os.environ["TOOLKIT_ATTEMPT"]) <= int(sys.argv[2])
    state = {"steps": 0}
    run.resumable(state=state)
    for number in run.steps(range(10), total=10):
        if number == 2 and is_bad:
            if how == "lose":
                raise RuntimeError("CUDA error: GPU is lost")  # as the driver's error arrives
            fsio.write_json(run.dir / RECORD, {"hung": time.time()})
            while True:
                time.sleep(1)
        state["steps"] += 1
        run.gather(number)


def main(part: str) -> None:
    with toolkit.start() as run:
        if part == "train":
            train(run)
        elif part in ("hang", "lose"):
            fail(run, part)
        else:
            found: dict[str, Any] = {}
            for piece in measure(run):
                found |= piece
                if run.rank == 0:
                    fsio.write_json(Path(run.dir) / RECORD, found)


if __name__ == "__main__":
    main(sys.argv[1])
