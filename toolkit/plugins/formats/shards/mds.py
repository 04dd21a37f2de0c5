"""MDS shards, the format of MosaicML Streaming: read from its files alone, uncompressed.

A file is: the number of samples and the offsets of all (uint32), the columns as JSON, the samples. A sample is: the
sizes (uint32) of its columns of variable size, then the bytes of all columns. An ``index.json`` lists a folder's files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.base.errors import ConfigError
from toolkit.plugins.formats.shards import index
from toolkit.plugins.formats.shards.index import REFUSED, Scan, ShardFile

_SCALARS = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)} | {
    f"float{bits}" for bits in (16, 32, 64)
}
#: What images are: their bytes, for a transform to decode.
_BYTES = {"bytes", "jpeg", "png"}
_TEXTS: dict[str, Any] = {"str": str, "str_int": int, "str_float": float, "json": json.loads}
#: The dtypes of arrays that say their own, by the number in front of them.
_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32"}
_DTYPES |= {34: "float32", 64: "uint64", 65: "int64", 66: "float64"}


class MdsFormat(index.RunsFormat):
    name = "mds"
    suffix = ".mds"

    def scan(self, path: Path) -> Scan:
        """Read the head of the file: offsets and columns."""
        count = int(np.frombuffer(index.read(path, 0, 4), "<u4")[0])
        table = 4 * (count + 1)
        begins = np.frombuffer(index.read(path, 4, 4 + table), "<u4").astype(np.int64)
        size = path.stat().st_size
        if begins[0] < 4 + table or (np.diff(begins) < 0).any() or begins[-1] != size:
            raise ValueError(f"its offsets do not fit its {size} bytes: it is cut off, or no MDS shard")
        head = index.read(path, 0, int(begins[0]))
        config = json.loads(head[4 + table :])
        names, kinds, sizes = config["column_names"], config["column_encodings"], config["column_sizes"]
        schema = tuple(
            (name, kind if _is_known(kind) else _refusal(kind)) for name, kind in zip(names, kinds, strict=True)
        )
        details = {"begins": begins, "sizes": np.array([-1 if size is None else size for size in sizes], np.int64)}
        return Scan(schema, index.rows_of(begins), index.digest_of(path, head), details)

    def prepare(self, root: Path, files: Sequence[ShardFile]) -> None:
        """Compare with what ``index.json`` lists. Raises ConfigError for a file that is missing or of another size."""
        present = {(root / file.name).resolve(): file.size for file in files}
        for folder in {path.parent for path in present} | {root}:
            if not (folder / "index.json").is_file():
                continue
            for name, size, hint in _listed(folder / "index.json"):
                path = (folder / name).resolve()
                if path not in present:
                    raise ConfigError(f"{path}: is listed in {folder / 'index.json'}, and not there{hint}")
                if present[path] != size:
                    raise ConfigError(f"{path}: has {present[path]} bytes, and index.json says {size}; copy it again")

    def open(self, path: Path, file: ShardFile, block: int, columns: tuple[str, ...]) -> MdsBlock:
        return MdsBlock(self, path, file, block, columns)


def _listed(path: Path) -> list[tuple[str, int, str]]:
    """Return the name and size of each shard that an ``index.json`` lists, with a hint.

    The hint says what to do if the shard is not there.
    """
    try:
        shards = json.loads(path.read_text())["shards"]
        return [
            (
                str(shard["raw_data"]["basename"]),
                int(shard["raw_data"]["bytes"]),
                f"; decompress {zipped['basename']}" if (zipped := shard.get("zip_data")) else "",
            )
            for shard in shards
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: is damaged: {type(error).__name__}: {error}") from error


def _is_known(kind: str) -> bool:
    return kind in _SCALARS | _BYTES | {"int"} | set(_TEXTS) or kind.split(":")[0] == "ndarray"


def _refusal(kind: str) -> str:
    if kind == "pkl":
        return f"{REFUSED}its encoding is pkl, and reading it would run code"
    return f"{REFUSED}its encoding {kind} is not read; write bytes, jpeg, png, texts, numbers or arrays"


class MdsBlock(index.RunBlock):
    """A run of samples of an MDS shard, in memory."""

    def row(self, number: int) -> dict[str, Any]:
        details, sample = self.file.scan.details, self.first + number
        place, end = (details["begins"][sample : sample + 2] - self.base).tolist()
        sizes, found = details["sizes"].tolist(), {}
        # The sizes of the columns of variable size come first, then the bytes of all columns.
        variable = sum(size < 0 for size in sizes)
        lengths = iter(np.frombuffer(self.content, "<u4", variable, place).tolist())
        place += 4 * variable
        for (name, kind), size in zip(self.file.scan.schema, sizes, strict=True):
            length = next(lengths) if size < 0 else size
            if name in self.columns:
                found[name] = decoded(kind, bytes(self.content[place : place + length]))
            place += length
        if place != end:
            raise ValueError(f"sample {sample} ends at byte {self.base + end}, and its columns at {self.base + place}")
        return {name: found[name] for name in self.columns}


def decoded(kind: str, content: bytes) -> Any:
    """Return the value of a column: numbers and arrays as tensors. Raises ValueError if the bytes do not fit."""
    if kind in _BYTES:
        return content
    if kind in _TEXTS:
        return _TEXTS[kind](content.decode())
    if kind == "int" or kind in _SCALARS:
        dtype = np.dtype("int64" if kind == "int" else kind)
        return torch.from_numpy(np.frombuffer(content, dtype, 1)[0, ...].copy())
    # An array: ``ndarray``, ``ndarray:dtype`` or ``ndarray:dtype:shape``; what the type does not say lies in front.
    words, place = kind.split(":")[1:], 0
    if words:
        number = words[0]
    else:
        number, place = _DTYPES[content[0]], 1
    if len(words) > 1:
        shape = [int(size) for size in words[1].split(",")]
    else:
        dimensions, width = content[place] >> 2, 1 << (content[place] & 3)
        end = place + 1 + dimensions * width
        shape = np.frombuffer(content[place + 1 : end], f"<u{width}").tolist()
        place = end
    return torch.from_numpy(np.frombuffer(content[place:], number).reshape(shape).copy())
