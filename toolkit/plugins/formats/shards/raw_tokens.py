"""Windows of one length from files that hold only token numbers, such as nanoGPT's.

The files of ``toolkit data tokenize`` have an index and documents: plugins/formats/tokens/windows.py reads them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from toolkit.base.errors import ConfigError
from toolkit.config import dataset_catalog
from toolkit.data.permutation import Indices
from toolkit.plugins.formats.shards import index
from toolkit.plugins.formats.shards.dataset import LANES, ShardedData
from toolkit.plugins.formats.shards.index import Scan, ShardFile

DTYPES = ("uint16", "uint32")


class RawTokenFormat(index.ContiguousFormat):
    suffix = ".bin"

    def __init__(self, length: int, dtype: str) -> None:
        super().__init__()
        self.name = f"{dtype} windows of {length}"
        self._length, self._dtype = length, np.dtype(dtype).newbyteorder("<")
        self._per_block = max(index.BLOCK_BYTES // (length * self._dtype.itemsize), 1)

    def scan(self, path: Path) -> Scan:
        size, width = path.stat().st_size, self._dtype.itemsize
        if size % width:
            raise ValueError(f"its {size} bytes are not a whole number of {self._dtype.name} tokens")
        windows = max(size // width - 1, 0) // self._length
        whole, rest = divmod(windows, self._per_block)
        rows = [self._per_block] * whole + [rest] * bool(rest)
        return Scan((("tokens", self._dtype.name),), np.array(rows, np.int64), index.digest_of(path))

    def byte_range(self, file: ShardFile, block: int) -> tuple[int, int]:
        first, stop = index.sample_range(file, block)
        width = self._length * self._dtype.itemsize
        return first * width, stop * width + self._dtype.itemsize

    def open(self, path: Path, file: ShardFile, block: int, columns: tuple[str, ...]) -> RawTokenBlock:
        opened = RawTokenBlock()
        tokens = np.frombuffer(self.read(opened, path, *self.byte_range(file, block)), self._dtype)
        opened.windows = np.lib.stride_tricks.sliding_window_view(tokens, self._length + 1)[:: self._length]
        return opened

    def describe(self, file: ShardFile, block: int, number: int | None) -> str:
        first, stop = index.sample_range(file, block)
        return f"windows {first} to {stop - 1}" if number is None else f"window {first + number}"


class RawTokenBlock:
    """Windows in a row, in memory. Each has the first token of the next one as its last."""

    windows: NDArray[Any]

    def row(self, number: int) -> dict[str, Any]:
        return {"tokens": torch.from_numpy(self.windows[number].copy())}

    def rows(self, numbers: Indices) -> dict[str, Any]:
        return {"tokens": self.windows[numbers]}


class RawTokens(ShardedData):
    """The windows of ``length`` tokens in all ``.bin`` files below ``root``.

    Each comes with the token after it, and none overlap. Files hold little-endian ``uint16`` or ``uint32`` and nothing
    else. A rest shorter than a window is left out::

        >>> numpy.arange(1000, dtype="uint16").tofile(folder / "tokens-00000.bin")
        >>> train_set = toolkit.RawTokens(folder, length=64)
        >>> inputs, targets = train_set.batch(numpy.arange(8))
        >>> len(train_set), inputs.shape, int(inputs[1, 0]), bool((targets == inputs + 1).all())
        (15, torch.Size([8, 64]), 64, True)
    """

    def __init__(self, root: str | Path | None, length: int, *, dtype: str = "uint16", lanes: int = LANES) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype: unknown value {dtype}; valid: {', '.join(DTYPES)}")
        if length < 1 or lanes < 1:
            raise ConfigError(f"length: {length}, lanes: {lanes}: each must be 1 or more")
        self._length = length
        self._setup(
            dataset_catalog.data_root(None if root is None else str(root)), RawTokenFormat(length, dtype), None, lanes
        )

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = super().__getitem__(index)["tokens"].to(torch.int64)
        return tokens[:-1], tokens[1:]

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return inputs, and targets (the tokens that follow), (n, length) int64, of the windows ``indices`` (n,)."""
        tokens = np.empty((len(indices), self._length + 1), np.int64)

        def take(opened: Any, numbers: Indices, places: Indices) -> None:
            # As late as here: int64 takes up to four times the memory.
            tokens[places] = opened.windows[numbers]

        self._each_block(indices, take)
        found = torch.from_numpy(tokens)
        return found[:, :-1], found[:, 1:]
