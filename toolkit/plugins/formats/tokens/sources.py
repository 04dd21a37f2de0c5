"""The documents of text files, in order, from any position on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from toolkit.base import fsio
from toolkit.base.errors import RequestError


class Position(NamedTuple):
    """A place in the input: a file's number, and a byte in it."""

    file: int
    offset: int


def files(inputs: Sequence[str], out: Path) -> list[Path]:
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


def identity(paths: Sequence[Path]) -> Iterator[str]:
    """Yield what tells the content of files apart, cheaply: name, size and time of change."""
    for path in paths:
        state = path.stat()
        yield f"{path} {state.st_size} {state.st_mtime_ns}"


def documents(paths: Sequence[Path], field: str, start: Position) -> Iterator[tuple[bytes, Position]]:
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
            _check(text, path)
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
                kind = f"has no {field!r}" if isinstance(error, KeyError) else "is no JSON object"
                raise RequestError(f"{where} {kind}; see --field") from None
            if not isinstance(text, str):
                raise RequestError(f"{where}: {field!r} is no text but a {type(text).__name__}; see --field")
            try:
                encoded = text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"{where}: {field!r} is no text: {error.reason}") from None
            if encoded:
                yield encoded, offset


def _check(text: bytes, path: Path) -> None:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise RequestError(
            f"{path} is no text in UTF-8: byte {error.start} is {text[error.start]:#04x}; convert it, or leave it out"
        ) from None
