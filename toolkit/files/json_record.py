"""Records as frozen classes, whose fields declare the keys of a JSON file.

The type of a field says what fits (:func:`_codec`). Where a field has a default its key may be missing, and a value
that does not fit is left out and named (`toolkit.files.records`): the field then has its default. Without a default it
spoils the record. Keys that a newer version of this package has added are kept in ``extra``, and written again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Self, Union, get_args, get_origin, get_type_hints

from toolkit.files import records
from toolkit.files.records import COUNT, FLAG, NUMBER, TEXT, ListOf, MapOf, Maybe, Null, OrNull

#: The version of the files that are written here. A file without a ``version`` has version 1.
VERSION = 1


@dataclass(frozen=True)
class JsonCodec:
    """How a value is kept in JSON: its shape there, and the conversions."""

    shape: records.Shape
    load: Callable[[Any], Any] | None = None  #: None: the value as it is
    dump: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class JsonRecord:
    """A record in a JSON file.

    It is written with the keys that it was made or read with, and no others: a writer that does not know a value
    does not write its default.
    """

    extra: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  #: keys that this version does not know
    _keys: tuple[str, ...] = field(default=(), init=False, repr=False, compare=False)

    def __new__(cls, *values: Any, **named: Any) -> Self:
        record = super().__new__(cls)
        # The names of the fields by position: this is called for each record that a file holds.
        object.__setattr__(record, "_keys", (*cls.__match_args__[: len(values)], *named))
        return record

    @classmethod
    def load(cls, value: Mapping[str, Any]) -> Self:
        """Return the record of a JSON value that fits."""
        codecs, known, extra = _codecs(cls), dict[str, Any](), dict[str, Any]()
        for name, item in value.items():
            codec = codecs.get(name)
            if codec is None:
                extra[name] = item
            else:
                known[name] = item if codec.load is None else codec.load(item)
        return cls(**known, extra=extra)

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the record of a JSON value, all of which must fit. Raises Misfit."""
        return cls.load(records.fit(value, shape_of(cls)))

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON."""
        codecs = _codecs(type(self))
        known = {name: codecs[name].dump(getattr(self, name)) for name in self._keys if name in codecs}
        return {**known, **self.extra}

    def merged(self, other: Self) -> Self:
        """Return the record with the values that ``other`` was made with."""
        return self.replace(**other.given(*other._keys))

    def replace(self, **changes: Any) -> Self:
        """Return the record with other values. Keys that it does not have, and that do not change, stay unwritten."""
        return type(self)(**{**self.given(*self._keys), **changes})

    def given(self, *names: str) -> dict[str, Any]:
        """Return the values of ``names``, of those that the record was made or read with."""
        return {name: getattr(self, name) for name in names if name in self._keys}


@dataclass(frozen=True)
class FileRecord(JsonRecord):
    """The content of a file, or a line of one."""

    version: int = field(default=VERSION, kw_only=True)

    @classmethod
    def read(cls, path: Path, damage: list[str] | None = None) -> Self | None:
        """Return the record in ``path`` as far as it fits. None without a file; DamagedFileError for a useless one.

        ``damage`` gets the parts that are left out; without it they are named in the log.
        """
        return cls._of_file(records.read(path, shape_of(cls), damage), path)

    @classmethod
    def read_or_none(cls, path: Path, damage: list[str] | None = None) -> Self | None:
        """Return what :meth:`read` does, but None for a useless file. It is named like a part that is left out."""
        return cls._of_file(records.read_or(path, shape_of(cls), None, damage), path)

    @classmethod
    def read_lines(cls, path: Path, damage: list[str] | None = None) -> list[Self]:
        """Return the records in the lines of ``path`` that fit. Without a file there are none."""
        # The file is made with its first line, so an empty one has lost lines.
        lines = records.read_lines(path, shape_of(cls), damage, may_be_empty=False)
        return [record for line in lines if (record := cls._of_file(line, path)) is not None]

    @classmethod
    def _of_file(cls, value: Any, path: Path) -> Self | None:
        if value is None:
            return None
        record = cls.load(value)
        if record.version > VERSION:
            newer = f"{path} has version {record.version}, and this toolkit knows {VERSION}"
            records.note(f"{newer}: it is read as far as it fits", None)
        return record

    def to_file(self) -> dict[str, Any]:
        """Return the record as JSON, with the version."""
        return {"version": self.version, **self.to_json()}


#: For a key that is None if it is missing or does not fit, and is then passed on as null.
NULL = {"is null": True}


#: What the next two functions have found out about each class. (functools.cache takes no type[Self] for mypy.)
_SHAPES: dict[type[JsonRecord], records.Record] = {}
_CODECS: dict[type[JsonRecord], dict[str, JsonCodec]] = {}


def shape_of(kind: type[JsonRecord]) -> records.Record:
    """Return the shape of a record, by its fields."""
    if kind in _SHAPES:
        return _SHAPES[kind]
    keys: dict[str, records.Shape | Maybe | Null] = {}
    declared = {each.name: each for each in dataclasses.fields(kind)}
    for name, codec in _codecs(kind).items():
        each = declared[name]
        is_required = each.default is each.default_factory is dataclasses.MISSING
        may_be_missing = Null(codec.shape) if "is null" in each.metadata else Maybe(codec.shape)
        keys[name] = codec.shape if is_required else may_be_missing
    return _SHAPES.setdefault(kind, records.Record(keys))


def _codecs(kind: type[JsonRecord]) -> dict[str, JsonCodec]:
    if kind not in _CODECS:
        hints = get_type_hints(kind, include_extras=True)
        names = [each.name for each in dataclasses.fields(kind) if each.name not in ("extra", "_keys")]
        _CODECS[kind] = {name: _codec(hints[name]) for name in names}
    return _CODECS[kind]


_LEAVES = {str: TEXT, int: COUNT, float: NUMBER, bool: FLAG}


def _codec(hint: Any) -> JsonCodec:
    """Return how values of this type are kept. A shape or codec in ``Annotated`` comes before the type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return args[1] if isinstance(args[1], JsonCodec) else JsonCodec(args[1])
    if hint in _LEAVES:
        return JsonCodec(_LEAVES[hint])
    # Of a union only `X | None` is a record's type.
    if origin in (Union, UnionType):
        (inner,) = (_codec(arg) for arg in args if arg is not type(None))
        return JsonCodec(OrNull(inner.shape), inner.load and _or_none(inner.load), _or_none(inner.dump))
    if origin is tuple:
        item = _codec(args[0])
        return JsonCodec(
            ListOf(item.shape),
            lambda value: tuple(value if item.load is None else map(item.load, value)),
            lambda value: list(map(item.dump, value)),
        )
    if origin is Mapping:
        return JsonCodec(MapOf(_codec(args[1]).shape), None, dict)
    if issubclass(hint, StrEnum):
        return JsonCodec(records.one_of(*hint), hint, str)
    # Any other type is a record itself.
    return JsonCodec(shape_of(hint), hint.load, hint.to_json)


def _or_none(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)
