"""All-reduces from 4 KB to 64 MB, and a DDP step, over MPI and gloo.

The model of the DDP step has 25 million parameters. The same ranks use both backends in turn, in one run, so that other
load of the machine hits both alike. Figures are medians over the rounds of the slowest rank's time. The ratio is gloo's
time over MPI's: above 1, MPI is ahead. `again` is gloo's time over that of a second gloo group, which should be 1: its
distance from 1 is the error of a ratio on this machine.

    python -m tests.bench.collectives [--ranks 2] [--rounds 20]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.bench import record

KIB = (4, 64, 256, 1024, 4096, 16384, 65536)
Contenders = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kib", type=int, nargs="+", default=KIB, help="sizes of the all-reduces")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    record.add_option(parser)
    given = parser.parse_args()
    if given.folder is not None:
        be_rank(given)
        return
    with tempfile.TemporaryDirectory() as folder:
        mpirun = [str(Path(sys.executable).with_name("mpirun")), "--allow-run-as-root", "--oversubscribe"]
        rank = [sys.executable, "-m", "tests.bench.collectives", *sys.argv[1:], "--folder", folder]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*mpirun, "-n", str(given.ranks), *rank], check=True, env=environ)


def be_rank(given: argparse.Namespace) -> None:
    from toolkit.plugins.mpi import backend as mpi

    torch.set_num_threads(1)
    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    store = dist.FileStore(str(given.folder / "store"), size)
    dist.init_process_group(mpi.register(), store=store, rank=rank, world_size=size)
    groups: dict[str, Any] = {"mpi": dist.group.WORLD}
    # "again" is a second gloo group: the ratio of two equal backends shows the noise.
    groups |= {name: dist.new_group(backend="gloo") for name in ("gloo", "again")}
    if rank == 0:
        print(f"{size} ranks, medians of {given.rounds}")
        print(f"{'':24}{'mpi':>12}{'gloo':>12}{'gloo/mpi':>10}{'again':>8}", flush=True)
    rows = []
    for kib in given.kib:
        name = f"all-reduce {kib} KB" if kib < 1024 else f"all-reduce {kib // 1024} MB"
        rows += compare(
            name, {backend: all_reduce(group, kib * 256) for backend, group in groups.items()}, given.rounds
        )
    steps = {backend: ddp_step(group) for backend, group in groups.items()}
    rows += compare("DDP step, 25 M", steps, max(given.rounds // 4, min(given.rounds, 3)))
    if rank == 0:
        record.write(given.json, rows)
    dist.destroy_process_group()
    mpi.finalize(None, None, None)


def all_reduce(group: dist.ProcessGroup | None, elements: int) -> Callable[[], object]:
    tensor = torch.ones(elements)
    return lambda: dist.all_reduce(tensor.fill_(1.0), group=group)


def ddp_step(group: dist.ProcessGroup | None) -> Callable[[], object]:
    """Return a step of SGD on six layers of 2048 x 2048 and 8 rows.

    Most of it is the sum of 100 MB of gradients.
    """
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6))), process_group=group)
    optimizer, rows = torch.optim.SGD(model.parameters(), 0.01), torch.randn(8, 2048)

    def step() -> None:
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare(name: str, contenders: Contenders, rounds: int) -> list[dict[str, Any]]:
    """Return the rows. All take turns, so that a disturbance hits all; the first two rounds warm up."""
    times: dict[str, list[float]] = {backend: [] for backend in contenders}
    for _ in range(rounds + 2):
        for backend, call in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            times[backend].append(1e3 * slowest(time.perf_counter() - start))
    columns = {backend: times[backend][2:] for backend in ("gloo", "mpi", "again")}
    gloo, mpi, again = map(statistics.median, columns.values())
    if dist.get_rank() == 0:
        print(f"{name:24}{mpi:9.3f} ms{gloo:9.3f} ms{gloo / mpi:10.2f}{gloo / again:8.2f}", flush=True)
    to = columns["gloo"]
    return [record.row(f"{name}: {way}", column, "ms", to=to, peer="gloo") for way, column in columns.items()]


def slowest(seconds: float) -> float:
    worst = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


if __name__ == "__main__":
    main()
