"""The command line of a script: the words after ``--``, and options by name, such as ``args.epochs=3``."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cached_property, reduce
from typing import Any, get_args

from yaml import ScalarNode

from toolkit.base.errors import ConfigError
from toolkit.config import yaml_core
from toolkit.config.params import declared
from toolkit.config.schema import Argument, JobConfig
from toolkit.config.yaml_core import Scalar, scalar_of
from toolkit.constraints import as_kind, check_word, container_of, fits, hints_of, item_hints, kind_names, kinds_of

#: Among the words of ``restart_args``, stands for the newest file that matches the pattern.
NEWEST = re.compile(r"\{newest:([^{}]+)\}")


def command_line(config: JobConfig) -> list[str]:
    """Return the words that a script finds in ``sys.argv[1:]``; of `toolkit exec` the whole command."""
    return with_options(config.argv, config.args)


def with_options(words: Sequence[str], options: Mapping[str, Argument]) -> list[str]:
    """Return ``words`` with each option set: where it is among them, else behind them.

    ``{"epochs": 3}`` is ``--epochs 3``, and ``{"e": 3}`` is ``-e 3``. True is the option alone, and False leaves it
    out. A list is the option with several words. Behind a ``--`` among the words there are no options::

        >>> with_options(["fit", "--epochs=3", "data"], {"epochs": 5, "amp": True})
        ['fit', '--epochs', '5', 'data', '--amp']
    """
    line = list(words)
    for name, value in options.items():
        flag = flag_of(name)
        last = line.index("--") if "--" in line else len(line)
        begin = next((at for at, word in enumerate(line[:last]) if word.partition("=")[0] == flag), last)
        end = begin
        if begin < last:
            end += 1
            is_joined = "=" in line[begin]
            # The words behind an option are its own as far as the new value says that it takes some.
            most = 0 if is_joined or isinstance(value, bool) else last if isinstance(value, list) else end + 1
            while end < min(last, most) and not _is_option(line[end]):
                end += 1
        if isinstance(value, bool):
            line[begin:end] = [flag] if value else []
            continue
        given = [str(each) for each in value] if isinstance(value, list) else [str(value)]
        # A parser takes a separate word with a dash for the next option.
        line[begin:end] = [f"{flag}={given[0]}"] if len(given) == 1 and _is_option(given[0]) else [flag, *given]
    return line


def option_names(words: Sequence[str]) -> set[str]:
    """Return the names of the options among ``words``."""
    return {word.partition("=")[0].lstrip("-") for word in words if _is_option(word)}


def argv_override(words: Sequence[str], key: str = "argv") -> str:
    """Return the words after ``--`` as an override of a config."""
    return f"{key}={json.dumps(escaped(list(words)), ensure_ascii=False)}"


def flag_of(name: str) -> str:
    """Return the option that ``args.NAME`` sets."""
    return f"-{name}" if len(name) == 1 else f"--{name}"


def _is_option(word: str) -> bool:
    """True for ``--epochs`` and ``-e``; a negative number is a value."""
    return word.startswith("-") and word != "-" and not re.match(r"-\.?\d", word)


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
        raise ConfigError(f"{full}: {value} stands for {referred!r}; must be {kind_names(kinds)}")
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
