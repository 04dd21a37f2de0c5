"""Reads and writes JSON, of files and of messages, as frozen dataclasses whose fields declare the keys.

Files are replaced in one step, so none is half written: one that does not fit is refused, with its path and the key.
Two things are no reason. A key that no field has is ignored: a newer toolkit may have added it. A last line of a
``.jsonl`` without its line break is left out: it is being written, or a crash has cut it off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Self, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from toolkit.base import fsio, logs
from toolkit.base.errors import DamagedFileError, TornFileError

#: The version of the files that are written here. A change that older toolkits would misunderstand raises it.
VERSION = 1
#: The toolkit writes nothing that is nested more deeply. Python gives up at about 1,000.
MOST_NESTED = 32
#: Errors of a file that last: its content is out of reach. Other errors may pass.
_LASTING = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EFBIG)
#: How often a file is read that another node replaces meanwhile.
_TRIES = 3

_ADVICE = "; fix it, or move it away"

T = TypeVar("T")
Decode: TypeAlias = Callable[[Any], Any]
log = logs.get(__name__)


class SchemaError(ValueError):
    """A value that does not fit its type."""

    def __init__(self, why: str, key: str = "") -> None:
        super().__init__(f"{key}: {why}" if key else why)
        self.why, self.key = why, key

    def within(self, name: str) -> SchemaError:
        """Return the error with the whole key: ``name`` is that of the list or object that holds the value."""
        joint = "." if self.key and not self.key.startswith("[") else ""
        return SchemaError(self.why, f"{name}{joint}{self.key}")


class _Torn(SchemaError):
    """No JSON."""


@dataclass(frozen=True)
class Scalar:
    """A value without parts: ``fits`` accepts no list and no object. In ``Annotated`` it comes before the type."""

    what: str  #: for messages
    fits: Callable[[Any], bool]
    load: Callable[[Any], Any] | None = None  #: None: the value as it is
    dump: Callable[[Any], Any] | None = None

    def decode(self, value: Any) -> Any:
        """Return the value of what JSON holds. Raises SchemaError."""
        if not self.fits(value):
            raise SchemaError(f"{_shown(value)} is not {self.what}")
        return value if self.load is None else self.load(value)


def one_of(*words: str) -> Scalar:
    """Return the leaf for one of these texts."""
    return Scalar(f"one of {', '.join(words)}", lambda value: isinstance(value, str) and value in words)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < fsio.FIGURES


def _is_time_text(value: Any) -> bool:
    try:
        time = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return False
    return time.tzinfo is not None and 1970 <= time.year < 9999


def _clean(text: str) -> str:
    """Return a text that a file name, and a UTF-8 file, can hold. What a rank has printed may be quoted in it."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "?").encode(errors="replace").decode()


def _is_plain(value: Any, depth: int = MOST_NESTED) -> bool:
    """True unless it is nested too deeply to be copied or printed."""
    if not isinstance(value, (dict, list)):
        return True
    parts = value.values() if isinstance(value, dict) else value
    return depth > 0 and all(_is_plain(part, depth - 1) for part in parts)


_WORD = re.compile(r"\w[\w.+-]{0,254}")

TEXT = Scalar("text", lambda value: isinstance(value, str), _clean)
#: An id or the name of a host, which may become a part of a path or an argument of a program.
WORD = Scalar("a word", lambda value: isinstance(value, str) and _WORD.fullmatch(value) is not None)
COUNT = Scalar("a count", lambda value: type(value) is int and 0 <= value < 2**63)
NUMBER = Scalar("a number", _is_number)
FLAG = Scalar("true or false", lambda value: isinstance(value, bool))
#: Seconds since 1970, up to the year 9999.
MOMENT = Scalar("a time in seconds", lambda value: _is_number(value) and 0 <= value < 253_402_300_000)
TIME_TEXT = Scalar("a time such as 2026-01-31T12:00:00+00:00", _is_time_text)
ANYTHING = Scalar("a value that is nested less deeply", _is_plain)

_LEAVES: Mapping[Any, Scalar] = {str: TEXT, int: COUNT, float: NUMBER, bool: FLAG, Any: ANYTHING}


# ------------------------------------------------------------------------------------------------- from JSON, and to it


def decode(kind: type[T], value: Any) -> T:
    """Return the value of type ``kind`` of what JSON holds. Raises SchemaError."""
    hint: Any = kind
    decoded: T = _decoder(hint)(value)
    return decoded


@cache
def _decoder(hint: Any) -> Decode:
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        decode_scalar: Decode = args[1].decode
        return decode_scalar
    if hint in _LEAVES:
        return _LEAVES[hint].decode
    if origin in (Union, UnionType):  # of these only `X | None` is used
        inner = _decoder(next(arg for arg in args if arg is not NoneType))
        return lambda value: None if value is None else inner(value)
    if origin in (tuple, list):
        decode_item = _decoder(args[0])

        def decode_list(value: Any) -> Any:
            if not isinstance(value, list):
                raise SchemaError(f"{_shown(value)} is not a list")
            return origin(_decoded(f"[{index}]", item, decode_item) for index, item in enumerate(value))

        return decode_list
    if origin in (Mapping, dict):
        decode_name, decode_value = _decoder(args[0]), _decoder(args[1])
        return lambda value: {
            _decoded(_clean(name), name, decode_name): _decoded(_clean(name), item, decode_value)
            for name, item in _object(value).items()
        }
    if issubclass(hint, StrEnum):
        return dataclasses.replace(one_of(*hint), load=hint).decode
    return _record_decoder(hint)


def _decoded(key: str, value: Any, decode_value: Decode) -> Any:
    """Return the value of a part, whose name in its list or object is ``key``. Raises SchemaError with the key."""
    try:
        return decode_value(value)
    except SchemaError as error:
        raise error.within(key) from None


def _record_decoder(kind: Any) -> Decode:
    hints = get_type_hints(kind, include_extras=True)
    fields = dataclasses.fields(kind)
    decoders = {each.name: _decoder(hints[each.name]) for each in fields}
    needed = [each.name for each in fields if each.default is each.default_factory is dataclasses.MISSING]

    def decode_record(value: Any) -> Any:
        items = _object(value).items()
        known = {name: _decoded(name, item, decoders[name]) for name, item in items if name in decoders}
        for name in needed:
            if name not in known:
                raise SchemaError("this key is missing", name)
        return kind(**known)

    return decode_record


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SchemaError(f"{_shown(value)} is not an object with keys")
    return value


@cache
def _encoder(hint: Any) -> Decode | None:
    """Return what makes JSON of a value of this type; None where it is JSON already."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        dump: Decode | None = args[1].dump
        return dump
    if hint in _LEAVES:
        return None
    if origin in (Union, UnionType):
        inner = _encoder(next(arg for arg in args if arg is not NoneType))
        return inner and (lambda value: None if value is None else inner(value))
    if origin in (tuple, list):
        item = _encoder(args[0])
        return list if item is None else (lambda value: list(map(item, value)))
    if origin in (Mapping, dict):
        return dict
    return str if issubclass(hint, StrEnum) else hint.to_json


@cache
def _encoders(kind: Any) -> dict[str, Decode | None]:
    hints = get_type_hints(kind, include_extras=True)
    return {each.name: _encoder(hints[each.name]) for each in dataclasses.fields(kind)}


@dataclass(frozen=True)
class JsonRecord:
    """An object with the keys that the fields declare. A key whose field has a default may be missing."""

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the record of a JSON value, of a message for example. Raises SchemaError."""
        return decode(cls, fsio.nonfinite_to_none(value))

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON, with all its keys."""
        kind: Any = type(self)
        values = ((name, getattr(self, name), encode) for name, encode in _encoders(kind).items())
        return {name: value if encode is None else encode(value) for name, value, encode in values}

    def replace(self, **changes: Any) -> Self:
        """Return the record with other values."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class FileRecord(JsonRecord):
    """The content of a file, or a line of one. Its readers are the functions of the same names."""

    version: int = field(default=VERSION, kw_only=True)

    def __post_init__(self) -> None:
        if self.version > VERSION:
            raise SchemaError(f"{self.version} is of a newer toolkit; this one reads up to {VERSION}", "version")

    @classmethod
    def read(cls, path: Path) -> Self | None:
        return read(path, cls)

    @classmethod
    def read_or_none(cls, path: Path) -> Self | None:
        return read_or_none(path, cls)

    @classmethod
    def read_lines(cls, path: Path) -> list[Self]:
        return read_lines(path, cls)


# --------------------------------------------------------------------------------------------------------------- files


def read(path: Path, kind: type[T]) -> T | None:
    """Return the value in ``path``; None if there is no such file.

    Raises DamagedFileError for a file that does not fit, and TornFileError for one that is not JSON.
    """
    try:
        with _refused(str(path)):
            return decode(kind, _parse(_read_bytes(path)))
    except FileNotFoundError:
        return None


def read_or_none(path: Path, kind: type[T]) -> T | None:
    """Return what :func:`read` does, but None, with a warning, for a file that does not fit. It is made anew."""
    try:
        return read(path, kind)
    except DamagedFileError as error:
        warn_once(f"{str(error).removesuffix(_ADVICE)}; it is not used")
        return None


def read_lines(path: Path, kind: type[T], *, skips_damage: bool = False) -> list[T]:
    """Return the values in the lines of ``path``; none of a missing file. Raises DamagedFileError.

    With ``skips_damage``, for a file of many writers, lines that do not fit are left out, with a warning for the first.
    """
    try:
        with _refused(str(path)):
            raw = _read_bytes(path, fsio.LONG_BYTES)
    except FileNotFoundError:
        return []
    found: list[T] = []
    *whole, last = raw.split(b"\n")
    damage: DamagedFileError | None = None
    for number, line in enumerate(whole, 1):
        try:
            with _refused(f"{path}, line {number},"):
                found.append(decode(kind, _parse(line)))
        except DamagedFileError as error:
            if not skips_damage:
                raise
            damage = damage or error
    if damage is not None:
        warn_once(f"{str(damage).removesuffix(_ADVICE)}; lines that do not fit are left out")
    if b"\0" in last:
        warn_once(f"{path}: its last line holds zeros, as a node that died leaves them, and is left out")
    # The last line has no line break: it counts if only that is missing.
    with contextlib.suppress(TornFileError), _refused(f"{path}, the last line,"):
        found.append(decode(kind, _parse(last)))
    return found


@cache
def warn_once(text: str) -> None:
    """Warn of something once in the life of this process."""
    log.warning("%s", text)


@contextlib.contextmanager
def _refused(where: str) -> Iterator[None]:
    """Raise a SchemaError as the error of the file."""
    try:
        yield
    except SchemaError as error:
        kind = TornFileError if isinstance(error, _Torn) else DamagedFileError
        raise kind(f"{where} cannot be read: {error}{_ADVICE}") from None


def _read_bytes(path: Path, most_bytes: int = fsio.MOST_BYTES) -> bytes:
    """Read a file that another node may replace at this moment. NFS then reports ESTALE, once."""
    for left in reversed(range(_TRIES)):
        try:
            return fsio.read_bytes(path, most_bytes)
        except OSError as error:
            if error.errno in _LASTING:
                raise SchemaError(error.strerror or str(error)) from None
            if error.errno != errno.ESTALE or not left:
                raise
    raise AssertionError("the last try returns or raises")


def _parse(raw: bytes) -> Any:
    """Return the JSON value in ``raw``, of any type. Raises SchemaError."""
    if not raw.strip(b"\0 \t\r\n"):
        raise _Torn("it holds NUL bytes only" if b"\0" in raw else "it is empty")
    try:
        return json.loads(raw.decode())
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise _Torn(f"byte {error.start + 1} is not UTF-8") from None
    except ValueError as error:
        raise _Torn(f"it is not JSON ({error})") from None


def _shown(value: Any) -> str:
    """Return a value for a message: short, and in characters that every terminal has."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return "a huge number"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
