"""Read rates of shards, beside the disk's own sequential rate and other loaders.

Each way reads one shuffled epoch of the same samples (``--mib`` of random bytes in samples of 64 KiB) in a process of
its own without workers, first with the page cache empty (cold), then with the files in it (warm). Shares are relative
to a plain sequential read of the same files just before. ``MiB/CPU s`` is the warm rate for each second of CPU time of
the process, threads and kernel included, which changes little where others use the machine. The peers run where they
are installed (``--peers FOLDER``: a folder to import them from). Last comes the time of an index of 10^8 rows.

    python -m tests.bench.shards [--mib 1024] [--rounds 3] [--rows 100000000] [--kinds tar bin] [--peers FOLDER]
"""

import argparse
import io
import multiprocessing
import os
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench import record
from toolkit.data.loader import Loader
from toolkit.plugins.formats.shards.dataset import ShardedData
from toolkit.plugins.formats.shards.raw_tokens import RawTokens
from toolkit.ranks.batch import Share

SAMPLE_BYTES, BATCH, FILES = 64 << 10, 64, 8
MIB = 1 << 20
#: Rows of each file, and of each of its row groups, for the index.
FILE_ROWS, GROUP_ROWS = 1_000_000, 100_000
#: What is measured of a way. Shares of a plain read hold elsewhere.
FIGURES = (
    ("cold", "MiB/s", ""),
    ("of a plain read", "%", "more"),
    ("warm", "MiB/s", ""),
    ("warm, of a plain read", "%", "more"),
    ("warm, a second of CPU", "MiB", ""),
)

#: Yields the number of bytes of each batch of an epoch.
Epoch = Callable[[Path], Iterator[int]]


def contents(mib: int) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the samples of each file."""
    count = mib * MIB // SAMPLE_BYTES // FILES
    for file in range(FILES):
        numbers = np.random.default_rng(file)
        yield file, [numbers.bytes(SAMPLE_BYTES) for _ in range(count)]


def write_parquet(folder: Path, mib: int) -> None:
    pa, pq = import_module("pyarrow"), import_module("pyarrow.parquet")
    for file, samples in contents(mib):
        # Random bytes have no repeats that a dictionary or a codec could use.
        pq.write_table(
            pa.table({"raw": samples}), folder / f"part-{file}.parquet", row_group_size=128, compression="none",
            use_dictionary=False,
        )  # fmt: skip


def write_tars(folder: Path, mib: int) -> None:
    for file, samples in contents(mib):
        with tarfile.open(folder / f"shard-{file:05d}.tar", "w") as archive:
            for number, sample in enumerate(samples):
                member = tarfile.TarInfo(f"{file:03d}{number:06d}.raw")
                member.size = len(sample)
                archive.addfile(member, io.BytesIO(sample))


def write_tokens(folder: Path, mib: int) -> None:
    for file, samples in contents(mib):
        (folder / f"tokens-{file:05d}.bin").write_bytes(b"".join(samples) + b"\0\0")


def ours(folder: Path) -> Iterator[int]:
    data = ShardedData(folder, columns=["raw"])
    loader = Loader(data, global_batch_size=BATCH, seed=0, share=Share(0, 1))
    for step in range(len(data) // BATCH):
        batch = loader.at(step)
        yield sum(map(len, batch["raw"]))


def our_windows(folder: Path) -> Iterator[int]:
    data = RawTokens(folder, SAMPLE_BYTES // 2)
    loader = Loader(data, global_batch_size=BATCH, seed=0, share=Share(0, 1))
    for step in range(len(data) // BATCH):
        yield 2 * loader.at(step).inputs.numel()


def arrow(folder: Path) -> Iterator[int]:
    """Decode each row group in the order of the files, without samples.

    This is the least that the format costs.
    """
    pq = import_module("pyarrow.parquet")
    for path in sorted(folder.glob("*.parquet")):
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                yield file.read_row_group(group, use_threads=False).nbytes


def hugging_face(folder: Path) -> Iterator[int]:
    """Stream with the shuffle buffer that its pages use.

    It has no exact shuffle of Parquet without a copy of its own.
    """
    datasets: Any = import_module("datasets")
    files = [str(path) for path in sorted(folder.glob("*.parquet"))]
    data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    for rows in data.shuffle(seed=0, buffer_size=1000).iter(BATCH):
        yield sum(map(len, rows["raw"]))


def webdataset(folder: Path) -> Iterator[int]:
    wds: Any = import_module("webdataset")
    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    data = wds.WebDataset(urls, shardshuffle=FILES, seed=0).shuffle(1000).to_tuple("raw").batched(BATCH)
    for (raw,) in data:
        yield sum(map(len, raw))


#: Kind of shards, what writes them, and who reads them.
KINDS: dict[str, tuple[Callable[[Path, int], None], dict[str, Epoch]]] = {
    "parquet": (write_parquet, {"ours": ours, "datasets, streamed": hugging_face, "pyarrow, in order": arrow}),
    "tar": (write_tars, {"ours": ours, "webdataset": webdataset}),
    "bin": (write_tokens, {"ours": our_windows}),
}


def forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def sequential(folder: Path) -> Iterator[int]:
    buffer = bytearray(4 * MIB)
    for path in sorted(folder.rglob("*")):
        with path.open("rb", buffering=0) as file:
            while size := file.readinto(buffer):
                yield size


def rates(epoch: Epoch, folder: Path) -> tuple[float, float]:
    """Return the MiB of an epoch for each second, and for each CPU second."""
    started, used = time.perf_counter(), time.process_time()
    size = sum(epoch(folder)) / MIB
    return size / (time.perf_counter() - started), size / (time.process_time() - used)


def measured(epoch: Epoch, folder: Path) -> tuple[float, ...] | None:
    """Return the figures of a round, or None where a way's library is not installed."""
    with suppress(ImportError):
        next(epoch(folder))  # the index is made once, and so is what peers prepare
        forget(folder)
        disk = rates(sequential, folder)[0]
        forget(folder)
        cold = rates(epoch, folder)[0]
        plain = rates(sequential, folder)[0]
        warm, per_cpu = rates(epoch, folder)
        return cold, 100 * cold / disk, warm, 100 * warm / plain, per_cpu
    return None


def apart(*arguments: Any) -> tuple[float, ...] | None:
    """Return what :func:`measured` does, in a process of its own: what one way sets or keeps must not help others."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
        return process.submit(measured, *arguments).result()


def compare(mib: int, rounds: int, scratch: Path, kinds: list[str]) -> Iterator[dict[str, Any]]:
    """Print a line for each way, and yield its rows."""
    print(
        f"{'':30} {'cold':>14} {'of a read':>11} {'warm':>12} {'of a read':>10} {'MiB/CPU s':>10} {'samples/CPU s':>14}"
    )
    for kind in kinds:
        write, readers = KINDS[kind]
        folder = scratch / kind
        folder.mkdir()
        try:
            write(folder, mib)
        except ImportError as error:
            print(f"{kind:9} not run: {error.name} is not installed")
            continue
        # The ways take turns: the rate of a disk that others use changes within a minute.
        found = {name: [apart(epoch, folder)] for name, epoch in readers.items()}
        there = {name: epoch for name, epoch in readers.items() if found[name][0] is not None}
        for _ in range(rounds - 1):
            for name, epoch in there.items():
                found[name].append(apart(epoch, folder))
        by_way = {name: [*zip(*filter(None, found[name]), strict=True)] for name in there}
        for name in readers.keys() - there.keys():
            print(f"{kind:9} {name:20} not run: it is not installed")
        peer = [*readers][-1]  # the fastest of the others
        for name, columns in by_way.items():
            for place, ((what, unit, better), column) in enumerate(zip(FIGURES, columns, strict=True)):
                to = by_way[peer][place] if unit != "%" and name == "ours" != peer in by_way else ()
                yield record.row(
                    f"{kind}, {name}: {what}", column, unit, to=to, peer=peer, better="more" if to else better
                )
            cold, of_disk, warm, of_plain, per_cpu = map(statistics.median, columns)
            print(
                f"{kind:9} {name:20} {cold:8.0f} MiB/s {of_disk:9.0f} % {warm:6.0f} MiB/s {of_plain:8.0f} % "
                f"{per_cpu:10.0f} {per_cpu * MIB / SAMPLE_BYTES:14.0f}",
                flush=True,
            )


def index(rows: int, scratch: Path) -> Iterator[dict[str, Any]]:
    """Time the index of Parquet files with ``rows`` rows in all.

    Each file is a hard link to one file, whose footer is read anew for each link.
    """
    pa, pq = import_module("pyarrow"), import_module("pyarrow.parquet")
    folder = scratch / "rows"
    folder.mkdir()
    size = min(rows, FILE_ROWS)
    pq.write_table(pa.table({"x": np.arange(size)}), scratch / "one.parquet", row_group_size=GROUP_ROWS)
    for number in range(rows // size):
        (folder / f"part-{number:06d}.parquet").hardlink_to(scratch / "one.parquet")
    # The first index fills the cache for the second.
    for what in ("index, cache empty", "index, cache full"):
        started = time.perf_counter()
        data = ShardedData(folder)
        took = time.perf_counter() - started
        print(f"{what:20} {len(data):,} rows in {rows // size} files: {took:.2f} s")
        yield record.row(f"{what}, {len(data):,} rows in {rows // size} files", [took])
    started = time.perf_counter()
    Loader(data, global_batch_size=1024, seed=0, share=Share(0, 8)).at(0)
    took = time.perf_counter() - started
    print(f"{'first batch':20} of 1,024 samples on 8 ranks: {took:.2f} s", flush=True)
    yield record.row("first batch after it, of 1,024 samples on 8 ranks", [took])


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=10**8)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=KINDS)
    record.add_option(parser)
    args = parser.parse_args()
    if args.peers is not None:
        sys.path.append(str(args.peers))
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        os.environ["XDG_CACHE_HOME"] = scratch  # no index of an earlier run
        os.environ["HF_HOME"] = scratch
        folder = Path(scratch).resolve()
        record.write(args.json, [*index(args.rows, folder), *compare(args.mib, args.rounds, folder, args.kinds)])


if __name__ == "__main__":
    main()
