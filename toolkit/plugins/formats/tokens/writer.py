"""Writes token shards one after another, and the index last. After a kill it continues after the last whole shard."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from toolkit.base import fsio, logs
from toolkit.base.errors import RequestError
from toolkit.files.records import FileRecord
from toolkit.plugins.formats.tokens.folder import (
    BYTES,
    DOCUMENTS,
    END_BYTE,
    INDEX,
    TOKENIZER,
    TokenIndex,
    TokenShard,
    load_tokenizer,
    shard_name,
)

log = logs.get(__name__)

#: What the ends of a shard's documents are kept in until the index is made, and what says how far it has come.
_ENDS, _PROGRESS = "tokens-{:05}.ends", "progress.jsonl"
#: Documents that are tokenized at once, by all cores: this many, or this many bytes.
BATCH_DOCUMENTS, BATCH_BYTES = 1024, 8_000_000
#: Common names of the token that ends a document.
END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")


class Position(NamedTuple):
    """A place in the input: a file's number, and a byte in it."""

    file: int
    offset: int


_Documents: TypeAlias = Iterator[tuple[bytes, Position]]


class Encoder:
    """Makes ids of texts: bytes, or tokens of a file of Hugging Face's `tokenizers`."""

    def __init__(self, path: Path | None, end: str | None) -> None:
        """Load the tokenizer in ``path``; None: bytes. ``end`` is the token that ends a document.

        Raises RequestError, also where the end is not given and none of the usual names is in the vocabulary.
        """
        self.path, self._tokenizer = path, None if path is None else load_tokenizer(path)
        if self._tokenizer is None:
            if end is not None:
                raise RequestError("--end: a byte of 0 ends a document where there is no --tokenizer")
            self.vocabulary, self.end = BYTES, END_BYTE
            return
        self.vocabulary = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.vocabulary = max(self.vocabulary, *(number + 1 for number in self._tokenizer.get_vocab().values()))
        ids = [self._tokenizer.token_to_id(name) for name in ([end] if end is not None else END_NAMES)]
        self.end = next((number for number in ids if number is not None), -1)
        if self.end < 0:
            asked = f"{end} is not in the vocabulary" if end is not None else f"none of {', '.join(END_NAMES)} is there"
            raise RequestError(f"--end: which token of {path} ends a document? {asked}")

    @property
    def dtype(self) -> np.dtype[Any]:
        """Return the smallest type that holds all tokens."""
        return np.min_scalar_type(self.vocabulary - 1).newbyteorder("<")

    @property
    def fingerprint(self) -> str:
        """Return a digest of the tokenizer's file; "bytes" without one."""
        return "bytes" if self.path is None else hashlib.sha256(self.path.read_bytes()).hexdigest()

    def encode(self, texts: Sequence[bytes]) -> list[Any]:
        """Return the ids of each text, with the end. Raises UnicodeDecodeError for bytes that are no UTF-8."""
        if self._tokenizer is None:
            return [np.frombuffer(text + bytes([self.end]), np.uint8) for text in texts]
        # Special tokens belong to a chat or a classifier: here a document ends with one token.
        found = self._tokenizer.encode_batch([text.decode() for text in texts], add_special_tokens=False)
        return [np.array([*each.ids, self.end], self.dtype) for each in found]


@dataclass(frozen=True)
class FinishedShard(FileRecord):
    """A line of ``progress.jsonl``: a complete shard, and where the input of the next begins."""

    request: str
    tokens: int
    documents: int
    file: int
    offset: int
    content: int  #: CRC-32 of all tokens so far


def tokenize(
    inputs: Sequence[str], out: Path, encoder: Encoder, *, field: str = "text", shard_tokens: int = 100_000_000
) -> TokenIndex:
    """Write the texts of ``inputs`` as token shards into ``out``. Continue where an earlier call was killed.

    Each line of a ``.jsonl`` file is a document, its text under ``field``; each other file is one document. Folders
    give all their files. A shard has whole documents and ends with the one that reaches ``shard_tokens``. Raises
    RequestError for other inputs than those that the folder was begun with, and for a file that is no text.
    """
    files = input_files(inputs, out)
    # Name, size and time of change identify the content of files cheaply.
    stats = [(path, path.stat()) for path in files]
    identities = [f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in stats]
    parts = [encoder.fingerprint, str(encoder.end), field, str(shard_tokens), *identities]
    request = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    fsio.make_dir(out)
    lock = fsio.try_lock(out / ".lock")  # which ends with its process
    if lock is None:
        raise RequestError(f"{out}: another `toolkit data tokenize` writes into it at this moment")
    try:
        if (index := TokenIndex.read(out / INDEX)) is not None:
            _refuse_other(out, index.request, request)
            return index
        progress = FinishedShard.read_lines(out / _PROGRESS)
        if progress:
            _refuse_other(out, progress[0].request, request)
            log.info("%s: continues after %d complete shards", out, len(progress) - 1)
        else:
            if any(path.name != ".lock" for path in out.iterdir()):
                raise RequestError(f"{out} has files that this command has not written; choose another --out")
            # The first line is no shard: it says what is tokenized, and where the first shard begins.
            progress = [FinishedShard(request, 0, 0, 0, 0, 0)]
            fsio.append_json_line(out / _PROGRESS, progress[0].to_json())
        # Each complete shard gets a line, so a kill loses the shard in progress only.
        while True:
            at = Position(progress[-1].file, progress[-1].offset)
            documents = read_documents(files, field, at)
            shard = _write_shard(out, len(progress) - 1, encoder, documents, progress[-1], shard_tokens)
            if shard is None:
                return _finish(out, encoder, progress[1:])
            fsio.append_json_line(out / _PROGRESS, shard.to_json())
            log.info("%s: %d tokens of %d documents", shard_name(len(progress) - 1), shard.tokens, shard.documents)
            progress.append(shard)
    finally:
        os.close(lock)


def pack_bytes(files: Sequence[Path], out: Path, alive: Callable[[], None] = lambda: None) -> None:
    """Write ``files`` as bytes into the new folder ``out``, a document each, all or nothing."""

    def documents() -> Iterator[tuple[bytes, Position]]:
        for number, file in enumerate(files):
            yield file.read_bytes(), Position(number + 1, 0)
            alive()

    encoder = Encoder(None, None)
    with fsio.atomic_path(out) as temporary:
        fsio.make_dir(temporary)
        shard = _write_shard(temporary, 0, encoder, documents(), FinishedShard("", 0, 0, 0, 0, 0), 1 << 62)
        assert shard is not None, "there is a file, and each has an end"
        _finish(temporary, encoder, [shard])


def _write_shard(
    out: Path, number: int, encoder: Encoder, documents: _Documents, last: FinishedShard, size: int
) -> FinishedShard | None:
    """Write the shard after ``last``: whole documents until it has ``size`` tokens. None: no document is left."""
    path, ends_path = out / shard_name(number), out / _ENDS.format(number)
    # A kill may have left a part of this shard.
    for half_written in (path, ends_path):
        half_written.unlink(missing_ok=True)
    ends: list[int] = []
    tokens, content, position = 0, last.content, Position(last.file, last.offset)

    def chunks() -> Iterator[bytes]:
        nonlocal tokens, content, position
        for texts, places in _batches(documents):
            for ids, place in zip(encoder.encode(texts), places, strict=True):
                data = ids.tobytes()
                tokens, position, content = tokens + len(ids), place, zlib.crc32(data, content)
                ends.append(tokens)
                yield data
                if tokens >= size:
                    return

    fsio.write_stream(path, chunks())
    if not ends:
        path.unlink()
        return None
    fsio.write_stream(ends_path, [np.array(ends, np.int64).tobytes()])
    # Both files must be on disk before a line of ``progress.jsonl`` says that the shard is complete.
    fsio.sync_dir(out)
    return FinishedShard(last.request, tokens, len(ends), position.file, position.offset, content)


def _batches(documents: _Documents) -> Iterator[tuple[list[bytes], list[Position]]]:
    texts: list[bytes] = []
    places: list[Position] = []
    size = 0
    for text, place in documents:
        texts.append(text)
        places.append(place)
        size += len(text)
        if len(texts) == BATCH_DOCUMENTS or size >= BATCH_BYTES:
            yield texts, places
            texts, places, size = [], [], 0
    if texts:
        yield texts, places


def _finish(out: Path, encoder: Encoder, shards: Sequence[FinishedShard]) -> TokenIndex:
    """Write the documents' ends, the tokenizer and, last, the index."""
    if not shards:
        raise RequestError("there is no document to tokenize: each file is empty")
    # The ends of a shard's documents are counted within it; in the file they are counted over all shards.
    starts = np.cumsum([0, *(shard.tokens for shard in shards)])
    ends = [out / _ENDS.format(number) for number in range(len(shards))]
    parts = [np.fromfile(path, np.int64) + start for path, start in zip(ends, starts, strict=False)]
    with fsio.atomic_path(out / DOCUMENTS, replaces_file=True) as temporary, temporary.open("wb") as file:
        np.save(file, np.concatenate(parts))
    if encoder.path is not None:
        with fsio.atomic_path(out / TOKENIZER, replaces_file=True) as temporary:
            shutil.copyfile(encoder.path, temporary)
    index = TokenIndex(
        encoder.dtype.name,
        encoder.vocabulary,
        encoder.end,
        sum(shard.documents for shard in shards),
        int(starts[-1]),
        tuple(TokenShard(shard_name(number), shard.tokens) for number, shard in enumerate(shards)),
        shards[-1].request,
        f"{shards[-1].content:08x}",
    )
    # A folder that has an index counts as complete, so all other files come before.
    fsio.write_json(out / INDEX, index.to_json())
    for path in (out / _PROGRESS, *ends):
        path.unlink(missing_ok=True)
    return index


def _refuse_other(out: Path, begun: str, request: str) -> None:
    if begun != request:
        raise RequestError(
            f"{out} holds tokens of other files, or made in another way (tokenizer, field, end, size of a shard); "
            "choose another folder for --out, or remove this one"
        )


def input_files(inputs: Sequence[str], out: Path) -> list[Path]:
    """Return the files that ``inputs`` name; of folders all files below them.

    Hidden ones and those in ``out`` are left out. Raises RequestError where there are none.
    """
    found: list[Path] = []
    for text in inputs:
        path = fsio.expand(text).absolute()
        if path.is_dir():
            # Where the output lies below an input, a second call would take it for a text.
            root, written = path.resolve(), out.resolve()
            left_out = path / written.relative_to(root) if root in written.parents else None
            found += [each for each in fsio.files_below(path) if left_out not in each.parents]
        elif path.is_file():
            found.append(path)
        else:
            raise RequestError(f"toolkit data tokenize: there is no file or folder {path}")
    if not found:
        raise RequestError(f"toolkit data tokenize: there are no files in {', '.join(inputs)}")
    return found


def read_documents(paths: Sequence[Path], field: str, start: Position) -> Iterator[tuple[bytes, Position]]:
    """Yield each document from ``start`` on as UTF-8, with the position behind it. Empty ones are left out.

    Raises RequestError, with file and place, for what is no UTF-8, and for a line that has no text.
    """
    for number in range(start.file, len(paths)):
        path = paths[number]
        offset = start.offset if number == start.file else 0
        if path.suffix == ".jsonl":
            for text, behind in _lines(path, field, offset):
                yield text, Position(number, behind)
        elif text := path.read_bytes():
            try:
                text.decode()
            except UnicodeDecodeError as error:
                raise RequestError(
                    f"{path} is not UTF-8 text: byte {error.start} is {text[error.start]:#04x}; convert it, or "
                    "leave it out"
                ) from None
            yield text, Position(number + 1, 0)


def _lines(path: Path, field: str, offset: int) -> Iterator[tuple[bytes, int]]:
    with path.open("rb") as file:
        file.seek(offset)
        # Lines are counted by their bytes: a resume begins in the middle of the file.
        while line := file.readline():
            where = f"{path}, the line at byte {offset}"
            offset += len(line)
            if not line.strip():
                continue
            try:
                text = json.loads(line)[field]
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                kind = f"has no {field!r}" if isinstance(error, KeyError) else "is not a JSON object"
                raise RequestError(f"{where} {kind}; see --field") from None
            if not isinstance(text, str):
                raise RequestError(f"{where}: {field!r} is not text but a {type(text).__name__}; see --field")
            try:
                encoded = text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"{where}: {field!r} is not text: {error.reason}") from None
            if encoded:
                yield encoded, offset
