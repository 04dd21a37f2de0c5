"""Parquet files, read by pyarrow. A block is a row group, and folders named ``column=value`` are columns."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.base.errors import ConfigError
from toolkit.data.fingerprint import crc
from toolkit.data.permutation import Indices
from toolkit.plugins.formats.shards.index import Scan, Schema, ShardFile

MAGIC = b"PAR1"
#: Footers that are kept: to read one again for each of a file's row groups takes longer than a small group.
FOOTERS = 64
NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


class ParquetFormat:
    name = "parquet"
    suffix = ".parquet"

    def __init__(self) -> None:
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise ConfigError(
                "Parquet shards need pyarrow: pip install 'slurm-batch-toolkit[shards]', on the compute nodes' Python"
            ) from error
        self._parquet: Any = pyarrow.parquet
        self._footers = lru_cache(FOOTERS)(lambda path, mtime_ns: self._parquet.read_metadata(path))
        self._partitions: dict[str, type] = {}

    def scan(self, path: Path) -> Scan:
        """Read the footer only: its time does not depend on the number of rows."""
        # The footer holds places and sizes of all pages, and mostly each column's smallest and largest value: its
        # digest tells whether the file has changed.
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - 8, 0))
            tail = file.read()
            length = struct.unpack("<I", tail[:4])[0] if tail[4:] == MAGIC else size
            if length + 12 > size:
                raise ValueError("it does not end as a Parquet file does: it is truncated, or not a Parquet file")
            file.seek(size - 8 - length)
            footer = file.read(length)
        metadata = self._parquet.read_metadata(path)
        schema = tuple((column.name, str(column.type)) for column in metadata.schema.to_arrow_schema())
        rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        return Scan(schema, np.array(rows, np.int64), crc([footer]))

    def schema(self, file: ShardFile) -> Schema:
        return *file.scan.schema, *((name, "partition") for name, _ in partitions_of(file.name))

    def prepare(self, root: Path, files: Sequence[ShardFile]) -> None:
        """Find the type of each partition column: int where all values are whole numbers over all files, else str."""
        for file in files:
            for column, value in partitions_of(file.name):
                is_int = value is not None and value.removeprefix("-").isdecimal()
                self._partitions[column] = int if is_int and self._partitions.get(column, int) is int else str

    def open(self, path: Path, file: ShardFile, block: int, columns: tuple[str, ...]) -> ParquetBlock:
        stored = [name for name, _ in file.scan.schema if name in columns]
        # No threads: workers are forked, and ranks share the cores.
        footer = self._footers(path, file.mtime_ns)
        with self._parquet.ParquetFile(path, metadata=footer, page_checksum_verification=True) as reader:
            table = reader.read_row_group(block, columns=stored, use_threads=False)
        count = int(file.scan.rows[block])
        if table.num_rows != count:
            raise ValueError(f"it has {table.num_rows} rows, and its footer says {count}")
        values = {name: _column(table.column(name)) for name in stored}
        for name, value in partitions_of(file.name):
            is_int = self._partitions.get(name) is int
            values[name] = np.full(count, int(value)) if is_int and value is not None else [value] * count
        return ParquetBlock({name: values[name] for name in columns})

    def pieces(self, path: Path, file: ShardFile, block: int, columns: tuple[str, ...]) -> list[tuple[int, int]]:
        group, found = self._footers(path, file.mtime_ns).row_group(block), []
        for chunk in map(group.column, range(group.num_columns)):
            if chunk.path_in_schema.split(".")[0] in columns:
                begin = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
                found.append((begin, chunk.total_compressed_size))
        return found

    def describe(self, file: ShardFile, block: int, number: int | None) -> str:
        return f"row group {block}" if number is None else f"row {number} of row group {block}"


def partitions_of(name: str) -> list[tuple[str, str | None]]:
    """Return the columns in a file's folder names, as Hive and Spark write them."""
    pairs = [part.split("=", 1) for part in Path(name).parent.parts if "=" in part]
    return [(unquote(column), None if value == NULL_PARTITION else unquote(value)) for column, value in pairs]


class Ragged:
    """Lists of different lengths, end to end."""

    def __init__(self, values: NDArray[Any], ends: NDArray[Any]) -> None:
        self._values, self._ends = values, ends

    def __getitem__(self, number: int) -> NDArray[Any]:
        part: NDArray[Any] = self._values[self._ends[number] : self._ends[number + 1]]
        return part


class ArrowTexts:
    """Texts or bytes of an Arrow array without nulls, from its memory. An Arrow object for each one would be slow."""

    def __init__(self, array: Any, *, are_bytes: bool, offset: str) -> None:
        _, ends, values = array.buffers()
        place = array.offset * np.dtype(offset).itemsize
        self._ends: Any = np.frombuffer(ends, offset, len(array) + 1, place) if len(array) else []
        self._values, self._are_bytes = memoryview(values or b""), are_bytes

    def __getitem__(self, number: int) -> str | bytes:
        return self.some(np.array([number]))[0]

    def some(self, numbers: Indices) -> list[str | bytes]:
        """Return the values ``numbers`` (n,)."""
        parts = zip(self._ends[numbers].tolist(), self._ends[numbers + 1].tolist(), strict=True)
        if self._are_bytes:
            return [self._values[begin:end].tobytes() for begin, end in parts]
        return [str(self._values[begin:end], "utf-8") for begin, end in parts]


class WithNulls:
    """A column with nulls: its other values end to end, in the form of a column without nulls."""

    def __init__(self, values: Any, is_null: NDArray[np.bool_]) -> None:
        self._values, self._is_null = values, is_null
        self._places = np.cumsum(~is_null) - 1

    def __getitem__(self, number: int) -> Any:
        return None if self._is_null[number] else _value(self._values, self._places[number])


class ParquetBlock:
    """A row group in memory: numbers as arrays, everything else as Arrow has it."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = columns

    def row(self, number: int) -> dict[str, Any]:
        return {name: _value(column, number) for name, column in self._columns.items()}

    def rows(self, numbers: Indices) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, column in self._columns.items():
            if isinstance(column, np.ndarray):
                found[name] = column[numbers]
            elif isinstance(column, ArrowTexts):
                found[name] = column.some(numbers)
            else:
                found[name] = [_value(column, number) for number in numbers.tolist()]
        return found


def _value(column: Any, number: int) -> Any:
    if isinstance(column, np.ndarray):
        return torch.from_numpy(column[number, ...].copy())
    if isinstance(column, Ragged):
        return torch.from_numpy(column[number].copy())
    if isinstance(column, (list, ArrowTexts, WithNulls)):
        return column[number]
    scalar = column[number]
    # Of lists that have nulls within, those without are what they are in other row groups.
    elements = getattr(scalar, "values", None)
    numbers = _numbers(elements) if hasattr(elements, "null_count") else None
    return scalar.as_py() if numbers is None else torch.from_numpy(numbers.copy())


def _column(chunks: Any) -> Any:
    import pyarrow as pa

    array = chunks.combine_chunks()
    array = array.chunk(0) if isinstance(array, pa.ChunkedArray) else array
    if not array.null_count:
        return _values(array)
    # A null becomes None, not a number. It must not change the type of the other values.
    try:
        values = _values(array.drop_null())
    except NotImplementedError:  # a type such as string_view, which stays as Arrow has it
        return array
    return WithNulls(values, array.is_null().to_numpy(zero_copy_only=False))


def _values(array: Any) -> Any:
    """Return a column without nulls in the form that a :class:`ParquetBlock` holds.

    Numbers become an array (n,). Lists of numbers become an array (n, k), or Ragged if their lengths differ. Texts and
    bytes become ArrowTexts. Other columns stay as Arrow has them.
    """
    import pyarrow as pa

    types = pa.types
    # Arrow's offsets have 32 bits, those of its large types 64.
    for kind, are_bytes, offset in (
        (pa.binary(), True, "i4"),
        (pa.large_binary(), True, "i8"),
        (pa.string(), False, "i4"),
        (pa.large_string(), False, "i8"),
    ):
        if array.type == kind:
            return ArrowTexts(array, are_bytes=are_bytes, offset=offset)
    # The numbers of all lists lie end to end in one array.
    if types.is_fixed_size_list(array.type):
        flat = _numbers(array.flatten())
        return array if flat is None else flat.reshape(len(array), array.type.list_size)
    if types.is_list(array.type) or types.is_large_list(array.type):
        flat = _numbers(array.flatten())
        ends = array.offsets.to_numpy()
        ends = ends - ends[0]
        if flat is None:
            return array
        # Lists of one length are a table.
        lengths = np.diff(ends)
        return flat.reshape(len(lengths), lengths[0]) if len(np.unique(lengths)) == 1 else Ragged(flat, ends)
    numbers = _numbers(array)
    return array if numbers is None else numbers


def _numbers(array: Any) -> NDArray[Any] | None:
    import pyarrow as pa

    types = pa.types
    is_number = types.is_integer(array.type) or types.is_floating(array.type) or types.is_boolean(array.type)
    if array.null_count or not is_number:
        return None
    values: NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values
