"""`toolkit submit CONFIG --help`: every key that the config can set.

The text about each key is the comment in its source.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any

from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig, job_source
from toolkit.config.job_module import params_source
from toolkit.config.layers import merged_layers
from toolkit.config.params import declared, defaults_of
from toolkit.config.source import PythonSource, read_source
from toolkit.limits import OneOf, hints_of, limits_of, text_of

WIDTH = 120
#: The column where the comments begin.
_COMMENT = 58
_REQUIRED = "???"


@dataclass(frozen=True)
class Key:
    """A key of a config. ``value`` is the config's, ``default`` is ``_REQUIRED`` if there is none."""

    name: str
    hint: Any
    default: Any
    value: Any
    comment: str

    @property
    def is_set(self) -> bool:
        """True if the config's value differs from the default."""
        return bool(self.value != self.default)


def page(config: str, overrides: Sequence[str], *, sweep: bool = False) -> str:
    """Return a page of all keys with their types, values, defaults and comments; ``sweep``: the file may hold one.

    A default is named where the value differs from it. The job's own keys come first. Raises ConfigError for a config
    that cannot be read.
    """
    values, own = merged_layers(config, overrides, sweep=sweep)
    defaults = asdict(JobConfig())
    lines = [f"Keys of {config}, also as key=value behind it; * marks a value that is not the default."]
    try:
        job = params_source(read_source(job_source(values["job"])), None)
    except ConfigError as error:
        lines += ["", f"params: {error}"]
    else:
        if own is None:
            lines += ["", f"params: {job.path} declares no keys of its own; how it can: docs/config.md"]
        else:
            found = _keys(own, "params.", defaults_of(own, _REQUIRED), values["params"])
            lines += ["", *_section(f"params of {values['job']}", _about(job, own), found)]
    top: list[Key] = []
    # Each dataclass in the config is a section; the other keys belong to the run itself.
    sections: list[str] = []
    for name, hint in hints_of(JobConfig).items():
        if is_dataclass(hint):
            found = _keys(hint, f"{name}.", defaults[name], values[name])
            sections += ["", *_section(name, _about(_source_of(hint), hint), found)]
        elif name != "params":
            top.append(Key(name, hint, defaults[name], values[name], _comments(JobConfig)[name]))
    return "\n".join([*lines, "", *_section("the run", "", top), *sections])


def words_by_key() -> dict[str, list[str]]:
    """Return the keys that all configs have, each with the words that it takes.

    A key without known words has an empty list.
    """
    defaults = asdict(JobConfig())
    keys = _keys(JobConfig, "", defaults, defaults)
    return {key.name: ["true", "false"] if key.hint is bool else [*_words(key.name)] for key in keys}


def _words(key: str) -> tuple[str, ...]:
    """Return the words that a key of every config takes. Empty where others are taken, too."""
    return next((limit.words for limit in limits_of(JobConfig).get(key, ()) if isinstance(limit, OneOf)), ())


def _about(source: PythonSource, kind: Any) -> str:
    """Return the first paragraph of a class's docstring."""
    return source.docstring(kind.__name__).partition("\n\n")[0].replace("\n", " ").replace("``", "`")


def _source_of(kind: Any) -> PythonSource:
    return read_source(Path(str(sys.modules[kind.__module__].__file__)))


@cache
def _comments(kind: Any) -> dict[str, str]:
    """Return the comment of each field of a section, from the source of its class."""
    if any(f.metadata for f in fields(kind)):  # read from a job's file
        return {f.name: declared(f).comment for f in fields(kind)}
    return _source_of(kind).comments(kind.__name__)


def _keys(kind: Any, prefix: str, defaults: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Key]:
    for f in fields(kind):
        name, hint = f.name, hints_of(kind)[f.name]
        if is_dataclass(hint):
            yield from _keys(hint, f"{prefix}{name}.", defaults[name], values[name])
        else:
            yield Key(f"{prefix}{name}", hint, defaults[name], values[name], _comments(kind)[name])


def _section(name: str, about: str, keys: Sequence[Key] | Iterator[Key]) -> list[str]:
    head = wrap(f"{name}: {about}" if about else f"{name}:", WIDTH, subsequent_indent="  ")
    return head + [line for key in keys for line in _lines(key)]


def _lines(key: Key) -> list[str]:
    value = "must be given" if key.value == _REQUIRED else f"= {_written(key.value)}"
    left = f"{'*' if key.is_set else ' '} {key.name}: {text_of(key.hint).replace('None', 'null')} {value}"
    words = _words(key.name)
    notes = [f"one of {', '.join(words)}" if words else "", key.comment.replace("``", "`")]
    if key.is_set:
        notes.insert(0, "no default" if key.default == _REQUIRED else f"default {_written(key.default)}")
    # The comment stands beside the key if that is short enough, else below it.
    comment = wrap("; ".join(filter(None, notes)), WIDTH - _COMMENT)
    heads = wrap(left, WIDTH, subsequent_indent="    ") if len(left) >= WIDTH else [left]
    if comment and len(heads) == 1 and len(left) < _COMMENT:
        heads = [f"{left:<{_COMMENT}}{comment.pop(0)}"]
    return [*heads, *(" " * _COMMENT + text for text in comment)]


def _written(value: Any) -> str:
    """Return a value as a config writes it."""
    return value if isinstance(value, str) and value.isprintable() and value.strip() else json.dumps(value)
