"""`toolkit submit CONFIG --help`: the keys of a first week; ``--help-all``: all. Each is explained by its comment."""

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
from toolkit.config.script_keys import acting_keys
from toolkit.config.source import PythonSource, read_source
from toolkit.constraints import OneOf, hints_of, limits_of, text_of

WIDTH = 80
#: The column where the comments begin.
_COMMENT = 40
_REQUIRED = "???"
#: What one sets in a first week, by section. ``--help`` shows these, the job's own keys, and those that are set.
FIRST = {
    "": "name job args",
    "cluster": "nodes tasks_per_node gpus_per_node cpus_per_task mem_gb time_min partition account setup",
    "retry": "max_failures",
    "strategy": "name",
    "data": "name root global_batch_size workers",
    "model": "name init_from",
    "optim": "name lr weight_decay schedule warmup_steps",
    "train": "epochs max_steps seed precision eval_every",
    "checkpoint": "every_steps keep",
}


@dataclass(frozen=True)
class Key:
    """A key of a config. ``value`` is the config's, ``default`` is ``_REQUIRED`` if there is none."""

    name: str
    hint: Any
    default: Any
    value: Any
    comment: str
    origin: str | None = None  #: the layer that has set it; None: it has its default

    @property
    def is_first(self) -> bool:
        """True if the short page shows the key."""
        section, _, name = self.name.rpartition(".")
        return (
            self.origin is not None or section.partition(".")[0] == "params" or name in FIRST.get(section, "").split()
        )

    @property
    def is_set(self) -> bool:
        """True if the config's value differs from the default."""
        return bool(self.value != self.default)


def page(config: str, overrides: Sequence[str], *, sweep: bool = False, every: bool = False) -> str:
    """Return a page of keys with their types, values, defaults and comments; ``sweep``: the file may hold one.

    Without ``every`` these are the ones of a first week, and those that are set; of the others it has the names. The
    job's own keys come first, and the options of its script. Keys that do not act on the job are left out. Raises
    ConfigError for a config that cannot be read.
    """
    origins: dict[str, str] = {}
    values, own = merged_layers(config, overrides, sweep=sweep, origins=origins)
    acting, defaults = acting_keys(values["job"], values["argv"]), asdict(JobConfig())
    about = f"Keys of {config}, also as key=value behind it; * marks a value that is not the default."
    lines = wrap(about, WIDTH, break_on_hyphens=False)
    try:
        job = params_source(read_source(job_source(values["job"])), None)
    except ConfigError as error:
        lines += ["", f"params: {error}"]
    else:
        if own is None and not acting.options:
            lines += ["", f"params: {job.path} declares no keys of its own; how it can: docs/config.md"]
        elif own is not None:
            found = _keys(own, "params.", defaults_of(own, _REQUIRED), values["params"], origins)
            lines += ["", *_section(f"params of {values['job']}", about_of(own, job), found)]
    if acting.options:
        lines += ["", f"options of {acting.script}, behind `--` or as args.NAME=VALUE:"]
        lines += [line for option in acting.options for line in _beside(f"  {option.flag}", option.about)]
    top: list[Key] = []
    # Each dataclass in the config is a section; the other keys belong to the run itself.
    sections: list[tuple[str, str, list[Key]]] = [("the run", "", top)]
    for name, hint in hints_of(JobConfig).items():
        if is_dataclass(hint):
            keys = [*_keys(hint, f"{name}.", defaults[name], values[name], origins)]
            keys = [key for key in keys if acting.has_effect(key.name)]
            sections.append((name, about_of(hint), keys))
        elif name != "params" and acting.has_effect(name):
            top.append(Key(name, hint, defaults[name], values[name], comments_of(JobConfig)[name], origins.get(name)))
    for name, text, keys in sections:
        if shown := [key for key in keys if every or key.is_first]:
            lines += ["", *_section(name, text, shown)]
    if not every:
        lines += ["", "More keys, by section; --help-all in place of --help shows what they are for:"]
        for name, _, keys in sections:
            rest = ", ".join(key.name.removeprefix(f"{name}.") for key in keys if not key.is_first)
            lines += wrap(f"  {name}: {rest}", WIDTH, subsequent_indent="    ", break_on_hyphens=False) if rest else []
    return "\n".join(lines)


def words_by_key() -> dict[str, list[str]]:
    """Return the keys that all configs have, each with the words that it takes, none where they are not known."""
    defaults = asdict(JobConfig())
    keys = _keys(JobConfig, "", defaults, defaults, {})
    return {key.name: ["true", "false"] if key.hint is bool else [*_words(key.name)] for key in keys}


def _words(key: str) -> tuple[str, ...]:
    """Return the words that a key of every config takes. Empty where others are taken, too."""
    return next((limit.words for limit in limits_of(JobConfig).get(key, ()) if isinstance(limit, OneOf)), ())


def about_of(kind: Any, source: PythonSource | None = None) -> str:
    """Return the first paragraph of a class's docstring: what a section of the config is about."""
    text = (source or _source_of(kind)).docstring(kind.__name__)
    return text.partition("\n\n")[0].replace("\n", " ").replace("``", "`")


def _source_of(kind: Any) -> PythonSource:
    return read_source(Path(str(sys.modules[kind.__module__].__file__)))


@cache
def comments_of(kind: Any) -> dict[str, str]:
    """Return the comment of each field of a section, from the source of its class."""
    if any(f.metadata for f in fields(kind)):  # read from a job's file
        return {f.name: declared(f).comment for f in fields(kind)}
    return _source_of(kind).comments(kind.__name__)


def _keys(
    kind: Any, prefix: str, defaults: Mapping[str, Any], values: Mapping[str, Any], origins: Mapping[str, str]
) -> Iterator[Key]:
    for f in fields(kind):
        name, hint, full = f.name, hints_of(kind)[f.name], f"{prefix}{f.name}"
        if is_dataclass(hint):
            yield from _keys(hint, f"{full}.", defaults[name], values[name], origins)
        else:
            yield Key(full, hint, defaults[name], values[name], comments_of(kind)[name], origins.get(full))


def _section(name: str, about: str, keys: Sequence[Key] | Iterator[Key]) -> list[str]:
    head = wrap(f"{name}: {about}" if about else f"{name}:", WIDTH, subsequent_indent="    ")
    return head + [line for key in keys for line in _lines(key)]


def _lines(key: Key) -> list[str]:
    value = "must be given" if key.value == _REQUIRED else f"= {_written(key.value)}"
    left = f"{'*' if key.is_set else ' '} {key.name}: {text_of(key.hint).replace('None', 'null')} {value}"
    words = _words(key.name)
    notes = [f"one of {', '.join(words)}" if words else "", key.comment.replace("``", "`")]
    if key.origin is not None:
        notes.append(f"from {key.origin}")
    if key.is_set:
        notes.insert(0, "no default" if key.default == _REQUIRED else f"default {_written(key.default)}")
    return _beside(left, "; ".join(filter(None, notes)))


def _beside(left: str, comment: str) -> list[str]:
    """Return the lines of a key with its comment next to it if the key is short enough, else below it."""
    texts = wrap(comment, WIDTH - _COMMENT)
    heads = wrap(left, WIDTH, subsequent_indent="    ") if len(left) >= WIDTH else [left]
    if texts and len(heads) == 1 and len(left) < _COMMENT:
        heads = [f"{left:<{_COMMENT}}{texts.pop(0)}"]
    return [*heads, *(" " * _COMMENT + text for text in texts)]


def _written(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() and value.strip() else json.dumps(value)
