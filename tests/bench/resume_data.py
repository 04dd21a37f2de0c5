"""Samples that a resume within an epoch loses or reads twice, beside other loaders.

Four readers take ``STOPPED`` global batches of the same samples, each in the file format of its loader, and are
stopped. Others continue from their states to the end of the epoch; the size of a global batch stays.
Each peer is used as its documentation says for a resume. A batch is equal if it has the same samples as in an
undisturbed epoch, in any order. Peers run where they are installed (``--peers FOLDER``: a folder that has them).

    python -m tests.bench.resume_data [--peers FOLDER]
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from tests.bench import record
from toolkit.data.loader import Loader
from toolkit.plugins.formats.shards.dataset import ShardedData
from toolkit.ranks.batch import Share

#: Every way of sharing that follows divides these: no loader has to drop or repeat samples to make readers even.
FILES, SAMPLES, BATCH = 24, 4800, 48
STOPPED = 40
#: Samples of a shuffle buffer, of which there is one in each reader; files have 200.
BUFFER = 500
READER_S = 120
#: Readers, and loader workers of each: those that are stopped, and those that continue.
CASES = (((4, 0), (4, 0)), ((4, 0), (3, 0)), ((4, 0), (2, 0)), ((4, 0), (4, 2)), ((4, 2), (4, 2)))

Batches: TypeAlias = list[list[int]]


@dataclass(frozen=True)
class Reader:
    """One of the processes that read an epoch together."""

    folder: Path
    rank: int
    world: int
    workers: int
    state: Any  #: of the reader of the same rank that was stopped; None: it begins
    steps: int | None  #: to stop after; None: it reads to the end of the epoch


Read: TypeAlias = Callable[[Reader], tuple[Batches, Any]]


def write(folder: Path) -> None:
    """Write sample i, the number i, to Parquet files, tars and shards of MosaicML."""
    pa, pq = import_module("pyarrow"), import_module("pyarrow.parquet")
    ids = [list(range(file, SAMPLES, FILES)) for file in range(FILES)]
    (folder / "parquet").mkdir()
    for file, numbers in enumerate(ids):
        pq.write_table(pa.table({"id": numbers}), folder / "parquet" / f"{file:03d}.parquet", row_group_size=50)
    with contextlib.suppress(ImportError):  # the table says what is not installed
        tars: Any = import_module("webdataset")
        (folder / "tar").mkdir()
        for file, numbers in enumerate(ids):
            with tars.TarWriter(str(folder / "tar" / f"{file:03d}.tar")) as writer:
                for number in numbers:
                    writer.write({"__key__": f"{number:06d}", "id": str(number)})
    with contextlib.suppress(ImportError):
        mds: Any = import_module("streaming")
        # A shard of MDS has a greatest size; this one gives about as many files as the others have.
        with mds.MDSWriter(out=str(folder / "mds"), columns={"id": "int"}, size_limit=2600) as out:
            for number in range(SAMPLES):
                out.write({"id": number})


def ours(reader: Reader, kind: str = "parquet") -> tuple[Batches, Any]:
    first = reader.state or 0
    data: Any = ShardedData(reader.folder / kind)
    if kind == "tar":
        data = data.map(lambda sample: {"id": int(sample["id"])})
    share = Share(reader.rank, reader.world)
    loader = Loader(data, global_batch_size=BATCH, seed=0, share=share, workers=reader.workers)
    last = SAMPLES // BATCH if reader.steps is None else first + reader.steps
    batches = [loader.at(step)["id"].tolist() for step in range(first, last)]
    loader.close()
    return batches, last


def taken(loader: Any, ids: Callable[[Any], Iterable[Any]], steps: int | None) -> Batches:
    return [[int(sample) for sample in ids(batch)] for batch in itertools.islice(loader, steps)]


def hugging_face(reader: Reader, buffer: int = BUFFER) -> tuple[Batches, Any]:
    """Read as its pages "Stream" and "Use with PyTorch" say.

    The state is the state_dict of StatefulDataLoader, one for each rank.
    """
    datasets: Any = import_module("datasets")
    node: Any = import_module("datasets.distributed")
    stateful: Any = import_module("torchdata.stateful_dataloader")
    files = sorted(str(path) for path in (reader.folder / "parquet").glob("*.parquet"))
    data = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)
    data = node.split_dataset_by_node(
        data.shuffle(seed=0, buffer_size=buffer), rank=reader.rank, world_size=reader.world
    )
    loader = stateful.StatefulDataLoader(data, batch_size=BATCH // reader.world, num_workers=reader.workers)
    if reader.state is not None:
        loader.load_state_dict(reader.state)
    return taken(loader, lambda batch: batch["id"], reader.steps), loader.state_dict()


def webdataset(reader: Reader, *, resampled: bool) -> tuple[Batches, Any]:
    """Read in one of two ways, for it has no state.

    ``resampled`` is what it documents for several nodes: shards are drawn at random, for as many batches as an epoch
    has. The other way repeats the order of its deterministic shuffles, and skips as many batches as were read.
    """
    wds: Any = import_module("webdataset")
    urls = sorted(str(path) for path in (reader.folder / "tar").glob("*.tar"))
    own = BATCH // reader.world
    read = reader.state or 0
    if resampled:
        data = wds.WebDataset(urls, resampled=True, shardshuffle=False, nodesplitter=wds.split_by_node)
        data = data.shuffle(BUFFER)
    else:
        data = wds.WebDataset(urls, shardshuffle=FILES, detshuffle=True, seed=0, nodesplitter=wds.split_by_node)
        data = data.compose(wds.detshuffle(BUFFER, seed=0))
    loader = wds.WebLoader(data.to_tuple("id").batched(own), batch_size=None, num_workers=reader.workers)
    steps = reader.steps
    # ``read``, the number of batches so far, is the whole state: an epoch's remainder, or what to skip.
    if resampled:
        steps = SAMPLES // BATCH - read if steps is None else steps
    else:
        loader = itertools.islice(loader, read, None)
    return taken(loader, lambda batch: batch[0], steps), read + (steps or 0)


def streaming(reader: Reader) -> tuple[Batches, Any]:
    """Read as its page "Resumption" says: state_dict of StreamingDataLoader, one for all ranks."""
    mds: Any = import_module("streaming")
    own = BATCH // reader.world
    data = mds.StreamingDataset(
        local=str(reader.folder / "mds"), shuffle=True, shuffle_seed=0, batch_size=own, num_canonical_nodes=1
    )
    loader = mds.StreamingDataLoader(data, batch_size=own, num_workers=reader.workers)
    if reader.state is not None:
        loader.load_state_dict(reader.state)
    batches = []
    for batch in loader:
        batches.append(batch["id"].tolist())
        if len(batches) == reader.steps:
            break
    return batches, loader.state_dict()


#: Package and the ways to read with it. The package's name in Python is the last part of its own.
READERS: dict[str, dict[str, Read]] = {
    "pyarrow": {"toolkit, Parquet": ours},
    "datasets": {
        "datasets, files shuffled": partial(hugging_face, buffer=1),
        f"datasets, and a buffer of {BUFFER}": hugging_face,
    },
    "webdataset": {
        "toolkit, tar": partial(ours, kind="tar"),
        "webdataset, resampled": partial(webdataset, resampled=True),
        "webdataset, skips what was read": partial(webdataset, resampled=False),
    },
    "mosaicml-streaming": {"mosaicml-streaming": streaming},
}


def answer(read: Read, reader: Reader, port: int, log: Path, connection: Any) -> None:
    """Read in this process, and send what was read, or the text of an error."""
    numbers = {"RANK": reader.rank, "WORLD_SIZE": reader.world, "LOCAL_RANK": reader.rank}
    numbers |= {"LOCAL_WORLD_SIZE": reader.world, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in numbers.items()}, MASTER_ADDR="127.0.0.1")
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):  # what peers print does not belong to the table
        os.dup2(out, stream)
    try:
        connection.send(read(reader))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {' '.join(str(error).split())}")


def together(
    read: Read, folder: Path, way: tuple[int, int], states: list[Any] | None = None, steps: int | None = None
) -> list[tuple[Batches, Any]]:
    """Return what each of ``way``'s readers read, and its state. Raises RuntimeError with the error of one."""
    world, workers = way
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context, running = multiprocessing.get_context("fork"), []
    for rank in range(world):
        reader = Reader(folder, rank, world, workers, None if states is None else states[rank], steps)
        mine, its = context.Pipe(duplex=False)
        process = context.Process(target=answer, args=(read, reader, port, folder / "peers.log", its))
        process.start()
        its.close()  # else a dead reader's pipe stays open, and poll() sees no end of it
        running.append((process, mine))
    found: list[Any] = []
    try:
        for _, mine in running:
            found.append(mine.recv() if mine.poll(READER_S) else f"no answer after {READER_S} s")
    except EOFError:
        found.append("a reader died")
    finally:
        for process, _ in running:
            # A reader that answered ends by itself; after an error the others may wait for each other.
            process.join(None if isinstance(found[-1], tuple) else 1)
            process.kill()
    for one in found:
        if isinstance(one, str):
            raise RuntimeError(one)
    return found


def global_batches(read: list[tuple[Batches, Any]]) -> Batches:
    """Return the samples of each global batch, those of the first reader first."""
    rows = itertools.zip_longest(*(batches for batches, _ in read), fillvalue=[])
    return [list(itertools.chain.from_iterable(row)) for row in rows]


def resumed(read: Read, folder: Path, stopped: tuple[int, int], later: tuple[int, int]) -> tuple[str, list[int]]:
    """Return the cells of one case, and its numbers: samples lost, samples twice, unequal batches."""
    whole = global_batches(together(read, folder, stopped))[STOPPED:]
    before = together(read, folder, stopped, steps=STOPPED)
    try:
        states = [state for _, state in before][: later[0]]
        after = global_batches(together(read, folder, later, states))
    except RuntimeError as error:
        return f"| refused: {str(error)[:60]} | | |", []
    times = Counter(itertools.chain.from_iterable(global_batches(before) + after))
    pairs = list(zip(whole, after, strict=False))
    equal, in_order = sum(sorted(a) == sorted(b) for a, b in pairs), sum(a == b for a, b in pairs)
    lost, twice = SAMPLES - len(times), times.total() - len(times)
    return f"| {lost} | {twice} | {equal} | {in_order} of {len(whole)} |", [lost, twice, len(whole) - equal]


def main() -> None:
    """Run all and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=Path)
    record.add_option(parser)
    args = parser.parse_args()
    if args.peers is not None:
        sys.path.append(str(args.peers))
    with tempfile.TemporaryDirectory() as name:
        # No index of an earlier run, and nothing asked of a hub.
        os.environ.update(XDG_CACHE_HOME=name, HF_HOME=name, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        folder = Path(name)
        write(folder)
        ways: dict[str, Read] = {}
        for package, readers in READERS.items():
            try:
                import_module(package.split("-")[-1])
                print(f"{package} {version(package)}")
                ways |= readers
            except ImportError as error:
                print(f"{package}: not run, {error.name} is not installed")
        print("\n| readers x workers | | lost | twice | equal batches | of them in order |")
        rows = []
        for (stopped, later), (title, read) in itertools.product(CASES, ways.items()):
            label = f"{stopped[0]} x {stopped[1]} to {later[0]} x {later[1]}"
            cells, counts = resumed(read, folder, stopped, later)
            print(f"| {label} | {title} {cells}", flush=True)
            what = ("samples lost", "samples twice", "unequal batches")
            rows += [
                record.row(f"{label}, {title}: {name}", [count], "", better="less")
                for name, count in zip(what, counts, strict=False)
            ]
        record.write(args.json, rows)


if __name__ == "__main__":
    main()
