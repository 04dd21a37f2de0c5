"""What the order of the samples costs one of 8 ranks.

`start` and `resume` are the times until the first batch of 64 indices, at the start and in the middle of an epoch.
`peak` is the resident memory that they took, above that of the process after its imports. Each case has a process of
its own. `index` is the CPU time for each index that is read after that, in batches of 64. In brackets: the ratio to
ours.

torch's sampler cannot resume within an epoch: the bench reads it up to the place. A way that would need more than half
of the free memory is not run.

    python -m tests.bench.data [--sizes 1000000 100000000 1000000000] [--rounds 3]
"""

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

from tests.bench import record
from toolkit.data.sampler import TrainSampler
from toolkit.ranks.batch import Share

RANKS, RANK, BATCH = 8, 3, 64
READ_ON = 2000
#: A list of N Python integers: a pointer and an object each, beside torch's tensor of them.
LIST_BYTES = 8 + 32 + 8
#: One round is enough of what takes so long.
LONG_S = 3.0
MIB = 2**20
PEER = "torch DistributedSampler"
FIGURES = (("start", "ms"), ("resume", "ms"), ("peak", "MiB"), ("index", "ns"))

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
    PEER: Way(torch_sampler),
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


def several(way: str, size: int, batches: int, rounds: int) -> list[Cost]:
    """Those of ``rounds``; none when a package is missing."""
    found: list[Cost] = []
    while len(found) < rounds and (cost := measure(way, size, batches)) is not None:
        found.append(cost)
        if cost.first_s > LONG_S:
            break
    return found


def compare(size: int, rounds: int) -> list[dict[str, Any]]:
    """Print the lines of one size, and return its rows."""
    columns: dict[str, list[list[float]]] = {}
    for name, way in WAYS.items():
        line = f"{size:>13,}  {name:30}"
        # Half of the free memory stays free, since a swapping machine would spoil all figures.
        need, free = size * way.bytes_each, _status("MemAvailable", "/proc/meminfo")
        if need > free / 2:
            print(f"{line} not run: it needs {need / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free")
            continue
        start, resume = (several(name, size, batches, rounds) for batches in (0, size // (RANKS * BATCH) // 2))
        if not start:
            print(f"{line} not run: it is not installed")
            continue
        columns[name] = [[cost.first_s * 1e3 for cost in costs] for costs in (start, resume)]
        columns[name].append([cost.peak_bytes / MIB for cost in (*start, *resume)])
        columns[name].append([cost.index_ns for cost in (*start, *resume)])
        figures = [statistics.median(column) for column in columns[name]]
        # Ours is the first of WAYS, so its columns exist; a median of 0 would divide by zero.
        base = [max(statistics.median(column), 0.01) for column in columns["ours"]]
        ratios = [figure / ours for figure, ours in zip(figures, base, strict=True)]
        cells = [
            f"{figure:9.1f} {f'({ratio:.{0 if ratio >= 10 else 1}f})':>9}"
            for figure, ratio in zip(figures, ratios, strict=True)
        ]
        print(line, *cells, flush=True)
    plain = columns.get(PEER, [[]] * len(FIGURES))
    return [
        record.row(f"{size:,} samples, {name}: {what}", column, unit, to=to, peer=PEER)
        for name, found in columns.items()
        for (what, unit), column, to in zip(FIGURES, found, plain, strict=True)
    ]


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**6, 10**8, 10**9])
    parser.add_argument("--rounds", type=int, default=3)
    record.add_option(parser)
    args = parser.parse_args()
    heads = [f"{f'{head} {unit}':>9}{'':10}" for head, unit in FIGURES]
    print(f"{'samples':>13}  {'':30}", *heads)
    record.write(args.json, [row for size in args.sizes for row in compare(size, args.rounds)])


if __name__ == "__main__":
    main()
