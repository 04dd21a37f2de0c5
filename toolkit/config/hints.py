"""Tells which plain values an annotation allows.

These are texts, numbers, true and false, null, and lists and mappings of them.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from toolkit.config.words import TEXT, Limit, one_of

#: The types that ``Any`` stands for: anything but a list or a mapping.
SCALARS = (str, int, float, bool)
#: Any scalar.
PLAIN: Any = str | int | float | bool | None
#: What errors call the types.
NAME_OF_KIND: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}


@cache
def hints_of(schema: Any) -> dict[str, Any]:
    """Return the type of each field of a dataclass."""
    return get_type_hints(schema)


@cache
def limits_of(schema: Any, prefix: str = "") -> dict[str, tuple[Limit, ...]]:
    """Return what the values of a dataclass and its sections may be, by dotted key."""
    found: dict[str, tuple[Limit, ...]] = {}
    for name, hint in get_type_hints(schema, include_extras=True).items():
        if is_dataclass(hint):
            found |= limits_of(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            stated = [member.__metadata__ for member in members(hint) if hasattr(member, "__metadata__")]
            found[f"{prefix}{name}"] = stated[0] if stated else (TEXT,)
    return found


def members(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union. Any other type is the only one."""
    if hint is Any:
        return SCALARS
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def kinds_of(hint: Any) -> tuple[type, ...]:
    """Return the types of the scalars that ``hint`` allows."""
    found: list[type] = []
    for member in members(hint):
        if get_origin(member) is Literal:
            found += [type(word) for word in get_args(member)]
        elif get_origin(member) is None:
            found.append(member)
    return tuple(dict.fromkeys(found))


def words_of(hint: Any) -> tuple[Any, ...]:
    """Return the only scalars that ``hint`` allows besides null; empty where it allows others, too."""
    scalars = [member for member in members(hint) if get_origin(member) in (None, Literal) and member is not NoneType]
    literals = [word for member in scalars if get_origin(member) is Literal for word in get_args(member)]
    return tuple(literals) if all(get_origin(member) is Literal for member in scalars) else ()


def kind_names(kinds: tuple[type, ...]) -> str:
    """Return the types as errors name them: ``a whole number or null``."""
    return " or ".join(name for kind, name in NAME_OF_KIND.items() if kind in kinds)


def check_word(key: str, value: Any, hint: Any) -> None:
    """Raise ConfigError for a value that is none of the words of ``hint``. The error names the key."""
    words = words_of(hint)
    if words and value is not None and value not in words:
        one_of(key, str(value), map(str, words))


def container_of(hint: Any, *kinds: type) -> Any:
    """Return the first member of ``hint`` that is one of ``kinds``, or None.

    For ``int | list[int]`` and the kind ``list`` that is ``list[int]``.
    """
    return next((member for member in members(hint) if get_origin(member) in kinds), None)


def item_hints(hint: Any, count: int) -> list[Any]:
    """Return the types of ``count`` items of a list or tuple. Raises ValueError for a tuple with another number."""
    args = get_args(hint)
    if get_origin(hint) is not tuple or args[1:] == (...,):
        return [args[0]] * count
    if len(args) != count:
        raise ValueError(f"takes {len(args)} items, not {count}")
    return list(args)


def fits(value: Any, kinds: tuple[type, ...]) -> bool:
    """True if a scalar is of one of ``kinds``. A whole number is also a float."""
    return type(value) in kinds or (type(value) is int and float in kinds and abs(value) < 2**63)


def as_kind(value: Any, kinds: tuple[type, ...]) -> Any:
    """Return ``value``, which fits ``kinds``. A whole number becomes a float where only that is allowed."""
    return float(value) if type(value) is int and int not in kinds else value


def plain(value: Any, hint: Any) -> Any:
    """Return a Python literal as the plain value of a config. Raises ValueError where ``hint`` does not allow it."""
    # A list does not fit a tuple here, nor a tuple a list: Python would not convert the default either.
    if isinstance(value, (list, tuple)):
        container = container_of(hint, type(value))
        if container is None:
            raise ValueError
        return [plain(item, each) for item, each in zip(value, item_hints(container, len(value)), strict=True)]
    if isinstance(value, dict):
        container = container_of(hint, dict)
        if container is None or not all(isinstance(key, str) for key in value):
            raise ValueError
        return {key: plain(item, get_args(container)[1]) for key, item in value.items()}
    kinds, words = kinds_of(hint), words_of(hint)
    if not fits(value, kinds) or (words and value is not None and value not in words):
        raise ValueError
    return as_kind(value, kinds)


def text_of(hint: Any) -> str:
    """Return the type as Python writes it: ``int | None``, ``list[float]``, ``'a' | 'b'``."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is NoneType:
        return "None"
    if hint is ...:
        return "..."
    if origin in (Union, UnionType):
        return " | ".join(map(text_of, args))
    if origin is Literal:
        return " | ".join(map(repr, args))
    name = getattr(origin or hint, "__name__", str(hint))
    return f"{name}[{', '.join(map(text_of, args))}]" if args else name
