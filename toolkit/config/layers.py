"""How the layers of a configuration merge.

Later ones win: the defaults of schema.py, the site's defaults (``$TOOLKIT_SITE`` or
``~/.config/toolkit/site.yaml``), the file that ``extends:`` names, the file itself, ``key=value`` arguments.
All of them are YAML 1.2, see yaml_core.py. A value may refer to others: ``${optim.lr}``, as OmegaConf reads it.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import cache, cached_property, reduce
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from yaml import MappingNode, Node, ScalarNode, SequenceNode

from toolkit import fsio
from toolkit.config import yaml_core
from toolkit.config.schema import JobConfig, all_keys
from toolkit.config.yaml_core import Pairs, Scalar, scalar_of
from toolkit.errors import ConfigError, nearest

#: Begins a reference to another value, or, behind an odd number of backslashes, is text.
_MARK = re.compile(r"(\\*)\$\{")
#: Stands for a value that a later layer must give.
_MISSING = "???"
#: A config is written into the run's folder, TensorBoard and the terminal.
_NO_ENVIRONMENT = (
    "is refused: the variable's value would be written into the run's files. Give what is no secret as an argument "
    "that the shell fills in, key=$VARIABLE; a program of notify finds the variable in its own environment"
)
#: Here a number is what is written, for sbatch to read: 0755 and 1.10 keep their zeros.
_AS_WRITTEN = "cluster.extra"


@dataclass(frozen=True)
class _Layer:
    """One source of keys and values."""

    name: str  #: of a file, or of an argument
    root: MappingNode
    has_lines: bool = True

    def error(self, node: Node, text: str) -> ConfigError:
        place = f"{self.name}, line {node.start_mark.line + 1}" if self.has_lines else self.name
        return ConfigError(f"{place}: {text}")


def load_config(path: str | Path | None, overrides: Sequence[str] = (), *, site: bool = True) -> JobConfig:
    """Read ``path`` with what it extends, merge the layers and return the typed config.

    The path of a script (``train.py``) stands for a config without keys whose ``job`` it is. Without a path the layers
    are defaults, site and overrides. ``overrides`` are ``key=value`` with dotted keys and YAML values. Keys, types and
    values are checked; whether the config fits a machine is the business of :func:`validate`. Raises ConfigError.
    """
    is_script = path is not None and Path(path).suffix == ".py"
    files = [] if path is None or is_script else _file_layers(Path(path), ())
    merged: dict[str, Any] = asdict(JobConfig())
    if path is not None:
        merged["name"] = Path(path).stem
    if is_script:
        merged["job"] = str(path)
    for layer in (*_site_layers(site), *files, *map(_override_layer, overrides)):
        _merge(merged, _section(layer, layer.root, JobConfig))
    config: JobConfig = _build(JobConfig, merged, _References(merged))
    return config


def dump_config(config: JobConfig) -> str:
    """The config as YAML that :func:`load_config` reads back to an equal one."""
    return yaml_core.dump(_escaped(asdict(config)))


def _escaped(value: Any) -> Any:
    """``value`` with every ``${`` in its texts marked as text: n backslashes before it become 2 n + 1."""
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
    # Path's own is_file raises for a HOME that is too long
    if not enabled or not (named or os.path.isfile(path)):  # noqa: PTH113
        return []
    return _file_layers(path, ())


def _file_layers(path: Path, above: tuple[Path, ...]) -> list[_Layer]:
    """The layers of a file, what it extends first."""
    if path.resolve() in above:
        raise ConfigError(f"{path}: extends itself through {' -> '.join(str(p) for p in above)}; break the circle")
    layer = _read_yaml(path)
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
    """``key=value`` as a layer of one value."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r}: an override is key=value, such as optim.lr=0.1")
    try:
        node = yaml_core.compose(value)
    except ValueError as error:
        raise ConfigError(f"{text!r}: the value is not valid YAML: {error}") from None
    rest = value[node.end_mark.index if node else 0 :].strip()
    if rest:
        raise ConfigError(f"{text!r}: {rest!r} is a comment to YAML; put quotes around the value, within the shell's")
    node = node or ScalarNode("tag:yaml.org,2002:null", "")
    for part in reversed(_parts_of(key)):
        node = MappingNode("", [(ScalarNode("", part), node)])
    assert isinstance(node, MappingNode)
    return _Layer(f"argument {text!r}", node, has_lines=False)


def _parts_of(key: str) -> list[str]:
    """The parts of a dotted key. What follows the key of a mapping is one part: the name of a layer has dots."""
    for known in all_keys():
        if key.startswith(f"{known}."):
            return [*known.split("."), key.removeprefix(f"{known}.")]
    return key.split(".")


# ------------------------------------------------------------------------------------------------ what a key may hold


@cache
def _hints(schema: Any) -> dict[str, Any]:
    return get_type_hints(schema)


def _section(layer: _Layer, node: Node, schema: Any, prefix: str = "") -> dict[str, Any]:
    """The keys and values of a section as plain data. Refuses what ``schema`` has no key for, and a value of another
    type, by the full name and the line."""
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
        section = valid[key].default_factory
        if is_dataclass(section):
            found[key] = _section(layer, value, section, f"{full}.")
        else:
            found[key] = _value(layer, value, _hints(schema)[key], full)
    return found


def _nearest_key(full: str, here: list[str]) -> str:
    """The likeliest key meant: a misspelt one of this section, or one of this name in another section."""
    leaf = full.rpartition(".")[2]
    elsewhere = [key for key in all_keys() if key.rpartition(".")[2] == leaf]
    return nearest(full, here) or (f"did you mean {elsewhere[0]!r}? " if elsewhere else nearest(full, all_keys()))


def _pairs(layer: _Layer, node: MappingNode) -> Pairs:
    try:
        return yaml_core.pairs_of(node)
    except ValueError as error:
        raise ConfigError(f"{layer.name}: is not valid YAML: {error}") from None


def _value(layer: _Layer, node: Node, hint: Any, full: str) -> Any:
    if get_origin(hint) is list:
        if not isinstance(node, SequenceNode):
            raise layer.error(node, f"{full} is a list: [first, second]")
        return [_scalar(layer, item, (str,), f"{full}[{index}]") for index, item in enumerate(node.value)]
    if get_origin(hint) is dict:
        if not isinstance(node, MappingNode):
            raise layer.error(node, f"{full} is a mapping: {{key: value}}")
        kinds = _kinds(get_args(hint)[1])
        return {key: _scalar(layer, value, kinds, f"{full}.{key}") for key, (_, value) in _pairs(layer, node).items()}
    return _scalar(layer, node, _kinds(hint), full)


def _kinds(hint: Any) -> tuple[type, ...]:
    """The types of a scalar that an annotation allows."""
    return (str, int, float, bool) if hint is Any else get_args(hint) or (hint,)


def _scalar(layer: _Layer, node: Node, kinds: tuple[type, ...], full: str) -> Scalar:
    if not isinstance(node, ScalarNode):
        raise layer.error(node, f"{full} takes {_told(kinds)}, not a list or a mapping")
    try:
        value = scalar_of(node)
    except ValueError as error:
        raise layer.error(node, f"{full}: {error}") from None
    if isinstance(value, str) and _refers(value):
        if "oc.env" in value:
            raise layer.error(node, f"{full}: {value} {_NO_ENVIRONMENT}")
        return value
    if full.startswith(f"{_AS_WRITTEN}.") and not isinstance(value, (str, bool, type(None))):
        return value if yaml_core.dump(value).split("\n")[0] == node.value else str(node.value)
    if value == _MISSING or _fits(value, kinds):
        return _as(kinds, value)
    raise layer.error(node, _misfit(layer, node.value, value, kinds, full))


def _fits(value: Any, kinds: tuple[type, ...]) -> bool:
    return type(value) in kinds or (type(value) is int and float in kinds and abs(value) < 2**63)


def _as(kinds: tuple[type, ...], value: Scalar) -> Scalar:
    """``value``, which fits: a whole number is a float where only that is asked for."""
    return float(value) if type(value) is int and int not in kinds else value


_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


def _told(kinds: tuple[type, ...]) -> str:
    return " or ".join(name for kind, name in _NAMES.items() if kind in kinds)


def _misfit(layer: _Layer, written: str, value: Any, kinds: tuple[type, ...], full: str) -> str:
    """What to write instead of a value of another type."""
    if value is None:
        return f"{full}: is empty (null), and this key takes {_told(kinds)}"
    if not isinstance(value, str) and str in kinds:
        quoted = f"{full.rpartition('.')[2]}: '{written}'" if layer.has_lines else f"""'{full}="{written}"'"""
        return f"{full}: takes text, and {written} is {_NAMES[type(value)]} to YAML; quote it: {quoted}"
    minutes = _minutes(value) if full == "cluster.time_min" else None
    instead = f"; in minutes that is {minutes}" if minutes else ""
    return f"{full}: {written!r} is {_NAMES[type(value)]}, and this key takes {_told(kinds)}{instead}"


def _minutes(text: Any) -> int | None:
    """The minutes that Slurm's notation of a time (``[D-][HH:]MM[:SS]``) stands for, rounded up."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(text))
    if match is None:
        return None
    days, (first, second, third) = int(match[1] or 0), (int(match[group] or 0) for group in (2, 3, 4))
    by_hours = match[1] is not None or match[4] is not None
    seconds = 3600 * first + 60 * second + third if by_hours else 60 * first + second
    return -(-(86400 * days + seconds) // 60)


# ---------------------------------------------------------------------------------------------------- the whole config

_Path = tuple[str | int, ...]


def _build(schema: Any, values: dict[str, Any], references: _References, path: _Path = ()) -> Any:
    """An object of the dataclass ``schema``, with what references stand for in their place."""
    made: dict[str, Any] = {}
    for f in fields(schema):
        value, here = values[f.name], (*path, f.name)
        if is_dataclass(f.default_factory):
            made[f.name] = _build(f.default_factory, value, references, here)
        elif isinstance(value, list):
            made[f.name] = [_final(item, references, (str,), (*here, index)) for index, item in enumerate(value)]
        elif isinstance(value, dict):
            kinds = _kinds(get_args(_hints(schema)[f.name])[1])
            made[f.name] = {key: _final(item, references, kinds, (*here, key)) for key, item in value.items()}
        else:
            made[f.name] = _final(value, references, _kinds(_hints(schema)[f.name]), here)
    return schema(**made)


def _final(value: Scalar, references: _References, kinds: tuple[type, ...], path: _Path) -> Scalar:
    if not isinstance(value, str):
        return value
    full = _full(path)
    if value == _MISSING:
        raise ConfigError(f"{full}: {_MISSING} stands for a value that is still to be given: {full}=VALUE")
    if not _refers(value):
        return _MARK.sub(lambda match: "\\" * (len(match[1]) // 2) + "${", value)
    found = references.at(path)
    if isinstance(found, str) and str not in kinds:
        node = yaml_core.compose(found)
        found = scalar_of(node) if isinstance(node, ScalarNode) else node
    elif type(found) in (int, float) and not _fits(found, kinds):
        found = str(found)
    if _fits(found, kinds):
        return _as(kinds, found)
    raise ConfigError(f"{full}: {value} stands for {found!r}, and this key takes {_told(kinds)}")


def _refers(text: str) -> bool:
    """Whether any ``${`` in it begins a reference: those behind an odd number of backslashes do not."""
    return any(len(match[1]) % 2 == 0 for match in _MARK.finditer(text))


def _full(path: _Path) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]


class _References:
    """What the references in merged layers stand for, by OmegaConf."""

    def __init__(self, merged: dict[str, Any]) -> None:
        self._merged = merged

    @cached_property
    def _root(self) -> Any:
        from omegaconf import OmegaConf  # takes longer to import than all the rest, and few configs need it

        return OmegaConf.create(self._merged)

    def at(self, path: _Path) -> Any:
        """The value at ``path``. Raises ConfigError that names its key."""
        from omegaconf.errors import OmegaConfBaseException

        try:
            return reduce(operator.getitem, path, self._root)
        except OmegaConfBaseException as error:
            full = error.full_key or _full(path)
            reason = str(error.msg or error).splitlines()[0]
            raise ConfigError(f"{full}: {reason}; write \\${{ for a text that has ${{ in it") from None
        except RecursionError:
            raise ConfigError(f"{_full(path)}: refers to itself") from None
