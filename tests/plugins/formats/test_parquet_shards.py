"""Parquet as a data set with an index. The oracle is pyarrow's own reading of the same files."""

import io
import logging
import os
import re
import subprocess
import tarfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.process_limits import ChangeLimits
from tests.waiting import wait_for
from toolkit.base.errors import ConfigError, DataMissingError, JobFailedError
from toolkit.data.loader import Loader
from toolkit.data.sampler import BatchPart
from toolkit.data.workers import stacked
from toolkit.plugins.formats.shards.dataset import ShardedData
from toolkit.plugins.formats.shards.parquet import ParquetFormat
from toolkit.plugins.formats.shards.raw_tokens import RawTokens
from toolkit.ranks.batch import Batch, Share

ROWS = 100


def table(first: int, rows: int = ROWS) -> Any:
    ids = np.arange(first, first + rows)
    return pa.table(
        {
            "id": pa.array(ids),
            "x": pa.array(np.outer(ids, [1.0, 0.5]).astype(np.float32).tolist(), pa.list_(pa.float32(), 2)),
            "words": pa.array([list(range(i % 3)) for i in ids], pa.list_(pa.int32())),
            "even": pa.array(ids % 2 == 0),
            "name": [f"sample {i}" for i in ids],
            "picture": [bytes([i % 256]) * 3 for i in ids],
        }
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write three files of 100 rows, in row groups of 30."""
    for number in range(3):
        pq.write_table(table(number * ROWS), tmp_path / f"part-{number}.parquet", row_group_size=30)
    return tmp_path


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def test_every_sample_is_what_pyarrow_reads(folder: Path) -> None:
    data = ShardedData(folder)
    assert len(data) == 3 * ROWS
    expected = pq.read_table(folder).to_pylist()
    assert [{name: plain(value) for name, value in data[i].items()} for i in range(len(data))] == expected
    assert data[3]["id"].dtype == torch.int64
    assert (data[3]["x"].dtype, data[3]["words"].dtype, data[3]["even"].dtype) == (
        torch.float32,
        torch.int32,
        torch.bool,
    )


def test_a_batch_is_the_stack_of_its_samples(folder: Path) -> None:
    data = ShardedData(folder, columns=["x", "name", "id", "picture"])
    chosen = np.array([299, 0, 31, 150, 31])
    batch, one_by_one = data.batch(chosen), stacked([data[int(i)] for i in chosen])
    assert batch["name"] == one_by_one["name"]
    assert batch["picture"] == one_by_one["picture"]
    assert torch.equal(batch["x"], one_by_one["x"])
    assert batch["id"].tolist() == chosen.tolist()
    assert list(batch) == ["x", "name", "id", "picture"]


def ids_of(data: Any, steps: range, share: Share, workers: int, batch: int = 32) -> list[list[int]]:
    loader = Loader(data, global_batch_size=batch, seed=0, share=share, workers=workers)
    try:
        return [loader.at(step)["id"].tolist() for step in steps]
    finally:
        loader.close()


def read_by_worlds(open_data: Callable[[], Any], count: int, batch: int, workers: Sequence[int]) -> None:
    """Read two epochs with one process, and with 3, 2 and then 4 ranks, whose loaders have so many workers."""
    steps = -(-2 * count // batch)
    whole = [sample for each in ids_of(open_data(), range(steps), Share(0, 1), 0, batch) for sample in each]
    assert sorted(whole[:count]) == sorted(whole[count : 2 * count]) == list(range(count))
    cuts = (0, steps // 3, steps * 3 // 5, steps)
    parts: list[int] = []
    for first, last, world, number in zip(cuts, cuts[1:], (3, 2, 4), workers, strict=False):
        ranks = [ids_of(open_data(), range(first, last), Share(r, world), number, batch) for r in range(world)]
        parts += [sample for batches in zip(*ranks, strict=True) for each in batches for sample in each]
    assert parts == whole


def test_worlds_workers_and_resumes_read_every_sample_once(folder: Path) -> None:
    read_by_worlds(lambda: ShardedData(folder, columns=["id"], lanes=4), 300, 32, (2, 0, 1))


def test_worlds_workers_and_resumes_read_every_sample_of_tars_once(tars: Path) -> None:
    read_by_worlds(lambda: ShardedData(tars, lanes=4).map(numbered), 60, 8, (1, 0, 0))


def test_a_transform_is_applied_and_seeded_by_position(folder: Path) -> None:
    data = ShardedData(folder, columns=["id"]).map(lambda row: {"id": row["id"], "noise": torch.rand(())})
    two = [Loader(data, global_batch_size=8, seed=1, share=Share(0, 1), workers=workers) for workers in (0, 1)]
    batches = [loader.at(2) for loader in two]
    two[1].close()
    assert torch.equal(batches[0]["noise"], batches[1]["noise"])
    assert len(set(batches[0]["noise"].tolist())) == 8


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits) -> list[tuple[str, int, bool]]:
    """Return a list of the row groups that are read: of which file, which, and whether by the main thread."""
    found: list[tuple[str, int, bool]] = []
    plain_open = ParquetFormat.open
    change_limits(kept_samples=0)

    def spying(self: Any, path: Path, file: Any, block: int, columns: Any) -> Any:
        found.append((path.name, block, threading.current_thread() is threading.main_thread()))
        return plain_open(self, path, file, block, columns)

    monkeypatch.setattr(ParquetFormat, "open", spying)
    return found


def test_each_row_group_is_read_once_by_one_rank(folder: Path, opened: list[tuple[str, int, bool]]) -> None:
    for rank in range(4):
        ids_of(ShardedData(folder, columns=["id"], lanes=4), range(9), Share(rank, 4), 0)
    assert len({(name, block) for name, block, _ in opened}) == 12
    assert len(opened) <= 12 + 4  # a row group at the edge of two lanes belongs to both


def test_row_groups_of_later_batches_are_read_ahead_by_threads(
    folder: Path, opened: list[tuple[str, int, bool]]
) -> None:
    data = ShardedData(folder, columns=["id"], lanes=2)
    loader = Loader(data, global_batch_size=8, seed=0, share=Share(0, 1))
    loader.at(0)
    wait_for(lambda: len(opened) == 4, 5, "two lanes, and what follows in each")
    for step in range(1, 38):
        loader.at(step)
    assert not any(in_main for *_, in_main in opened)
    assert len({(name, block) for name, block, _ in opened}) == 12


def test_the_kernel_is_asked_for_the_wanted_columns_of_what_every_lane_reads_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change_limits: ChangeLimits
) -> None:
    asked: list[tuple[int, int]] = []
    plain_advise = os.posix_fadvise

    def spying(fd: int, begin: int, length: int, advice: int) -> None:
        plain_advise(fd, begin, length, advice)
        asked.append((begin, length))

    monkeypatch.setattr(os, "posix_fadvise", spying)
    change_limits(blocks_read_ahead=1)
    data = ShardedData(folder, columns=["id"], lanes=6)
    order = data.block_order(0, 12)
    following = order.following(0, 12)
    for _ in range(2):  # a block is asked for once
        data.read_ahead(order, BatchPart(order.at(np.arange(12)), 0, 12))
    wait_for(lambda: len(asked) >= len(following) - 1, 5, "all but the one that is read")
    assert len(asked) == len(following) - 1 > 1
    footers = [pq.read_metadata(path) for path in folder.rglob("*.parquet")]
    groups = [footer.row_group(number) for footer in footers for number in range(footer.num_row_groups)]
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    ids = [chunk for chunk in chunks if chunk.path_in_schema == "id"]
    begins = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in ids]
    assert {*asked} <= {*zip(begins, [chunk.total_compressed_size for chunk in ids], strict=True)}


def test_a_worker_does_not_wait_for_what_its_parent_had_begun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, begun = ShardedData(folder, columns=["id"], lanes=2), threading.Event()
    release, plain_open = threading.Event(), ParquetFormat.open

    def slow_in_threads(self: Any, *given: Any) -> Any:
        if os.getpid() == parent and begun.is_set():
            release.wait()
        # the parent's threads block, so the forked worker inherits unfinished reads
        return plain_open(self, *given)

    parent = os.getpid()
    monkeypatch.setattr(ParquetFormat, "open", slow_in_threads)
    expected = ids_of(ShardedData(folder, columns=["id"], lanes=2), range(9), Share(0, 1), 0)
    begun.set()
    order = data.block_order(0, 32)
    data.read_ahead(order, BatchPart(order.at(np.arange(32)), 0, 32))
    try:
        assert ids_of(data, range(9), Share(0, 1), 1) == expected
    finally:
        release.set()


def spark_folder(root: Path, *, days: dict[str, int]) -> Path:
    for number, (day, rows) in enumerate(days.items()):
        place = root / day
        place.mkdir(parents=True)
        pq.write_table(table(number * ROWS, rows), place / "part-00000-0f.c000.snappy.parquet")
        (place / ".part-00000-0f.c000.snappy.parquet.crc").write_bytes(b"crc")
    (root / "_SUCCESS").touch()
    (root / "._SUCCESS.crc").write_bytes(b"crc")
    return root


def test_partitions_of_spark_are_columns(tmp_path: Path) -> None:
    root = spark_folder(tmp_path / "data", days={"day=1/at=a%20b": 10, "day=2/at=c": 10})
    data = ShardedData(root, columns=["id", "day", "at"])
    assert (data[0]["day"].item(), data[0]["at"]) == (1, "a b")
    batch = data.batch(np.array([12, 3]))
    assert batch["day"].tolist() == [2, 1]
    assert batch["at"] == ["c", "a b"]


def test_an_empty_partition_is_named_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = spark_folder(tmp_path / "data", days={"day=1": 10, "day=2": 0})
    (root / "day=3").mkdir()
    logging.getLogger("toolkit").propagate = True
    assert len(ShardedData(root)) == 10
    assert "shards without samples: day=2/part-00000-0f.c000.snappy.parquet" in caplog.text
    assert "the partition day=3 is empty" in caplog.text


def test_shards_that_are_being_written_are_refused(tmp_path: Path) -> None:
    root = spark_folder(tmp_path / "data", days={"day=1": 10})
    (root / "_temporary").mkdir()
    with pytest.raises(ConfigError, match=r"_temporary: what wrote these shards has not finished"):
        ShardedData(root)


def refused(folder: Path, *words: str, **arguments: Any) -> None:
    with pytest.raises((ConfigError, DataMissingError)) as error:
        ShardedData(folder, **arguments)
    for word in words:
        assert word in str(error.value)


def test_a_missing_column_is_named_with_the_nearest_one(folder: Path) -> None:
    refused(folder, "part-0.parquet: has no column 'nam'", "did you mean 'name'?", columns=["id", "nam"])


def test_mixed_schemas_are_named_with_both_files(folder: Path) -> None:
    pq.write_table(pa.table({"id": ["a"], "label": [1]}), folder / "part-9.parquet")
    refused(folder, "part-9.parquet: column 'id' is string", "in part-0.parquet it is int64", columns=["id"])
    refused(folder, "part-9.parquet")
    pq.write_table(table(0, 5).append_column("more", pa.array(range(5))), folder / "part-9.parquet")
    refused(folder, "part-9.parquet: has the column 'more', and part-0.parquet does not")
    assert len(ShardedData(folder, columns=["id"])) == 3 * ROWS + 5


def test_a_torn_file_is_named(folder: Path) -> None:
    path = folder / "part-1.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    refused(folder, f"{path}: its samples cannot be counted", "truncated")


def test_a_file_without_a_byte_is_named_and_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = len(ShardedData(folder))
    (folder / "part-00.parquet").touch()
    assert len(ShardedData(folder)) == before
    assert "shards without samples: part-00.parquet" in caplog.text


def test_folders_without_shards_or_samples_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataMissingError, match="none: there is no such folder"):
        ShardedData(tmp_path / "none")
    pq.write_table(table(0, 0), tmp_path / "empty.parquet")
    (tmp_path / "none.parquet").touch()
    refused(tmp_path, "its shards hold no samples: none.parquet, empty.parquet")
    refused(tmp_path, "lanes: 0", lanes=0)


def test_shards_below_a_link_are_found_and_hidden_ones_are_not(tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (data / "_old").mkdir(parents=True)
    (data / "_old" / "a.parquet").write_bytes(b"")
    refused(data, "there are no shards in it")
    pq.write_table(table(0), elsewhere / "a.parquet")
    (data / "linked").symlink_to(elsewhere, target_is_directory=True)
    assert len(ShardedData(data)) == ROWS


def damage(path: Path, group: int) -> None:
    """Overwrite the first column of a row group; the footer stays."""
    column = pq.read_metadata(path).row_group(group).column(0)
    content = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    content[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(content)


def all_ids(loader: Loader, steps: int) -> tuple[list[int], set[int]]:
    batches = [batch for step in range(steps) if isinstance(batch := loader.at(step), Batch)]
    return [i for batch in batches for i in batch["id"].tolist()], {bad.index for b in batches for bad in b.bad}


def test_a_damaged_row_group_goes_by_the_rule_for_bad_samples(folder: Path) -> None:
    damage(folder / "part-1.parquet", 2)
    data, lost = ShardedData(folder, columns=["id"]), set(range(160, 190))
    given: dict[str, Any] = {"global_batch_size": 30, "seed": 0, "share": Share(0, 1)}
    with pytest.raises(JobFailedError, match=r"row group 2: .*part-1\.parquet"):
        all_ids(Loader(data, **given), 10)
    ids, bad = all_ids(Loader(data, max_bad_samples=100, **given), 10)
    assert bad == lost
    assert len(ids) == 300
    assert set(ids) == set(range(300)) - lost


def test_a_null_is_no_number(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [1, None, 3]}), tmp_path / "a.parquet")
    data = ShardedData(tmp_path)
    assert [data[i]["id"] for i in range(3)] == [1, None, 3]
    with pytest.raises(JobFailedError, match=r"a\.parquet, row 1.*: id is null"):
        data.batch(np.array([2, 1, 0]))


def test_a_null_does_not_change_the_type_of_the_values_beside_it(tmp_path: Path) -> None:
    columns = {
        "number": pa.array([1.5, 2.5, None, 4.5], pa.float32()),
        "flag": pa.array([True, False, None, True]),
        "pair": pa.array([[1, 2], [3, 4], None, [7, 8]], pa.list_(pa.int32(), 2)),
        "list": pa.array([[1], [2], None, [4]], pa.list_(pa.int16())),
        "holed": pa.array([[1], [2], [None], [4]], pa.list_(pa.int16())),
        "text": pa.array(["a", "b", None, "d"]),
        "nothing": pa.array([[1], [2], None, None], pa.list_(pa.int16())),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=2)
    data = ShardedData(tmp_path)
    assert [data[2][name] for name in columns] == [None, None, None, None, [None], None, None]
    for name in columns.keys() - {"text", "nothing"}:
        one = ShardedData(tmp_path, columns=[name])
        without, mixed, single = (one.batch(np.array(rows))[name] for rows in ([0, 1], [3, 0], [3]))
        assert without.dtype == mixed.dtype == single.dtype == data[3][name].dtype
        assert mixed.tolist() == [plain(data[3][name]), plain(data[0][name])] == columns[name].take([3, 0]).to_pylist()
    assert ShardedData(tmp_path, columns=["text"]).batch(np.array([3, 0])) == {"text": ["d", "a"]}


def test_a_shard_that_changes_during_the_run_is_named(folder: Path) -> None:
    data = ShardedData(folder)
    pq.write_table(table(7000), folder / "part-2.parquet", row_group_size=30)
    assert data[0]["id"].item() == 0
    with pytest.raises(OSError, match=r"row group 0: the shard has changed since this run began.*part-2\.parquet"):
        data[200]


def test_a_shard_that_changes_between_runs_is_named_and_no_longer_the_same_data(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("toolkit").propagate = True
    before = ShardedData(folder).fingerprint()
    os.utime(folder / "part-0.parquet")  # the same content, copied again: the same data
    assert ShardedData(folder).fingerprint() == before
    pq.write_table(table(7000), folder / "part-2.parquet", row_group_size=30)
    assert ShardedData(folder).fingerprint() != before
    assert "New or changed: part-2.parquet. Gone: none" in caplog.text
    assert ShardedData(folder, lanes=3).fingerprint() != ShardedData(folder).fingerprint()


def test_an_index_is_read_from_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ShardedData(folder)
    scanned: list[str] = []
    plain_scan = ParquetFormat.scan
    monkeypatch.setattr(ParquetFormat, "scan", lambda self, path: scanned.append(path.name) or plain_scan(self, path))
    second = ShardedData(folder)
    assert scanned == []
    assert second.fingerprint() == first.fingerprint()
    assert [second[i]["id"].item() for i in (0, 299)] == [0, 299]
    pq.write_table(table(300), folder / "part-3.parquet")
    assert len(ShardedData(folder)) == 400
    assert scanned == ["part-3.parquet"]


def test_a_damaged_cache_is_made_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("toolkit").propagate = True
    ShardedData(folder)
    (cached,) = Path(os.environ["XDG_CACHE_HOME"]).rglob("*.npz")
    content = cached.read_bytes()
    for broken in (b"", content[: len(content) // 2], b"x" * 100):
        cached.write_bytes(broken)
        assert len(ShardedData(folder)) == 300
    assert len(re.findall("is damaged and is rebuilt", caplog.text)) == 3
    assert cached.stat().st_mode & 0o777 == 0o600


TAR_SAMPLES = 60


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> None:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def members_of(first: int, count: int) -> list[tuple[str, bytes]]:
    return [
        (f"{i:06d}.{kind}", content)
        for i in range(first, first + count)
        for kind, content in (("jpg", bytes([i]) * (500_000 + i % 7)), ("cls", str(i).encode()))
    ]


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    """Write two tars of 30 samples, in blocks of about 8."""
    for number in range(2):
        write_tar(tmp_path / f"shard-{number}.tar", members_of(30 * number, 30))
    return tmp_path


def numbered(sample: dict[str, Any]) -> dict[str, int]:
    return {"id": int(sample["cls"])}


def test_every_sample_of_a_tar_is_what_tarfile_reads(tars: Path) -> None:
    (tars / "shard-1.tar").unlink()
    long = "deep/" * 30 + "a" * 150  # a name that needs a header of its own
    with tarfile.open(tars / "shard-1.tar", "w") as archive:
        archive.add(tars, "./folder", recursive=False)
        for name, content in [("__meta__.json", b"{}"), ("README", b"x"), (f"{long}.jpg", b"J"), (f"{long}.cls", b"9")]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    data = ShardedData(tars)
    expected: dict[str, dict[str, Any]] = {}
    for path in sorted(tars.glob("*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                key, _, kind = member.name.partition(".")
                if kind in ("jpg", "cls"):
                    expected.setdefault(key, {"__key__": key})[kind] = archive.extractfile(member).read()
    assert [data[i] for i in range(len(data))] == list(expected.values())
    assert data.batch(np.array([30, 4]))["cls"] == [b"9", b"4"]


def test_a_sample_of_a_tar_that_lacks_a_member_is_named(tars: Path) -> None:
    write_tar(
        tars / "shard-1.tar", [("a.jpg", b"1"), ("a.cls", b"1"), ("b.jpg", b"2"), ("c.jpg", b"2"), ("c.cls", b"1")]
    )
    refused(tars, "shard-1.tar: column 'cls' cannot be read: sample b lacks it")
    assert len(ShardedData(tars, columns=["jpg"])) == 33
    write_tar(tars / "shard-1.tar", [("a.jpg", b"1"), ("a.jpg", b"1"), ("a.cls", b"1")])
    refused(tars, "column 'jpg' cannot be read: sample a has it twice")
    refused(tars, "has no column 'text'", columns=["text"])


def test_a_tar_that_is_cut_off_anywhere_is_named_with_its_member(tars: Path) -> None:
    path = tars / "shard-0.tar"
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        fifth = archive.getmembers()[5]
        end = archive.getmembers()[-1].offset_data + 512
    cuts = {
        fifth.offset: "after member 000002.jpg",  # between two members: tarfile would end quietly
        fifth.offset + 100: "after member 000002.jpg",
        fifth.offset_data: "it is truncated within member 000002.cls",
        end: "after member 000029.cls",
    }
    for cut, words in cuts.items():
        path.write_bytes(whole[:cut])
        refused(tars, f"{path}: its samples cannot be counted", words)
    path.write_bytes(whole[: fifth.offset] + b"\xff" * 512 + whole[fifth.offset + 512 :])
    refused(tars, "after member 000002.jpg: the next header is broken")
    path.write_bytes(b"no tar at all" * 100)
    refused(tars, "shard-0.tar: its samples cannot be counted")


@pytest.mark.parametrize("form", ["gnu", "posix"])
def test_a_sparse_member_of_a_tar_is_refused(tmp_path: Path, form: str) -> None:
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(1 << 20)
        file.seek(1 << 19)
        file.write(b"x")
    subprocess.run(["tar", f"--format={form}", "-ScC", tmp_path, "-f", tmp_path / "a.tar", "a.bin"], check=True)
    refused(tmp_path, f"{tmp_path / 'a.tar'}: its samples", "member a.bin is stored as a sparse file")


def test_an_error_of_a_transform_names_the_member(tars: Path) -> None:
    path = tars / "shard-0.tar"
    write_tar(path, [*members_of(0, 2), ("broken.jpg", b""), ("broken.cls", b"no number")])
    data = ShardedData(tars).map(numbered)
    with pytest.raises(ValueError, match=r"shard-0\.tar, member broken: ValueError: invalid literal"):
        data[2]
    given: dict[str, Any] = {"global_batch_size": 33, "seed": 0, "share": Share(0, 1)}
    with pytest.raises(JobFailedError, match="member broken"):
        Loader(data, **given).at(0)
    batch = Loader(data, max_bad_samples=1, **given).at(0)
    assert [bad.index for bad in batch.bad] == [2]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_windows_of_tokens_are_slices_of_the_files(tmp_path: Path, dtype: str) -> None:
    length = 1 << 18  # windows of 0.5 or 1 MiB, of which a block has 8 or 4
    sizes = [15 * length + 40, length + 1, length, 15 * length + 39]
    files = [np.random.default_rng(number).integers(0, 60000, size).astype(dtype) for number, size in enumerate(sizes)]
    for number, tokens in enumerate(files):
        tokens.tofile(tmp_path / f"tokens-{number:05d}.bin")
    data = RawTokens(tmp_path, length, dtype=dtype)
    starts = [(tokens, at) for tokens in files for at in range(0, len(tokens) - length, length)]
    assert len(data) == len(starts) == 15 + 1 + 0 + 15
    inputs, targets = data.batch(np.arange(len(data)))
    assert np.array_equal(inputs, [tokens[at : at + length] for tokens, at in starts])
    assert np.array_equal(targets, [tokens[at + 1 : at + length + 1] for tokens, at in starts])
    assert torch.equal(data[30][1], targets[30])
    loader = Loader(data, global_batch_size=31, seed=0, share=Share(0, 1))
    assert sorted(loader.at(0).inputs[:, 0].tolist()) == sorted(inputs[:, 0].tolist())
    assert RawTokens(tmp_path, length // 2, dtype=dtype).fingerprint() != data.fingerprint()


def test_token_files_of_another_dtype_or_with_other_tokens_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "tokens-00000.bin"
    np.arange(999, dtype="uint16").tofile(path)
    with pytest.raises(ConfigError, match=r"tokens-00000\.bin: .*1998 bytes are not a whole number of uint32 tokens"):
        RawTokens(tmp_path, 8, dtype="uint32")
    with pytest.raises(ConfigError, match="dtype: unknown value int64"):
        RawTokens(tmp_path, 8, dtype="int64")
    before = RawTokens(tmp_path, 8).fingerprint()
    np.arange(1, 1000, dtype="uint16").tofile(path)
    assert RawTokens(tmp_path, 8).fingerprint() != before
