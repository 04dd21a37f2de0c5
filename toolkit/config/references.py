"""References between values, ``${optim.lr}``: replaced when all layers are merged, and checked against the types."""

from __future__ import annotations

import operator
import re
from dataclasses import fields, is_dataclass
from functools import cached_property, reduce
from typing import Any, get_args

from yaml import ScalarNode

from toolkit.base.errors import ConfigError
from toolkit.config import yaml_core
from toolkit.config.params import declared
from toolkit.config.yaml_core import Scalar, scalar_of
from toolkit.limits import as_kind, check_word, container_of, fits, hints_of, item_hints, kind_names, kinds_of

#: Begins a reference to another value. After an odd number of backslashes it is text.
_MARK = re.compile(r"(\\*)\$\{")
#: Stands for a value that a later layer must give.
MISSING = "???"
_Path = tuple[str | int, ...]


def build(schema: Any, values: dict[str, Any], references: References, path: _Path = ()) -> Any:
    """Return an object of the dataclass ``schema``, with all references replaced by their values."""
    members: dict[str, Any] = {}
    for f in fields(schema):
        value, hint, here = values[f.name], hints_of(schema)[f.name], (*path, f.name)
        if value == MISSING and f.metadata:
            place, full = declared(f).place, _full(here)
            raise ConfigError(
                f"{full}: must be given, for {place} has no default; add it to the config, or {full}=VALUE"
            )
        if is_dataclass(hint):
            members[f.name] = build(hint, value, references, here)
        else:
            members[f.name] = resolved(value, hint, references, here)
    return schema(**members)


def resolved(value: Any, hint: Any, references: References, path: _Path) -> Any:
    """Return ``value`` with all references replaced by their values."""
    if isinstance(value, list):
        listed = container_of(hint, list, tuple)
        hints = [hint] * len(value) if listed is None else item_hints(listed, len(value))
        return [
            resolved(item, each, references, (*path, index))
            for index, (item, each) in enumerate(zip(value, hints, strict=True))
        ]
    if isinstance(value, dict):
        mapping = container_of(hint, dict)
        each = hint if mapping is None else get_args(mapping)[1]
        return {key: resolved(item, each, references, (*path, key)) for key, item in value.items()}
    return final_value(value, hint, references, path)


def final_value(value: Scalar, hint: Any, references: References, path: _Path) -> Scalar:
    """Return the scalar at ``path``, its reference replaced. Raises ConfigError for one that does not fit ``hint``."""
    if not isinstance(value, str):
        return value
    full, kinds = _full(path), kinds_of(hint)
    if value == MISSING:
        raise ConfigError(f"{full}: {MISSING} stands for a value that is still to be given: {full}=VALUE")
    if not refers(value):
        return _MARK.sub(lambda match: "\\" * (len(match[1]) // 2) + "${", value)
    referred = references.at(path)
    # A text for a key of another type is read as YAML would read it.
    if isinstance(referred, str) and str not in kinds:
        node = yaml_core.compose(referred)
        referred = scalar_of(node) if isinstance(node, ScalarNode) else node
    elif type(referred) in (int, float) and not fits(referred, kinds):
        referred = str(referred)
    if not fits(referred, kinds):
        raise ConfigError(f"{full}: {value} stands for {referred!r}, and this key takes {kind_names(kinds)}")
    check_word(full, referred, hint)
    return as_kind(referred, kinds)  # type: ignore[no-any-return]


def refers(text: str) -> bool:
    """True if any ``${`` in ``text`` begins a reference. After an odd number of backslashes it does not."""
    return any(len(match[1]) % 2 == 0 for match in _MARK.finditer(text))


def escaped(value: Any) -> Any:
    """Return ``value`` with every ``${`` in its texts marked as text. The n backslashes before it become 2 n + 1."""
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    return _MARK.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def _full(path: _Path) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]


class References:
    """The values of the references in merged layers, computed by OmegaConf."""

    def __init__(self, merged: dict[str, Any]) -> None:
        self._merged = merged

    @cached_property
    def _root(self) -> Any:
        from omegaconf import OmegaConf  # takes longer to import than all the rest, and few configs need it

        return OmegaConf.create(self._merged)

    def at(self, path: _Path) -> Any:
        """Return the value at ``path``. Raises ConfigError that names its key."""
        from omegaconf.errors import OmegaConfBaseException

        try:
            return reduce(operator.getitem, path, self._root)
        except OmegaConfBaseException as error:
            full = error.full_key or _full(path)
            reason = str(error.msg or error).splitlines()[0]
            raise ConfigError(f"{full}: {reason}; write \\${{ for a text that has ${{ in it") from None
        except RecursionError:
            raise ConfigError(f"{_full(path)}: refers to itself") from None
