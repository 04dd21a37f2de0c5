"""How the layers of a configuration merge.

Later layers win: the defaults of schema.py, the site's defaults (``$TOOLKIT_SITE`` or ``~/.config/toolkit/site.yaml``),
the file that ``extends:`` names, the file itself, ``key=value`` arguments. All of them are YAML 1.2, see yaml_core.py.
A value may refer to others: ``${optim.lr}``, as OmegaConf reads it.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cached_property, reduce
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from yaml import MappingNode, Node, ScalarNode, SequenceNode

from toolkit import fsio
from toolkit.config import yaml_core
from toolkit.config.declared import dataclass_in, declared, defaults_of
from toolkit.config.hints import PLAIN, as_kind, container_of, fits, hints_of, item_hints, kinds_of, words_of
from toolkit.config.job_module import job_source
from toolkit.config.schema import FOREIGN_JOB, JobConfig, all_keys
from toolkit.config.source import PythonSource
from toolkit.config.words import one_of
from toolkit.config.yaml_core import Pairs, Scalar, scalar_of
from toolkit.errors import ConfigError, nearest

#: Begins a reference to another value. After an odd number of backslashes it is text.
_MARK = re.compile(r"(\\*)\$\{")
#: Stands for a value that a later layer must give.
_MISSING = "???"
#: References to the environment are refused: a config is written to the run's folder, TensorBoard and the terminal.
_NO_ENVIRONMENT = (
    "is refused: the variable's value would be written into the run's files. Give what is no secret as an argument "
    "that the shell fills in, key=$VARIABLE; a program of notify finds the variable in its own environment"
)
#: Limit on nesting: an alias in YAML may refer to what contains it.
_MOST_LEVELS = 20
#: Numbers below this key keep their text, for sbatch to read: 0755 and 1.10 keep their zeros.
_AS_WRITTEN = "cluster.extra"


@dataclass(frozen=True)
class _Layer:
    """One source of keys and values."""

    name: str  #: name of a file or an argument
    root: MappingNode
    has_lines: bool = True

    def error(self, node: Node, text: str) -> ConfigError:
        place = f"{self.name}, line {node.start_mark.line + 1}" if self.has_lines else self.name
        return ConfigError(f"{place}: {text}")


def load_config(
    path: str | Path | None, overrides: Sequence[str] = (), *, site: bool = True, project: Path | None = None
) -> JobConfig:
    """Read ``path`` with what it extends, merge the layers and return the typed config.

    The path of a script (``train.py``) stands for a config without keys that has the script as its ``job``. Without a
    path the layers are defaults, site and overrides. ``overrides`` are ``key=value`` with dotted keys and YAML values.
    Keys, types and values are checked; :func:`validate` checks whether the config fits a machine. Raises ConfigError.

    ``params`` are checked against the class ``Params`` of the job's file, which is looked for in ``project``, the
    current folder if None. With ``site=False`` and no ``project`` they are not checked: those of a run already were::

        >>> toolkit.load_config("configs/digits_ddp.yaml", ["optim.lr=0.1"]).optim.lr
        0.1
    """
    merged, own = merged_layers(path, overrides, site=site, project=project)
    references = _References(merged)
    if own is None:
        params = _resolved(merged["params"], PLAIN, references, ("params",))
    else:
        params = asdict(_build(own, merged["params"], references, ("params",)))
    config: JobConfig = _build(JobConfig, {**merged, "params": {}}, references)
    config.params = params
    return config


def merged_layers(
    path: str | Path | None, overrides: Sequence[str] = (), *, site: bool = True, project: Path | None = None
) -> tuple[dict[str, Any], type | None]:
    """Return the merged values of all layers, references unresolved, and the job's ``Params``.

    See :func:`load_config`.
    """
    is_script = path is not None and Path(path).suffix == ".py"
    files = [] if path is None or is_script else _file_layers(Path(path), ())
    layers = [*_site_layers(site), *files, *map(_override_layer, overrides)]
    merged: dict[str, Any] = asdict(JobConfig())
    if path is not None:
        merged["name"] = Path(path).stem
    if is_script:
        merged["job"] = str(path)
    # ``params`` are merged later: only the job, which any layer may name, knows which keys they have.
    given = [(layer, pair[1]) for layer in layers if (pair := _pairs(layer, layer.root).get("params"))]
    for layer in layers:
        _merge(merged, _section(layer, layer.root, JobConfig))
    if not site and project is None:
        for layer, node in given:
            _merge(merged["params"], _mapping(layer, node, "params"))
        return merged, None
    job = _final(merged["job"], str, _References(merged), ("job",))
    own = _own_keys(str(job), project, given)
    if own is not None:
        merged["params"] = _escaped(defaults_of(own, _MISSING))
        for layer, node in given:
            _merge(merged["params"], _section(layer, node, own, "params."))
    return merged, own


def _own_keys(job: str, project: Path | None, given: Sequence[tuple[_Layer, Node]]) -> type | None:
    """Return the job's ``Params``.

    None where the job cannot be found or read: :func:`validate` reports that.
    """
    try:
        source = None if job == FOREIGN_JOB else PythonSource(job_source(job, project))
    except (ConfigError, OSError):
        # Given params cannot be checked without the file, so the error must be raised now.
        if given:
            raise
        return None
    own = None if source is None else dataclass_in(source, "Params")
    for layer, node in given:
        if own is None and not (isinstance(node, MappingNode) and not node.value):
            raise layer.error(node, f"params: {_undeclared(source)}")
    return own


def _undeclared(source: PythonSource | None) -> str:
    """Return why a job has no keys of its own, and how to give it some."""
    if source is None:
        return "a script that knows nothing of the toolkit has none; give it arguments of its own"
    how = "`@dataclass` and `class Params:` with `width: int = 256` below it"
    if "Params" in source.classes:
        place = source.place(source.classes["Params"])
        return f"class Params ({place}) is no dataclass; write `@dataclass` from dataclasses before it"
    if source.imports("Params"):
        return f"{source.path} imports Params, and its keys must be known without importing it: write {how} there"
    return f"{source.path} declares no keys of its own; write {how} there, or take them out here"


def dump_config(config: JobConfig) -> str:
    """Return the config as YAML that :func:`load_config` reads back to an equal one."""
    return yaml_core.dump(_escaped(asdict(config)))


def _escaped(value: Any) -> Any:
    """Return ``value`` with every ``${`` in its texts marked as text: n backslashes before it become 2 n + 1."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return _MARK.sub(r"\1\1\\${", value) if isinstance(value, str) else value


def _merge(below: dict[str, Any], above: dict[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = value


# ------------------------------------------------------------------------------------------------- reading the layers


def _site_layers(enabled: bool) -> list[_Layer]:
    named = os.environ.get("TOOLKIT_SITE")
    path = Path(named) if named else fsio.expand("~/.config/toolkit/site.yaml")
    # Path's own is_file raises for a HOME that is too long.
    if not enabled or not (named or os.path.isfile(path)):  # noqa: PTH113
        return []
    return _file_layers(path, ())


def _file_layers(path: Path, above: tuple[Path, ...]) -> list[_Layer]:
    """Return the layers of a file, beginning with those that it extends."""
    if path.resolve() in above:
        raise ConfigError(f"{path}: extends itself through {' -> '.join(str(p) for p in above)}; break the circle")
    layer = _read_yaml(path)
    # `extends` is a key of the file, not of the config: take it out.
    for key, value in layer.root.value:
        if isinstance(key, ScalarNode) and key.value == "extends":
            if not isinstance(value, ScalarNode) or not value.value:
                raise layer.error(value, "extends: takes the name of one file")
            layer.root.value.remove((key, value))
            return [*_file_layers(path.parent / value.value, (*above, path.resolve())), layer]
    return [layer]


def _read_yaml(path: Path) -> _Layer:
    try:
        root = yaml_core.compose(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file{_nearby_files(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid YAML: {error}") from None
    if root is None:
        root = MappingNode("", [])
    if not isinstance(root, MappingNode):
        raise ConfigError(f"{path}: must hold `key: value` lines, not a list or a single value")
    return _Layer(str(path), root)


def _nearby_files(path: Path) -> str:
    found = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    return f"; {nearest(str(path), found)}there are: {', '.join(found)}" if found else ""


def _override_layer(text: str) -> _Layer:
    """Return ``key=value`` as a layer of one value."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r}: an override is key=value, such as optim.lr=0.1")
    try:
        node = yaml_core.compose(value)
    except ValueError as error:
        raise ConfigError(f"{text!r}: the value is not valid YAML: {error}") from None
    # YAML reads what follows a # as a comment: refuse it instead of losing it.
    rest = value[node.end_mark.index if node else 0 :].strip()
    if rest:
        raise ConfigError(f"{text!r}: {rest!r} is a comment to YAML; put quotes around the value, within the shell's")
    node = node or ScalarNode("tag:yaml.org,2002:null", "")
    for part in reversed(_parts_of(key)):
        node = MappingNode("", [(ScalarNode("", part), node)])
    assert isinstance(node, MappingNode)
    return _Layer(f"argument {text!r}", node, has_lines=False)


def _parts_of(key: str) -> list[str]:
    """Return the parts of a dotted key. What follows a mapping's key is one part: names of layers contain dots."""
    for known in all_keys():
        if key.startswith(f"{known}.") and known != "params":
            return [*known.split("."), key.removeprefix(f"{known}.")]
    return key.split(".")


# ------------------------------------------------------------------------------------------------ what a key may hold


def _section(layer: _Layer, node: Node, schema: Any, prefix: str = "") -> dict[str, Any]:
    """Return the keys and values of a section as plain data.

    Raises ConfigError, with the full name and the line, for a key that ``schema`` lacks and for a value of another
    type.
    """
    valid = {f.name: f for f in fields(schema)}
    if not isinstance(node, MappingNode):
        name = prefix.removesuffix(".")
        raise layer.error(node, f"{name} is a section: give it keys, such as {prefix}{next(iter(valid))}")
    found: dict[str, Any] = {}
    for key, (key_node, value) in _pairs(layer, node).items():
        full = f"{prefix}{key}"
        if key not in valid:
            hint = _nearest_key(full, [f"{prefix}{name}" for name in valid])
            raise layer.error(key_node, f"unknown key {full!r}; {hint}valid here: {', '.join(sorted(valid))}")
        if full == "params" and schema is JobConfig:  # the job says what is in there
            continue
        # A section is read key by key, any other value by its type.
        hint = hints_of(schema)[key]
        found[key] = (
            _section(layer, value, hint, f"{full}.") if is_dataclass(hint) else _value(layer, value, hint, full)
        )
    return found


def _nearest_key(full: str, here: list[str]) -> str:
    """Return a hint at the likeliest key: misspelled in this section, of this name in another, or the job's own."""
    leaf = full.rpartition(".")[2]
    elsewhere = [key for key in all_keys() if key.rpartition(".")[2] == leaf]
    there = f"did you mean {elsewhere[0]!r}? " if elsewhere else nearest(full, all_keys())
    own = "" if "." in full else f"a key of the job's own is params.{full}; "
    return nearest(full, here) or there or own


def _pairs(layer: _Layer, node: MappingNode) -> Pairs:
    try:
        return yaml_core.pairs_of(node)
    except ValueError as error:
        raise ConfigError(f"{layer.name}: is not valid YAML: {error}") from None


def _value(layer: _Layer, node: Node, hint: Any, full: str) -> Any:
    """Return the plain value of a node, of the type ``hint``."""
    listed, mapping = container_of(hint, list, tuple), container_of(hint, dict)
    if listed is not None and isinstance(node, SequenceNode):
        try:
            hints = item_hints(listed, len(node.value))
        except ValueError as error:
            raise layer.error(node, f"{full}: {error}") from None
        items = enumerate(zip(node.value, hints, strict=True))
        return [_value(layer, item, each, f"{full}[{index}]") for index, (item, each) in items]
    if mapping is not None and isinstance(node, MappingNode):
        each = get_args(mapping)[1]
        return {key: _value(layer, value, each, f"{full}.{key}") for key, (_, value) in _pairs(layer, node).items()}
    if not kinds_of(hint):
        how = "a list: [first, second]" if listed is not None else "a mapping: {key: value}"
        raise layer.error(node, f"{full} is {how}")
    return _scalar(layer, node, hint, full)


def _mapping(layer: _Layer, node: Node, full: str) -> dict[str, Any]:
    """Return the plain values of a mapping, of any type."""
    if not isinstance(node, MappingNode):
        raise layer.error(node, f"{full} is a section: give it keys")
    return {key: _plain(layer, value, f"{full}.{key}") for key, (_, value) in _pairs(layer, node).items()}


def _plain(layer: _Layer, node: Node, full: str) -> Any:
    if full.count(".") + full.count("[") > _MOST_LEVELS:
        raise layer.error(node, f"{full}: nests too deep")
    if isinstance(node, SequenceNode):
        return [_plain(layer, item, f"{full}[{index}]") for index, item in enumerate(node.value)]
    return _mapping(layer, node, full) if isinstance(node, MappingNode) else _scalar(layer, node, PLAIN, full)


def _scalar(layer: _Layer, node: Node, hint: Any, full: str) -> Scalar:
    kinds = kinds_of(hint)
    if not isinstance(node, ScalarNode):
        raise layer.error(node, f"{full} takes {_told(kinds)}, not a list or a mapping")
    try:
        value = scalar_of(node)
    except ValueError as error:
        raise layer.error(node, f"{full}: {error}") from None
    # A reference has the type of what it refers to, which is known when all layers are merged.
    if isinstance(value, str) and _refers(value):
        if "oc.env" in value:
            raise layer.error(node, f"{full}: {value} {_NO_ENVIRONMENT}")
        return value
    # Keep a number as it is written where YAML would write it differently.
    if full.startswith(f"{_AS_WRITTEN}.") and not isinstance(value, (str, bool, type(None))):
        return value if yaml_core.dump(value).split("\n")[0] == node.value else str(node.value)
    if value == _MISSING:
        return value
    if not fits(value, kinds):
        raise layer.error(node, _misfit(layer, node.value, value, kinds, full))
    try:
        _check_word(full, value, hint)
    except ConfigError as error:
        raise layer.error(node, str(error)) from None
    return as_kind(value, kinds)  # type: ignore[no-any-return]


def _check_word(full: str, value: Scalar, hint: Any) -> None:
    words = words_of(hint)
    if words and value is not None and value not in words:
        one_of(full, str(value), map(str, words))


_NAMES: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    NoneType: "null",
}


def _told(kinds: tuple[type, ...]) -> str:
    return " or ".join(name for kind, name in _NAMES.items() if kind in kinds)


def _misfit(layer: _Layer, written: str, value: Any, kinds: tuple[type, ...], full: str) -> str:
    """Return what to write instead of a value of another type."""
    # Each branch is a mistake of its own: an empty value, missing quotes, a time as Slurm writes it.
    if value is None:
        return f"{full}: is empty (null), and this key takes {_told(kinds)}"
    if not isinstance(value, str) and str in kinds:
        quoted = f"{full.rpartition('.')[2]}: '{written}'" if layer.has_lines else f"""'{full}="{written}"'"""
        return f"{full}: takes text, and {written} is {_NAMES[type(value)]} to YAML; quote it: {quoted}"
    minutes = _minutes(value) if full == "cluster.time_min" else None
    instead = f"; in minutes that is {minutes}" if minutes else ""
    return f"{full}: {written!r} is {_NAMES[type(value)]}, and this key takes {_told(kinds)}{instead}"


def _minutes(text: Any) -> int | None:
    """Return the minutes that a time in Slurm's notation (``[D-][HH:]MM[:SS]``) stands for, rounded up."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(text))
    if match is None:
        return None
    days, (first, second, third) = int(match[1] or 0), (int(match[group] or 0) for group in (2, 3, 4))
    # With days, or with three parts, the first part is hours, else minutes.
    by_hours = match[1] is not None or match[4] is not None
    seconds = 3600 * first + 60 * second + third if by_hours else 60 * first + second
    return -(-(86400 * days + seconds) // 60)


# ---------------------------------------------------------------------------------------------------- the whole config

_Path = tuple[str | int, ...]


def _build(schema: Any, values: dict[str, Any], references: _References, path: _Path = ()) -> Any:
    """Return an object of the dataclass ``schema``, with all references replaced by their values."""
    made: dict[str, Any] = {}
    for f in fields(schema):
        value, hint, here = values[f.name], hints_of(schema)[f.name], (*path, f.name)
        if value == _MISSING and f.metadata:
            place, full = declared(f).place, _full(here)
            raise ConfigError(
                f"{full}: must be given, for {place} has no default; add it to the config, or {full}=VALUE"
            )
        if is_dataclass(hint):
            made[f.name] = _build(hint, value, references, here)
        else:
            made[f.name] = _resolved(value, hint, references, here)
    return schema(**made)


def _resolved(value: Any, hint: Any, references: _References, path: _Path) -> Any:
    """Return ``value`` with all references replaced by their values."""
    if isinstance(value, list):
        listed = container_of(hint, list, tuple)
        hints = [hint] * len(value) if listed is None else item_hints(listed, len(value))
        return [
            _resolved(item, each, references, (*path, index))
            for index, (item, each) in enumerate(zip(value, hints, strict=True))
        ]
    if isinstance(value, dict):
        mapping = container_of(hint, dict)
        each = hint if mapping is None else get_args(mapping)[1]
        return {key: _resolved(item, each, references, (*path, key)) for key, item in value.items()}
    return _final(value, hint, references, path)


def _final(value: Scalar, hint: Any, references: _References, path: _Path) -> Scalar:
    if not isinstance(value, str):
        return value
    full, kinds = _full(path), kinds_of(hint)
    if value == _MISSING:
        raise ConfigError(f"{full}: {_MISSING} stands for a value that is still to be given: {full}=VALUE")
    if not _refers(value):
        return _MARK.sub(lambda match: "\\" * (len(match[1]) // 2) + "${", value)
    found = references.at(path)
    # A text for a key of another type is read as YAML would read it.
    if isinstance(found, str) and str not in kinds:
        node = yaml_core.compose(found)
        found = scalar_of(node) if isinstance(node, ScalarNode) else node
    elif type(found) in (int, float) and not fits(found, kinds):
        found = str(found)
    if not fits(found, kinds):
        raise ConfigError(f"{full}: {value} stands for {found!r}, and this key takes {_told(kinds)}")
    _check_word(full, found, hint)
    return as_kind(found, kinds)  # type: ignore[no-any-return]


def _refers(text: str) -> bool:
    """True if any ``${`` in ``text`` begins a reference: those after an odd number of backslashes do not."""
    return any(len(match[1]) % 2 == 0 for match in _MARK.finditer(text))


def _full(path: _Path) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]


class _References:
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
