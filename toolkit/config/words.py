"""Errors for a value that is none of those that a key may have."""

from __future__ import annotations

import math
from collections.abc import Iterable

from toolkit.errors import ConfigError, nearest


def one_of(key: str, value: str, valid: Iterable[str]) -> None:
    names = list(valid)
    if value not in names:
        shown = ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:12])} and {len(names) - 12} more"
        raise ConfigError(f"{key}: there is no {value!r}; {nearest(value, names)}valid: {shown}")


def at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and not least <= value < math.inf:  # also refuses NaN
        raise ConfigError(f"{key}: {value} is refused; it must be a number of {least} or more")
