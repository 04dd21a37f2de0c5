"""The words and bounds of a key, and errors for a value that is none of those that it may have."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from toolkit.errors import ConfigError, nearest

Choice = TypeVar("Choice")


class OneOf:
    """The words that a key of a section may have: ``mode: Annotated[str, OneOf("sync", "async")]``."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def check(self, key: str, value: str | None) -> None:
        """Raise ConfigError, naming the key, for another word. None passes."""
        if value is not None:
            one_of(key, value, self.words)


@dataclass(frozen=True)
class Range:
    """The least and the most that a number of a section may be: ``nodes: Annotated[int, Range(1, 65_533)]``."""

    least: float
    most: float

    def check(self, key: str, value: float | None) -> None:
        """Raise ConfigError, naming the key, for a number beyond the bounds. None passes."""
        within(key, value, self.least, self.most)


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
        raise ConfigError(f"{key}: there is no {value!r}; {nearest(value, names)}valid: {shown}")


def within(key: str, value: float | None, least: float, most: float) -> None:
    """Refuse a number outside of the bounds, and infinity and NaN, too. Raises ConfigError."""
    if value is not None and not least <= value <= most:
        raise ConfigError(f"{key}: {value} is refused; it must be a number of {least} or more, {most:g} at most")


def is_one_line(text: str, also: str = "") -> bool:
    """True if ``text`` has no line break or other control character, and can be UTF-8.

    The characters in ``also`` are allowed.
    """
    if text.isprintable():  # such a text has none of these characters
        return True
    return not any(unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") and char not in also for char in text)


def tensor_style(key: str, style: str, valid: Iterable[str]) -> tuple[str, int]:
    """Return the kind of a style of ``strategy.tensor_plan``, and its number of parts.

    These are three for ``colwise:3``. Raises ConfigError.
    """
    kind, colon, parts = style.partition(":")
    if not colon or kind != "colwise":
        one_of(key, style, [*valid, "colwise:N"])
        return style, 1
    if not parts.isdecimal() or int(parts) < 2:
        raise ConfigError(
            f"{key}: {style!r} is refused; after the colon comes of how many equal parts the outputs are made up: "
            "colwise:3 for q, k and v in one layer, colwise:2 for gate and up"
        )
    return kind, int(parts)
