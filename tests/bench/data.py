"""What the order of the samples costs one of 8 ranks: to start an epoch, to resume in its middle, and per index.

`start` and `resume` are the times until the first batch of 64 indices is there, `peak` what the larger of the two took
in memory (resident, above what the process had after its imports: each case has a process of its own), `index` the
time on the CPU for each index that is then read on, in batches of 64. In brackets: how many times ours.

torch's sampler cannot resume within an epoch: it is read up to there. A way that would need more than half of the
memory that is free is not run.

    python -m tests.bench.data [--sizes 1000000 100000000 1000000000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torch.utils.data.distributed import DistributedSampler

from toolkit.data.sampler import TrainSampler
from toolkit.ranks.batch import Share

RANKS, RANK, BATCH = 8, 3, 64
READ_ON = 2000
#: A list of N Python integers: a pointer and an object each, beside torch's tensor of them.
LIST_BYTES = 8 + 32 + 8
#: One round is enough of what takes so long.
LONG_S = 3.0
MIB = 2**20

#: Gives the next batch of indices.
Next = Callable[[], Any]


def ours(size: int, batches: int) -> Next:
    sampler = TrainSampler(size, global_batch_size=RANKS * BATCH, seed=0, share=Share(RANK, RANKS))
    steps = itertools.count(batches)
    return lambda: sampler.at(next(steps)).indices


def torch_sampler(size: int, batches: int) -> Next:
    samples: Any = range(size)
    indices: Iterator[Any] = iter(DistributedSampler(samples, RANKS, RANK))
    rest = itertools.islice(indices, batches * BATCH, None)
    return lambda: list(itertools.islice(rest, BATCH))


def torchdata_sampler(size: int, batches: int) -> Next:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(range(size), RANKS, RANK)
    if batches:
        sampler.load_state_dict({"yielded": batches * BATCH})
    indices = iter(sampler)
    return lambda: list(itertools.islice(indices, BATCH))


@dataclass(frozen=True)
class Way:
    """``bytes_each``: what it needs of memory for each sample of the data set."""

    make: Callable[[int, int], Next]
    bytes_each: int = LIST_BYTES


WAYS: Mapping[str, Way] = {
    "ours": Way(ours, 0),
    "torch DistributedSampler": Way(torch_sampler),
    "torchdata StatefulDistributed": Way(torchdata_sampler),
}


@dataclass(frozen=True)
class Cost:
    first_s: float
    peak_bytes: int
    index_ns: float


def measure(way: str, size: int, batches: int) -> Cost | None:
    """In a process of its own; None when a package is missing."""
    context: Any = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(way, size, batches, sending))
    process.start()
    sending.close()
    cost: Cost | None = receiving.recv()
    process.join()
    return cost


def _measure(way: str, size: int, batches: int, pipe: Connection) -> None:
    try:
        WAYS[way].make(1000, 0)()  # its imports
    except ImportError:
        pipe.send(None)
        return
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: proc(5)
    before = _status("VmRSS")
    started = time.perf_counter()
    following = WAYS[way].make(size, batches)
    following()
    first_s = time.perf_counter() - started
    peak = _status("VmHWM") - before
    reads = min(READ_ON, size // (RANKS * BATCH) // 2 - 1)
    started = time.process_time()
    for _ in range(reads):
        following()
    pipe.send(Cost(first_s, peak, (time.process_time() - started) / (reads * BATCH) * 1e9))


def _status(field: str, path: str = "/proc/self/status") -> int:
    line = next(line for line in Path(path).read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) * 1024


def several(way: str, size: int, batches: int, rounds: int) -> Cost | None:
    """The medians of ``rounds``."""
    found: list[Cost] = []
    while len(found) < rounds:
        cost = measure(way, size, batches)
        if cost is None:
            return None
        found.append(cost)
        if cost.first_s > LONG_S:
            break
    return Cost(
        statistics.median(cost.first_s for cost in found),
        max(cost.peak_bytes for cost in found),
        statistics.median(cost.index_ns for cost in found),
    )


def compare(size: int, rounds: int) -> None:
    """The rows of one size."""
    base: list[float] = []
    for name, way in WAYS.items():
        row = f"{size:>13,}  {name:30}"
        need, free = size * way.bytes_each, _status("MemAvailable", "/proc/meminfo")
        if need > free / 2:
            print(f"{row} not run: it needs {need / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free")
            continue
        start, resume = (several(name, size, batches, rounds) for batches in (0, size // (RANKS * BATCH) // 2))
        if start is None or resume is None:
            print(f"{row} not run: it is not installed")
            continue
        figures = [start.first_s * 1e3, resume.first_s * 1e3, max(start.peak_bytes, resume.peak_bytes) / MIB]
        figures.append(statistics.mean([start.index_ns, resume.index_ns]))
        base = base or [max(figure, 0.01) for figure in figures]
        ratios = [figure / ours for figure, ours in zip(figures, base, strict=True)]
        cells = [
            f"{figure:9.1f} {f'({ratio:.{0 if ratio >= 10 else 1}f})':>9}"
            for figure, ratio in zip(figures, ratios, strict=True)
        ]
        print(row, *cells, flush=True)


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**6, 10**8, 10**9])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    heads = [f"{head:>9}{'':10}" for head in ("start ms", "resume ms", "peak MiB", "index ns")]
    print(f"{'samples':>13}  {'':30}", *heads)
    for size in args.sizes:
        compare(size, args.rounds)


if __name__ == "__main__":
    main()
