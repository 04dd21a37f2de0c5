"""What the value of a key may be, stated in the annotation of its field, and the errors for any other.

Such as ``mode: Annotated[str, OneOf("sync", "async")] = "sync"`` in the dataclass of a section. What depends on other
keys of the section is refused by its method ``check()``. :func:`toolkit.config.validate` calls both.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar

from toolkit import registry
from toolkit.base import fsio
from toolkit.base.errors import ConfigError, nearest

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
            if isinstance(word, str):
                self._check_word(full, word)

    def _check_word(self, key: str, word: str) -> None:
        if not ((word.strip() or self.also) and is_one_line(word, self.also)):
            raise ConfigError(f"{key}: {word!r} is empty or holds a line break or another control character")
        if self.is_path:
            try:
                Path(word).expanduser().exists()
            except RuntimeError:
                raise ConfigError(f"{key}: there is no user whose home folder {word!r} could be in") from None
            except OSError as error:
                raise ConfigError(f"{key}: {word!r} cannot be looked for: {error.strerror}") from None


class OneOf:
    """One of these words, or of those that the core and the plugins bring as ``kind``."""

    def __init__(self, *words: str, kind: registry.Kind | None = None) -> None:
        self._words, self._kind = words, kind

    @property
    def words(self) -> tuple[str, ...]:
        """Return the words, those of other people's plugins last."""
        return self._words if self._kind is None else tuple(registry.names(self._kind))

    def check(self, key: str, value: str | None) -> None:
        if value is None or value in self._words:
            return
        # Other people's plugins are searched for last.
        if self._kind is None or registry.where(self._kind, value) is None:
            if self._kind is not None and registry.is_missing(value):
                raise ConfigError(f"{key}: {value} needs the plugin {value}, which is not installed")
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
    says = f"{{!r}} is not a number of steps (1 or more) or {word!r}"
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
