"""Tars and token files as data sets with an index. The oracles are tarfile and numpy."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from toolkit.base.errors import ConfigError, JobFailedError
from toolkit.data.loader import Loader
from toolkit.plugins.formats.shards import index
from toolkit.plugins.formats.shards.dataset import ShardedData
from toolkit.plugins.formats.shards.raw_tokens import RawTokens
from toolkit.ranks.batch import Share

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
        for kind, content in (("jpg", bytes([i]) * (i % 7)), ("cls", str(i).encode()))
    ]


@pytest.fixture
def tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write two tars of 30 samples, in blocks of about 8."""
    monkeypatch.setattr(index, "BLOCK_BYTES", 16 << 10)
    for number in range(2):
        write_tar(tmp_path / f"shard-{number}.tar", members_of(30 * number, 30))
    return tmp_path


def numbered(sample: dict[str, Any]) -> dict[str, int]:
    return {"id": int(sample["cls"])}


def ids_of(data: Any, steps: range, share: Share, workers: int) -> list[list[int]]:
    loader = Loader(data, global_batch_size=8, seed=0, share=share, workers=workers)
    try:
        return [loader.at(step)["id"].tolist() for step in steps]
    finally:
        loader.close()


# --------------------------------------------------------------------------------------------------------------- tars


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


def test_worlds_workers_and_resumes_read_every_sample_of_tars_once(tars: Path) -> None:
    data = ShardedData(tars, lanes=4).map(numbered)
    whole = [sample for batch in ids_of(data, range(15), Share(0, 1), 0) for sample in batch]
    assert sorted(whole[:60]) == sorted(whole[60:]) == list(range(60))
    parts: list[int] = []
    for steps, world, workers in [(range(4), 3, 1), (range(4, 9), 2, 0), (range(9, 15), 4, 0)]:
        ranks = [
            ids_of(ShardedData(tars, lanes=4).map(numbered), steps, Share(r, world), workers) for r in range(world)
        ]
        parts += [sample for batches in zip(*ranks, strict=True) for batch in batches for sample in batch]
    assert parts == whole


def refused(root: Path, *words: str, **arguments: Any) -> None:
    with pytest.raises(ConfigError) as error:
        ShardedData(root, **arguments)
    for word in words:
        assert word in str(error.value)


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
        fifth.offset_data: "it is cut off within member 000002.cls",
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


# ------------------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_windows_of_tokens_are_slices_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(index, "BLOCK_BYTES", 256)
    sizes, length = [1000, 65, 64, 999], 64
    files = [np.random.default_rng(number).integers(0, 60000, size).astype(dtype) for number, size in enumerate(sizes)]
    for number, tokens in enumerate(files):
        tokens.tofile(tmp_path / f"tokens-{number:05d}.bin")
    data = RawTokens(tmp_path, length, dtype=dtype)
    starts = [(tokens, at) for tokens in files for at in range(0, len(tokens) - length, length)]
    assert len(data) == len(starts) == 15 + 1 + 0 + 15
    inputs, targets = data.batch(np.arange(len(data)))
    assert inputs.tolist() == [tokens[at : at + length].tolist() for tokens, at in starts]
    assert targets.tolist() == [tokens[at + 1 : at + length + 1].tolist() for tokens, at in starts]
    assert torch.equal(data[30][1], targets[30])
    loader = Loader(data, global_batch_size=31, seed=0, share=Share(0, 1))
    assert sorted(loader.at(0).inputs[:, 0].tolist()) == sorted(inputs[:, 0].tolist())
    assert RawTokens(tmp_path, 32, dtype=dtype).fingerprint() != data.fingerprint()


def test_token_files_of_another_dtype_or_with_other_tokens_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "tokens-00000.bin"
    np.arange(999, dtype="uint16").tofile(path)
    with pytest.raises(ConfigError, match=r"tokens-00000\.bin: .*1998 bytes are no whole number of uint32 tokens"):
        RawTokens(tmp_path, 8, dtype="uint32")
    with pytest.raises(ConfigError, match="dtype: int64"):
        RawTokens(tmp_path, 8, dtype="int64")
    before = RawTokens(tmp_path, 8).fingerprint()
    np.arange(1, 1000, dtype="uint16").tofile(path)
    assert RawTokens(tmp_path, 8).fingerprint() != before
