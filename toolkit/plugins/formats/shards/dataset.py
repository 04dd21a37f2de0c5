"""Shards as a data set with an index. Any sample may be asked for; samples of one block are cheap together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toolkit.base.errors import ConfigError, JobCodeError, did_you_mean
from toolkit.config import dataset_catalog
from toolkit.data.permutation import Indices
from toolkit.data.sampler import BatchPart, Order
from toolkit.data.workers import stacked
from toolkit.plugins.formats.shards.blocks import BlockOrder, BlockReader
from toolkit.plugins.formats.shards.index import REFUSED, OpenBlock, ShardFormat, ShardIndex, index_of, shard_names
from toolkit.plugins.formats.shards.parquet import ParquetFormat
from toolkit.plugins.formats.shards.tar import TarFormat

#: The kinds of files, in the order in which a folder is searched for them.
FORMATS: tuple[type[ShardFormat], ...] = (ParquetFormat, TarFormat)
#: Lanes of an order; see blocks.py.
LANES = 32


class ShardedData:
    """The samples of all shards below ``root``, each a dictionary of its ``columns``. The default is all columns::

        >>> import pyarrow.parquet
        >>> table = pyarrow.table({"x": [[i, i / 2] for i in range(100)], "label": [i % 2 for i in range(100)]})
        >>> pyarrow.parquet.write_table(table, folder / "part-0.parquet", row_group_size=10)
        >>> train_set = toolkit.ShardedData(folder, columns=["x", "label"])
        >>> len(train_set), train_set[7]["label"]
        (100, tensor(1))

    Numbers and lists of numbers become tensors; texts and bytes stay what they are. ``root`` is a folder or a file. Its
    copy on this node is read, if ``data.stage`` made one. A batch mixes samples of ``lanes`` blocks, and that many
    blocks are in memory on all ranks together. Raises ConfigError or DataMissingError, with the file, for shards that
    cannot be indexed or do not fit together.
    """

    def __init__(self, root: str | Path | None, *, columns: Sequence[str] | None = None, lanes: int = LANES) -> None:
        if lanes < 1:
            raise ConfigError(f"lanes: {lanes} is not a number of lanes; use 1 or more")
        folder = dataset_catalog.data_root(None if root is None else str(root))
        self._setup(folder, _format_of(folder), columns, lanes)

    def _setup(self, root: Path, kind: ShardFormat, columns: Sequence[str] | None, lanes: int) -> None:
        self._format = kind
        self._index: ShardIndex = index_of(root, kind)
        self._lanes = lanes
        kind.prepare(root, self._index.files)
        self.columns = _agreed_columns(self._index, kind, columns)
        self._blocks = BlockReader(self._index, kind, self.columns)

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> Any:
        """Return one sample. Raises OSError with file and row group or member for one that cannot be read."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        block, number = self._index.place_of(index)
        with self._blocks.opened(block, 1) as opened:
            return opened.row(number)

    def batch(self, indices: Indices) -> Any:
        """Return samples ``indices`` (n,) by column, stacked. Raises as :meth:`__getitem__` does."""
        pieces: list[dict[str, Any]] = []
        groups: list[Indices] = []

        def take(opened: OpenBlock, numbers: Indices, places: Indices) -> None:
            pieces.append(opened.rows(numbers))
            groups.append(places)

        self._each_block(indices, take)

        def describe(place: int) -> str:
            return self.describe(int(indices[place]))

        return {name: _joined(name, [piece[name] for piece in pieces], groups, describe) for name in self.columns}

    def _each_block(self, indices: Indices, take: Callable[[OpenBlock, Indices, Indices], None]) -> None:
        """Call ``take(block, numbers, places)`` for each block with samples ``indices`` (n,).

        They are samples ``numbers`` of the block, and belong to ``places`` of the batch.
        """
        blocks = self._index.blocks_at(indices)
        by_block = np.argsort(blocks, kind="stable")
        blocks, inside = blocks[by_block], (indices - self._index.starts[blocks])[by_block]
        firsts = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist()] if len(blocks) else []
        for first, stop in zip(firsts, [*firsts[1:], len(blocks)], strict=True):
            with self._blocks.opened(int(blocks[first]), stop - first) as opened:
                take(opened, inside[first:stop], by_block[first:stop])

    def map(self, transform: Callable[[Any], Any]) -> MappedData:
        """Return the data set of ``transform(sample)``, which may draw random numbers. Each sample has its own seed."""
        return MappedData(self, transform)

    def describe(self, index: int) -> str:
        """Return where sample ``index`` lies: the file, and the row or member."""
        block, number = self._index.place_of(index)
        file, inside = self._index.block_of(block)
        return f"{self._index.root / file.name}, {self._format.describe(file, inside, number)}"

    def fingerprint(self) -> str:
        """Return what identifies the shards and the order that follows from them; see data/fingerprint.py."""
        return f"{self._format.name} shards {self._index.digest()} in {self._lanes} lanes"

    def block_order(self, seed: int, batch_size: int) -> BlockOrder:
        """Return the order of a training; the loader asks for it."""
        self._blocks.set_retention(2 * batch_size)
        return BlockOrder(self._index.starts, seed, batch_size=batch_size, lanes=self._lanes)

    def read_ahead(self, order: Order | None, part: BatchPart) -> None:
        """Begin to read what ``part`` and the parts after it in ``order`` need. None: the data set's own order."""
        needed = np.unique(self._index.blocks_at(part.indices)).tolist()
        if all(map(self._blocks.has, needed)):
            return  # the blocks that follow are those of the last call
        following: list[int] = []
        if isinstance(order, BlockOrder):
            following = order.following(part.start, len(part.indices))
        elif order is None and needed[-1] + 2 < len(self._index.starts):
            following = [needed[-1] + 1]
        self._blocks.read_ahead(needed, following)


class MappedData:
    """Sharded data with a transform of each sample."""

    def __init__(self, data: ShardedData, transform: Callable[[Any], Any]) -> None:
        self._data, self._transform = data, transform
        self.fingerprint, self.block_order, self.read_ahead = data.fingerprint, data.block_order, data.read_ahead

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        sample = self._data[index]
        try:
            return self._transform(sample)
        except MemoryError:
            raise
        except Exception as error:
            raise ValueError(f"{self._data.describe(index)}: {type(error).__name__}: {error}") from error


def _format_of(root: Path) -> ShardFormat:
    """Return the format of the shards below ``root``: the first that has files there."""
    suffixes = {(root / name).suffix for name in shard_names(root)}
    for kind in FORMATS:
        if kind.suffix in suffixes:
            return kind()
    known = ", ".join(kind.suffix for kind in FORMATS)
    raise ConfigError(f"{root}: there are no shards in it; known are files with the endings {known}")


def _agreed_columns(index: ShardIndex, kind: ShardFormat, wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns to read. Raises ConfigError where a file lacks one, or has it with another type."""
    # Files without samples are not compared: nothing is read from them.
    files = [file for file in index.files if file.scan.rows.sum()]
    first = dict(kind.schema(files[0]))
    columns = tuple(first if wanted is None else wanted)
    for file in files:
        schema = dict(kind.schema(file))
        path = index.root / file.name
        for name in columns:
            if name not in schema:
                raise ConfigError(
                    f"{path}: has no column {name!r}; {did_you_mean(name, schema)}it has {', '.join(schema)}"
                )
            if schema[name].startswith(REFUSED):
                raise ConfigError(f"{path}: column {name!r} cannot be read: {schema[name].removeprefix(REFUSED)}")
            if schema[name] != first[name]:
                raise ConfigError(
                    f"{path}: column {name!r} is {schema[name]}, and in {files[0].name} it is {first[name]}; write all "
                    "shards with one schema, or name the columns that are alike"
                )
        # A column that the first file lacks would be left out without a sign.
        if wanted is None and (extra := sorted(set(schema) - set(first))):
            raise ConfigError(
                f"{path}: has the column {extra[0]!r}, and {files[0].name} does not; write all shards with one schema, "
                "or name the columns to read"
            )
    return columns


def _joined(name: str, pieces: list[Any], groups: list[Indices], describe: Callable[[int], str]) -> Any:
    """Return one column of a batch from the parts that blocks gave. Group i says where the samples of part i go.

    Raises JobCodeError for a null among numbers, with its file and row, which ``describe`` returns for a place.
    """
    size = sum(map(len, groups))
    # Arrays of one type and shape are joined at once, all others value by value.
    kinds = {(piece.dtype, piece.shape[1:]) if isinstance(piece, np.ndarray) else None for piece in pieces}
    if len(kinds) == 1 and isinstance(first := pieces[0], np.ndarray):
        joined = np.empty((size, *first.shape[1:]), first.dtype)
        for piece, group in zip(pieces, groups, strict=True):
            joined[group] = piece
        return torch.from_numpy(joined)
    values: list[Any] = [None] * size
    for piece, group in zip(pieces, groups, strict=True):
        parts = torch.from_numpy(piece) if isinstance(piece, np.ndarray) else piece
        for value, place in zip(parts, group.tolist(), strict=True):
            values[place] = value
    if {*map(type, values)} <= {str, bytes}:
        return values
    try:
        return stacked([{name: value} for value in values])[name]
    except JobCodeError as error:
        null = next((place for place, value in enumerate(values) if value is None), None)
        if null is None:
            raise
        raise JobCodeError(
            f"data: {describe(null)}: {name} is null, which has no place in a batch; see .map()"
        ) from error
