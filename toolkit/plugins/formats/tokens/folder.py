"""The folder of a tokenized text.

tokens-00000.bin ...   tokens in a row, little-endian, of one type (uint8, uint16 or uint32)
documents.npy          int64: where each document ends, counted over all shards
tokenizer.json         the tokenizer, where the tokens are not bytes
index.json             what there is (:class:`TokenIndex`); written last, so that a folder that has it is complete
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from toolkit.base.errors import DamagedFileError, DataMissingError, RequestError
from toolkit.files.records import FileRecord, JsonRecord
from toolkit.plugins.formats.dataset_catalog import TOKEN_INDEX

INDEX, DOCUMENTS, TOKENIZER = TOKEN_INDEX, "documents.npy", "tokenizer.json"
TYPES = ("uint8", "uint16", "uint32")
#: Of bytes: their number, and the one that ends a document.
BYTES, END_BYTE = 256, 0
Ids: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenShard(JsonRecord):
    """One file of tokens."""

    name: str
    tokens: int


@dataclass(frozen=True)
class TokenIndex(FileRecord):
    """The content of ``index.json``."""

    dtype: str
    vocabulary: int  #: tokens are below it
    end: int  #: the token that ends each document
    documents: int
    tokens: int
    shards: tuple[TokenShard, ...]
    request: str  #: a digest of what was tokenized, and how
    content: str  #: CRC-32 of all tokens


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"tokens-{number:05}.bin"


class Tokens:
    """The tokens of a folder, memory-mapped."""

    def __init__(self, folder: Path) -> None:
        """Open ``folder``. Raises DataMissingError without an index, DamagedFileError where files do not fit it."""
        index = TokenIndex.read(folder / INDEX)
        if index is None:
            raise DataMissingError(
                f"data.root: {folder} has no {INDEX}: make it with `toolkit data tokenize`, or run that again if it "
                "did not finish"
            )
        if index.dtype not in TYPES:
            raise DamagedFileError(f"{folder / INDEX}: dtype is {index.dtype}, and tokens are {', '.join(TYPES)}")
        self.folder, self.index = folder, index
        self._shards = [_mapped(folder / shard.name, index.dtype, shard.tokens) for shard in index.shards]
        self._starts = [0, *accumulate(shard.tokens for shard in index.shards)]
        path = folder / DOCUMENTS
        try:
            ends = np.load(path, mmap_mode="r" if index.documents else None, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DamagedFileError(f"{path} cannot be read: {error}; {_AGAIN}") from None
        # The last document must end where the tokens do, or the file belongs to other shards.
        is_whole = ends.shape == (index.documents,) and ends.dtype == np.int64
        if not is_whole or (index.documents and ends[-1] != index.tokens):
            raise DamagedFileError(f"{path} does not have the {index.documents} documents of {INDEX}; {_AGAIN}")
        self._ends = ends

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, stop: int) -> Ids:
        """Return tokens ``start`` to ``stop``, which may lie in several shards."""
        parts: list[Any] = []
        while start < stop:
            number = bisect_right(self._starts, start) - 1
            inside = start - self._starts[number]
            parts.append(self._shards[number][inside : inside + stop - start])
            start += len(parts[-1])
        return np.concatenate(parts).astype(np.int64)

    def document_starts(self, start: int, stop: int) -> Ids:
        """Return where documents begin, from ``start`` + 1 to ``stop``, as distances from ``start``."""
        first, last = np.searchsorted(self._ends, [start + 1, stop + 1])
        return np.asarray(self._ends[first:last], np.int64) - start

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of tokens. Raises RequestError without the package `tokenizers`, where they are not bytes."""
        if self._tokenizer is not None:
            return str(self._tokenizer.decode([int(number) for number in ids]))
        return bytes(min(int(number), BYTES - 1) for number in ids).decode(errors="replace")

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without one that ends a document.

        Raises RequestError for a text of which the tokenizer knows no token, or not all.
        """
        if self._tokenizer is None:
            ids = list(text.encode(errors="surrogateescape"))  # an argument may hold bytes that are no UTF-8
        else:
            try:
                found = self._tokenizer.encode(text, add_special_tokens=False)
            except Exception as error:  # the package raises plain Exceptions
                raise RequestError(f"{text[:48]!r} has no tokens: {error}") from None
            # A tokenizer gives its "unknown" token for what it does not know, or leaves that out.
            unknown = self._tokenizer.token_to_id(getattr(self._tokenizer.model, "unk_token", None) or "")
            spans = [span for span, number in zip(found.offsets, found.ids, strict=True) if number != unknown]
            known = {place for first, last in spans for place in range(first, last)}
            if not all(place in known or mark.isspace() for place, mark in enumerate(text)):
                raise RequestError(f"{text[:48]!r}: the run's tokenizer has no tokens for a part of it; leave that out")
            ids = list(found.ids)
        if not ids:
            raise RequestError(f"{text[:48]!r} has no tokens; give a text that is not empty")
        return ids

    @cached_property
    def _tokenizer(self) -> Any:
        """Return the tokenizer; None where each token is a byte of the text."""
        path = self.folder / TOKENIZER
        return load_tokenizer(path) if path.exists() else None


def load_tokenizer(path: Path) -> Any:
    """Return the tokenizer in a file of Hugging Face's `tokenizers`. Raises RequestError."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise RequestError(
            "this needs the package `tokenizers`: pip install 'slurm-batch-toolkit[tokenizers]'"
        ) from None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exceptions
        raise RequestError(f"{path} is not a tokenizer's file: {error}") from None


def _mapped(path: Path, dtype: str, count: int) -> Any:
    expected = count * np.dtype(dtype).itemsize
    try:
        size = path.stat().st_size
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error.strerror}; {_AGAIN}") from None
    if size != expected:
        raise DamagedFileError(f"{path} has {size} bytes, and by {INDEX} it has {expected}; {_AGAIN}")
    return np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r") if count else np.zeros(0, dtype)


_AGAIN = "copy the folder again, or recreate it with `toolkit data tokenize`"
