"""``config.params``, the job's own keys, as the job's own dataclass and as single values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from toolkit.base.errors import ConfigError, nearest
from toolkit.config.hints import container_of, item_hints, members

T = TypeVar("T")


def filled(kind: type[T], values: Mapping[str, Any], key: str = "params") -> T:
    """Return an object of the dataclass ``kind`` with the values of a config: ``filled(Params, config.params)``.

    Sections become the dataclasses that their fields are annotated with. Lists become tuples, and names members of an
    Enum, where the annotation says so. Missing values get their defaults. Raises ConfigError for a key that ``kind``
    does not have, and for a missing one without a default.
    """
    valid = {f.name: f for f in fields(kind) if f.init}  # type: ignore[arg-type]
    for name in values:
        if name not in valid:
            likeliest = nearest(f"{key}.{name}", [f"{key}.{other}" for other in valid])
            raise ConfigError(f"unknown key '{key}.{name}'; {likeliest}valid here: {', '.join(sorted(valid))}")
    for name, f in valid.items():
        if name not in values and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"{key}.{name}: must be given, for {kind.__name__} has no default for it")
    hints = get_type_hints(kind)
    arguments = {}
    for name, value in values.items():
        arguments[name] = _as_declared(value, hints[name], f"{key}.{name}")
    return kind(**arguments)


def _as_declared(value: Any, hint: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        if is_dataclass(hint):
            return filled(hint, value, key)  # type: ignore[arg-type]
        mapping = container_of(hint, dict, Mapping)
        return {name: _as_declared(item, get_args(mapping)[1], f"{key}.{name}") for name, item in value.items()}
    if isinstance(value, list):
        listed = container_of(hint, list, tuple, Sequence)
        items = [_as_declared(*pair, key) for pair in zip(value, item_hints(listed, len(value)), strict=True)]
        return tuple(items) if get_origin(listed) is tuple else items
    for member in members(hint):
        if isinstance(member, type) and issubclass(member, Enum) and isinstance(value, str):
            return member[value]
    return value


def leaves(values: Mapping[str, Any], key: str = "params") -> Iterator[tuple[str, Any]]:
    """Yield each value that is not a section, by its full key: ``params.optimizer.lr``."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{key}.{name}")
        else:
            yield f"{key}.{name}", value
