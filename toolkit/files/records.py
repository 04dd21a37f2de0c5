"""Reads JSON files that may be damaged, each by the shape declared for it.

A power cut, a full disk or an editor leaves files that are empty, cut off, full of NULs, or of another type. The part
of such a file that fits its shape is returned. Each part that does not fit is left out and named with its file, line
and key: in the caller's list, or else once in the log. Keys that a shape does not name are passed on: a newer version
of this package may have written them.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from toolkit.base import fsio, logs, reading
from toolkit.base.errors import DamagedFileError

#: The toolkit writes nothing that is nested more deeply. Python gives up at about 1,000.
MOST_NESTED = 32
#: Errors of a file that last: its content is out of reach, as if it were damaged. Other errors may pass.
_LASTING = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EFBIG)
#: How often a file is read that another node replaces meanwhile.
_TRIES = 3

log = logs.get(__name__)


class Misfit(Exception):
    """A value that does not fit its shape; the message says which key, and why."""


@dataclass(frozen=True)
class Leaf:
    """A value without parts: ``fits`` accepts no list and no object. ``what`` names it in messages."""

    what: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True)
class OrNull:
    """A value of ``shape``, or null."""

    shape: Shape


class Either:
    """A value that fits one of these shapes; the first that fits is taken."""

    def __init__(self, *shapes: Shape) -> None:
        self.shapes = shapes


@dataclass(frozen=True)
class Maybe:
    """In a :class:`Record`: a key that may be missing. It is left out if its value does not fit."""

    shape: Shape


@dataclass(frozen=True)
class Null:
    """In a :class:`Record`: a key that may be missing or null. It is None if its value does not fit."""

    shape: Shape


@dataclass(frozen=True)
class ListOf:
    """A list. One item that does not fit spoils it, because the positions of the others have a meaning."""

    shape: Shape


@dataclass(frozen=True)
class MapOf:
    """An object with any keys. An item that does not fit is left out."""

    shape: Shape


@dataclass(frozen=True)
class Record:
    """An object with these keys. A key that is neither :class:`Maybe` nor :class:`Null` must be there, and fit."""

    keys: Mapping[str, Shape | Maybe | Null]


Shape: TypeAlias = Leaf | OrNull | Either | ListOf | MapOf | Record


def one_of(*words: str) -> Leaf:
    """Return the shape of one of these texts."""
    return Leaf(f"one of {', '.join(words)}", lambda value: isinstance(value, str) and value in words)


def _is_text(value: Any) -> bool:
    """True for a text that a file name, and a UTF-8 file, can hold."""
    if not isinstance(value, str) or "\0" in value:
        return False
    return value.isascii() or value == value.encode(errors="ignore").decode()


_WORD = re.compile(r"\w[\w.+-]{0,254}")


def _is_number(value: Any) -> bool:
    if type(value) is float:  # most are
        return -1e300 < value < 1e300
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300 and value == value


def _is_time_text(value: Any) -> bool:
    try:
        time = datetime.fromisoformat(value)
    except (TypeError, ValueError):
        return False
    return time.tzinfo is not None and 1970 <= time.year < 9999


TEXT = Leaf("text", _is_text)
#: An id or the name of a host, which may become a part of a path or an argument of a program.
WORD = Leaf("a word", lambda value: isinstance(value, str) and _WORD.fullmatch(value) is not None)
COUNT = Leaf("a count", lambda value: type(value) is int and 0 <= value < 2**63)
NUMBER = Leaf("a number", _is_number)
FLAG = Leaf("true or false", lambda value: isinstance(value, bool))
#: Seconds since 1970, up to the year 9999.
MOMENT = Leaf("a time in seconds", lambda value: _is_number(value) and 0 <= value < 253_402_300_000)
TIME_TEXT = Leaf("a time such as 2026-01-31T12:00:00+00:00", _is_time_text)


def read(path: Path, shape: Shape, damage: list[str] | None = None) -> Any | None:
    """Return the value in ``path`` as far as it fits. None if there is no such file.

    Raises DamagedFileError if nothing of it can be used.
    """
    try:
        value = _parse(_read_bytes(path))
        return value if _check(shape)(value) else _fit(value, shape, "", _Notes(f"{path}: ", damage))
    except FileNotFoundError:
        return None
    except Misfit as misfit:
        raise DamagedFileError(f"{path} is damaged: {misfit}") from None


def fit(value: Any, shape: Shape) -> Any:
    """Return ``value``, all of which must fit, with NaN and infinities as null. Raises Misfit."""
    damage = list[str]()
    _refuse_depth(value, "", MOST_NESTED)
    found = _fit(fsio.finite(value), shape, "", _Notes("", damage))
    if damage:
        raise Misfit(damage[0])
    return found


def read_or(path: Path, shape: Shape, default: Any, damage: list[str] | None = None) -> Any:
    """Return what :func:`read` does, or ``default`` for a missing or useless file. A useless one is named."""
    try:
        value = read(path, shape, damage)
    except DamagedFileError as error:
        note(str(error), damage)
        return default
    return default if value is None else value


def read_lines(path: Path, shape: Shape, damage: list[str] | None = None, *, may_be_empty: bool = True) -> list[Any]:
    """Return the lines of ``path`` that fit; none of a missing file.

    A last line without a line break counts if it fits: then only the break is missing.
    """
    try:
        raw = _read_bytes(path, reading.LONG_BYTES)
        if not raw and not may_be_empty:
            raise Misfit("it is empty")
    except FileNotFoundError:
        return []
    except Misfit as misfit:
        note(f"{path} is damaged: {misfit}", damage)
        return []
    # A damaged line leaves the others as they are.
    found = []
    for number, line in enumerate(raw.removesuffix(b"\n").split(b"\n") if raw else [], 1):
        try:
            value = _parse(line)
            fits = _check(shape)(value)
            found.append(value if fits else _fit(value, shape, "", _Notes(f"{path}, line {number}: ", damage)))
        except Misfit as misfit:
            note(f"{path}, line {number}, is damaged and left out: {misfit}", damage)
    return found


def set_aside(path: Path, damage: Sequence[str]) -> None:
    """Keep a damaged file under another name, so that a new one can be written."""
    log.warning("%s; the file is kept as %s", "; ".join(damage), fsio.set_aside(path).name)


def note(text: str, damage: list[str] | None) -> None:
    """Add ``text`` to the list. Without a list warn of it, once in the life of this process."""
    if damage is None:
        _warn(text)
    elif text not in damage:
        damage.append(text)


@cache
def _warn(text: str) -> None:
    log.warning("%s", text)


@dataclass(frozen=True)
class _Notes:
    """Where parts that are left out are named."""

    where: str
    damage: list[str] | None

    def left_out(self, misfit: Misfit) -> None:
        note(f"{self.where}{misfit}; left out", self.damage)


def _read_bytes(path: Path, most_bytes: int = reading.MOST_BYTES) -> bytes:
    """Read a file that another node may replace at this moment. NFS then reports ESTALE, once."""
    for left in reversed(range(_TRIES)):
        try:
            return reading.read_bytes(path, most_bytes)
        except OSError as error:
            if error.errno in _LASTING:
                raise Misfit(error.strerror or str(error)) from None
            if error.errno != errno.ESTALE or not left:
                raise
    raise AssertionError("the last try returns or raises")


def _parse(raw: bytes) -> Any:
    """Return the JSON value in ``raw``, of any type. Raises Misfit."""
    if not raw.strip(b"\0 \t\r\n"):
        raise Misfit("it holds NUL bytes only" if b"\0" in raw else "it is empty")
    try:
        return json.loads(raw.decode())
    except RecursionError:
        raise Misfit("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise Misfit(f"byte {error.start + 1} is no UTF-8") from None
    except ValueError as error:
        raise Misfit(f"it is no JSON ({error})") from None


#: The check of each shape that was asked for, by the shape's identity: dicts have no hash.
_CHECKS: dict[int, tuple[Shape | Null, Callable[[Any], bool]]] = {}


def _check(shape: Shape | Null) -> Callable[[Any], bool]:
    """Return a check that is True only of values that :func:`_fit` returns as they are.

    It is several times faster, because it names no keys. Nearly all files fit.
    """
    if id(shape) not in _CHECKS:
        _CHECKS[id(shape)] = (shape, _new_check(shape))
    return _CHECKS[id(shape)][1]


def _new_check(shape: Shape | Null) -> Callable[[Any], bool]:
    match shape:
        case Leaf():
            return shape.fits
        case OrNull(inner) | Null(inner):
            inner_check = _check(inner)
            return lambda value: value is None or inner_check(value)
        case Either():
            checks = [_check(each) for each in shape.shapes]
            return lambda value: any(each(value) for each in checks)
        case ListOf(inner):
            item_check = _check(inner)
            return lambda value: isinstance(value, list) and all(map(item_check, value))
        case MapOf(inner):
            value_check = _check(inner)
            return lambda value: (
                isinstance(value, dict) and all(map(_is_text, value)) and all(map(value_check, value.values()))
            )
        case Record(keys):
            by_name = {name: _check(each.shape if isinstance(each, Maybe) else each) for name, each in keys.items()}
            needed = {name for name, each in keys.items() if not isinstance(each, Maybe)}

            def check(value: Any) -> bool:
                if not isinstance(value, dict) or not needed <= value.keys():
                    return False
                for name, item in value.items():
                    # An unknown key may be nested too deeply: `_fit` looks.
                    known = by_name.get(name)
                    if isinstance(item, (dict, list)) if known is None else not known(item):
                        return False
                return True

            return check


def _fit(value: Any, shape: Shape, key: str, notes: _Notes) -> Any:
    match shape:
        case Leaf(what, fits):
            if not fits(value):
                raise Misfit(f"{_named(key)}{_shown(value)} is not {what}")
            return value
        case OrNull(inner):
            return None if value is None else _fit(value, inner, key, notes)
        case Either():
            # If none fits, the last shape's reason is reported.
            for each in shape.shapes[:-1]:
                with contextlib.suppress(Misfit):
                    return _fit(value, each, key, notes)
            return _fit(value, shape.shapes[-1], key, notes)
        case ListOf(inner):
            if not isinstance(value, list):
                raise Misfit(f"{_named(key)}{_shown(value)} is not a list")
            if isinstance(inner, Leaf) and all(map(inner.fits, value)):  # fast for lists of thousands of nodes
                return value
            return [_fit(item, inner, f"{key}[{index}]", notes) for index, item in enumerate(value)]
        case MapOf(inner):
            _refuse_other_than_object(value, key)
            items: dict[str, Any] = {}
            for name, item in value.items():
                try:
                    _fit(name, TEXT, key, notes)
                    items[name] = _fit(item, inner, _join(key, name), notes)
                except Misfit as misfit:
                    notes.left_out(misfit)
            return items
        case Record(keys):
            _refuse_other_than_object(value, key)
            # Keys that the shape does not name are passed on.
            return {**dict(_fields_that_fit(value, keys, key, notes)), **_unknown(value, keys, key)}


def _fields_that_fit(
    value: Mapping[str, Any], keys: Mapping[str, Shape | Maybe | Null], key: str, notes: _Notes
) -> Iterator[tuple[str, Any]]:
    for name, shape in keys.items():
        inner = shape.shape if isinstance(shape, (Maybe, Null)) else shape
        # A key that must be there spoils the whole record; others are left out, or None.
        if name not in value and inner is shape:
            raise Misfit(f"it has no {_join(key, name)!r}")
        if isinstance(shape, Null) and value.get(name) is None:
            yield name, None
        elif name in value:
            try:
                yield name, _fit(value[name], inner, _join(key, name), notes)
            except Misfit as misfit:
                if inner is shape:
                    raise
                notes.left_out(misfit)
                if isinstance(shape, Null):
                    yield name, None


def _unknown(value: Mapping[str, Any], keys: Mapping[str, Any], key: str) -> dict[str, Any]:
    more = {name: item for name, item in value.items() if name not in keys}
    _refuse_depth(more, key, MOST_NESTED)
    return more


def _refuse_other_than_object(value: Any, key: str) -> None:
    if not isinstance(value, dict):
        raise Misfit(f"{_named(key)}{_shown(value)} is not an object with keys")


def _refuse_depth(value: Any, key: str, left: int) -> None:
    """Raise Misfit for a value that is nested too deeply to be copied or printed."""
    if not isinstance(value, (dict, list)):
        return
    if not left:
        raise Misfit(f"{_named(key)}it is nested too deeply")
    for item in value.values() if isinstance(value, dict) else value:
        _refuse_depth(item, key, left - 1)


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _named(key: str) -> str:
    return f"{key}: " if key else ""


def _shown(value: Any) -> str:
    """Return a value for a message: short, and in characters that every terminal has."""
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**20:
        return "a huge number"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
