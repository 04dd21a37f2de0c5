"""What the value of a key may be, stated in the annotation of its field, and the errors for any other.

Such as ``mode: Annotated[str, OneOf("sync", "async")] = "sync"`` in the dataclass of a section. What depends on other
keys of the section is refused by its method ``check()``. :func:`toolkit.config.validate` calls both. The second half
tells which plain values an annotation allows: texts, numbers, true and false, null, and lists and mappings of them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Protocol, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from toolkit import registry
from toolkit.base import fsio
from toolkit.base.errors import ConfigError, did_you_mean

Choice = TypeVar("Choice")


class Limit(Protocol):
    """What the value of a key may be."""

    def check(self, key: str, value: Any) -> None:
        """Raise ConfigError, naming the key, for any other value. None passes: the type says whether it may be."""


@dataclass(frozen=True)
class Text:
    """A text, or a list or mapping of some, without control characters but those in ``also``; anything but texts.

    A line break would start a new line in the job's script. This is the limit of a key that states none.
    """

    also: str = ""
    is_path: bool = False  #: such that the system can look it up

    def check(self, key: str, value: Any) -> None:
        if value is None or isinstance(value, (int, float)):  # most keys, of thousands of configs
            return
        words = {key: value}
        if isinstance(value, list):
            words = {f"{key}[{index}]": word for index, word in enumerate(value)}
        elif isinstance(value, dict):
            words = {f"{key}.{name}": f"{name}{word}" for name, word in value.items()}
        for full, word in words.items():
            if not isinstance(word, str):
                continue
            if not ((word.strip() or self.also) and is_one_line(word, self.also)):
                raise ConfigError(f"{full}: {word!r} is empty or holds a line break or another control character")
            if self.is_path:
                try:
                    Path(word).expanduser().exists()
                except RuntimeError:
                    raise ConfigError(f"{full}: there is no user whose home folder {word!r} could be in") from None
                except OSError as error:
                    raise ConfigError(f"{full}: {word!r} cannot be looked for: {error.strerror}") from None


class OneOf:
    """One of these words, or of what there is of a ``kind``."""

    def __init__(self, *words: str, kind: registry.Kind | None = None) -> None:
        self._words, self._kind = words, kind

    @property
    def words(self) -> tuple[str, ...]:
        """Return the words, those of other packages last."""
        return self._words if self._kind is None else tuple(registry.names(self._kind))

    def check(self, key: str, value: str | None) -> None:
        if value is None or value in self._words:
            return
        if self._kind is None or registry.where(self._kind, value) is None:
            one_of(key, value, self.words)


@dataclass(frozen=True)
class Range:
    """A number between these, or one of them. One beyond is a mistake, and would overflow somewhere."""

    least: float
    most: float

    def check(self, key: str, value: float | None) -> None:
        within(key, value, self.least, self.most)


@dataclass(frozen=True)
class Where:
    """A value for which ``holds`` is true. The error for any other is ``says``, formatted with it."""

    holds: Callable[[Any], object]
    says: str

    def check(self, key: str, value: Any) -> None:
        if value is not None and not self.holds(value):
            raise ConfigError(f"{key}: {self.says.format(value)}")


MANY, STEPS = 10**9, 10**12
Count: TypeAlias = Annotated[int, Range(1, MANY)]
Steps: TypeAlias = Annotated[int, Range(1, STEPS)]
_LESS_THAN_1 = Where(lambda value: value != 1, "1 never forgets anything; use less than 1, such as 0.9")
Momentum: TypeAlias = Annotated[float, Range(0, 1), _LESS_THAN_1]
Factor: TypeAlias = Annotated[float, Range(0, 10_000)]
TEXT, PATH, LINES = Text(), Text(is_path=True), Text(also="\t\r\n")


def steps_or(word: str) -> Where:
    """Return the limit of a number of steps, or of ``word`` in its place."""
    says = f"{{!r}} is not valid; must be a number of steps (1 or more) or {word!r}"
    return Where(lambda value: value == word or (isinstance(value, int) and 1 <= value <= STEPS), says)


def is_absolute(path: str) -> bool:
    """True for a path from the root or from a user's home folder."""
    return fsio.expand(path).is_absolute()


def choose(key: str, value: str, choices: Mapping[str, Choice]) -> Choice:
    """Return the choice that belongs to the config's ``value``. Raises ConfigError, naming the key, for any other."""
    one_of(key, value, choices)
    return choices[value]


def one_of(key: str, value: str, valid: Iterable[str]) -> None:
    names = list(valid)
    if value not in names:
        shown = ", ".join(names[:12])
        if len(names) > 12:
            shown += f" and {len(names) - 12} more"
        raise ConfigError(f"{key}: unknown value {value!r}; {did_you_mean(value, names)}valid: {shown}")


def within(key: str, value: float | None, least: float, most: float) -> None:
    """Refuse a number outside of the bounds, and infinity and NaN, too. Raises ConfigError."""
    if value is not None and not least <= value <= most:
        bounds = f"{least} or more" if most >= MANY and value < most else f"between {least} and {most:g}"
        raise ConfigError(f"{key}: {value} is out of range; must be {bounds}")


def is_one_line(text: str, also: str = "") -> bool:
    """True if ``text`` can be UTF-8 and has no control character, such as a line break, but those in ``also``."""
    if text.isprintable():  # such a text has none of these characters
        return True
    return not any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") and char not in also for char in text)


def tensor_style(key: str, style: str, valid: Iterable[str]) -> tuple[str, int]:
    """Return the kind of a style of ``strategy.tensor_plan``, and its number of parts: 3 of ``colwise:3``."""
    kind, colon, parts = style.partition(":")
    if not colon or kind != "colwise":
        one_of(key, style, [*valid, "colwise:N"])
        return style, 1
    if not parts.isdecimal() or int(parts) < 2:
        raise ConfigError(
            f"{key}: {style!r} is not valid; after the colon goes the number of equal parts of the outputs: "
            "colwise:3 for q, k and v in one layer, colwise:2 for gate and up"
        )
    return kind, int(parts)


#: The types that ``Any`` stands for: anything but a list or a mapping.
SCALARS = (str, int, float, bool)
PLAIN: Any = str | int | float | bool | None
#: The types as errors name them.
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
            found += map(type, get_args(member))
        elif get_origin(member) is None:
            found.append(member)
    return tuple(dict.fromkeys(found))


def words_of(hint: Any) -> tuple[Any, ...]:
    """Return the only scalars that ``hint`` allows besides null; empty where it allows others, too."""
    scalars = [member for member in members(hint) if get_origin(member) in (None, Literal) and member is not NoneType]
    if any(get_origin(member) is None for member in scalars):
        return ()
    return tuple(word for member in scalars for word in get_args(member))


def kind_names(kinds: tuple[type, ...]) -> str:
    """Return the types as errors name them: ``a whole number or null``."""
    return " or ".join(name for kind, name in NAME_OF_KIND.items() if kind in kinds)


def check_word(key: str, value: Any, hint: Any) -> None:
    """Raise ConfigError for a value that is none of the words of ``hint``. The error names the key."""
    words = words_of(hint)
    if words and value is not None and value not in words:
        one_of(key, str(value), map(str, words))


def container_of(hint: Any, *kinds: type) -> Any:
    """Return the first member of ``hint`` that is one of ``kinds``: ``list[int]`` of ``int | list[int]`` for list."""
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
