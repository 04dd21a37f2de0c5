"""`toolkit submit CONFIG --help`: every key that the config can set.

The text about each key is the comment in its source.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from toolkit.config import job_source, schema
from toolkit.config.declared import dataclass_in, declared, defaults_of
from toolkit.config.hints import hints_of, text_of
from toolkit.config.job_module import params_source
from toolkit.config.layers import merged_layers
from toolkit.config.source import PythonSource, read_source
from toolkit.config.validation import WORDS
from toolkit.errors import ConfigError

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
    source = read_source(Path(schema.__file__))
    keys = dataclass_in(source, "JobConfig")
    defaults = defaults_of(keys, _REQUIRED)
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
    for f in fields(keys):  # type: ignore[arg-type]
        hint = hints_of(keys)[f.name]
        if is_dataclass(hint):
            found = _keys(hint, f"{f.name}.", defaults[f.name], values[f.name])
            sections += ["", *_section(f.name, _about(source, hint), found)]
        elif f.name != "params":
            top.append(Key(f.name, hint, defaults[f.name], values[f.name], declared(f).comment))
    return "\n".join([*lines, "", *_section("the run", "", top), *sections])


def words_by_key() -> dict[str, list[str]]:
    """Return the keys that all configs have, each with the words that it takes.

    A key without known words has an empty list.
    """
    keys = dataclass_in(read_source(Path(schema.__file__)), "JobConfig")
    defaults = defaults_of(keys, _REQUIRED)
    known: dict[str, Collection[object]] = {"data.name": schema.DATASETS, **WORDS}
    words = {}
    for key in _keys(keys, "", defaults, defaults):
        of_key = ("true", "false") if key.hint is bool else known.get(key.name, ())
        words[key.name] = [str(word) for word in of_key]
    return words


def _about(source: PythonSource, kind: Any) -> str:
    """Return the first paragraph of a class's docstring."""
    return source.docstring(kind.__name__).partition("\n\n")[0].replace("\n", " ").replace("``", "`")


def _keys(kind: Any, prefix: str, defaults: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Key]:
    for f in fields(kind):
        hint, full = hints_of(kind)[f.name], f"{prefix}{f.name}"
        if is_dataclass(hint):
            yield from _keys(hint, f"{full}.", defaults[f.name], values[f.name])
        else:
            yield Key(full, hint, defaults[f.name], values[f.name], declared(f).comment)


def _section(name: str, about: str, keys: Sequence[Key] | Iterator[Key]) -> list[str]:
    head = wrap(f"{name}: {about}" if about else f"{name}:", WIDTH, subsequent_indent="  ")
    return head + [line for key in keys for line in _lines(key)]


def _lines(key: Key) -> list[str]:
    value = "must be given" if key.value == _REQUIRED else f"= {_written(key.value)}"
    left = f"{'*' if key.is_set else ' '} {key.name}: {text_of(key.hint).replace('None', 'null')} {value}"
    words = WORDS.get(key.name)
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
