"""How the layers of a configuration are read and merge.

Later layers win: the defaults of schema.py, some variables of sbatch, the site's defaults (``$TOOLKIT_SITE`` or
``~/.config/toolkit/site.yaml``), the file that ``extends:`` names, the file itself, ``key=value`` arguments. Files and
arguments are YAML 1.2, see yaml_core.py. A value may refer to others: ``${optim.lr}``, as OmegaConf reads it. The nodes
of a layer are read as the keys and types of a schema. The error for a misfit names the key and the line, and says what
to write.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, TypeAlias, get_args

from yaml import MappingNode, Node, ScalarNode, SequenceNode

from toolkit.base import fsio
from toolkit.base.durations import parse_minutes, parse_slurms
from toolkit.base.errors import ConfigError, did_you_mean, listing
from toolkit.config import yaml_core
from toolkit.config.cluster import instead_of_flag
from toolkit.config.job_module import job_source, params_source
from toolkit.config.params import dataclass_in, defaults_of
from toolkit.config.schema import SCRIPT_JOB, JobConfig, all_keys, requirements_of, value_of
from toolkit.config.script_arguments import (
    MISSING,
    References,
    build,
    escaped,
    final_value,
    option_names,
    refers,
    resolved,
)
from toolkit.config.script_keys import ActingKeys, acting_keys
from toolkit.config.source import read_source
from toolkit.config.yaml_core import Pairs, Scalar, scalar_of
from toolkit.constraints import (
    NAME_OF_KIND,
    PLAIN,
    as_kind,
    check_word,
    container_of,
    fits,
    hints_of,
    item_hints,
    kind_names,
    kinds_of,
)
from toolkit.files import records

#: Variables in which a user's profile holds options of sbatch, by the keys of ``cluster``. sbatch itself does not get
#: them: it would prefer them to the options in the script, which are those of the config.
SBATCH_VARIABLES = {
    "account": "SBATCH_ACCOUNT",
    "partition": "SBATCH_PARTITION",
    "qos": "SBATCH_QOS",
    "constraint": "SBATCH_CONSTRAINT",
}


def load_config(
    path: str | Path | None,
    overrides: Overrides = (),
    *,
    site: bool = True,
    project: Path | None = None,
    sweep: bool = False,
) -> JobConfig:
    """Read ``path`` with what it extends, merge the layers and return the typed config.

    The path of a script (``train.py``) stands for a config without keys that has the script as its ``job``. Without a
    path the layers are defaults, site and overrides. ``overrides`` are ``key=value`` with dotted keys and YAML values,
    or a mapping of dotted keys to values. Keys, types and values are checked; `validate()` checks whether the config
    fits a machine. Raises ConfigError.

    ``params`` are checked against the class ``Params`` of the job's file, or of the file whose class it derives from.
    The job is looked for in ``project``, the current folder if None. With ``site=False`` and no ``project`` they are
    not checked: those of a run already were.
    A file with the section ``sweep`` is refused, without ``sweep=True``::

        >>> toolkit.load_config("configs/digits_ddp.yaml", ["optim.lr=0.1"]).optim.lr
        0.1
    """
    merged, own = merged_layers(path, overrides, site=site, project=project, sweep=sweep)
    references = References(merged)
    if own is None:
        params = resolved(merged["params"], PLAIN, references, ("params",))
    else:
        params = asdict(build(own, merged["params"], references, ("params",)))
    config: JobConfig = build(JobConfig, {**merged, "params": {}}, references)
    config.params = params
    return config


def merged_layers(
    path: str | Path | None,
    overrides: Overrides = (),
    *,
    site: bool = True,
    project: Path | None = None,
    sweep: bool = False,
    origins: dict[str, str] | None = None,
) -> tuple[dict[str, Any], type | None]:
    """Return the merged values of all layers, references unresolved, and the job's ``Params``.

    ``origins`` gets the layer that has set each key, by dotted key; a key that none has set is left out. See
    :func:`load_config`.
    """
    origins = {} if origins is None else origins
    is_script = path is not None and Path(path).suffix == ".py"
    layers = site_layers() if site else []
    of_site = len(layers)
    merged: dict[str, Any] = asdict(JobConfig())
    if site:
        variables = {key: os.environ.get(name) for key, name in SBATCH_VARIABLES.items()}
        merged["cluster"] |= escaped({key: value for key, value in variables.items() if value})
        origins |= {f"cluster.{key}": f"${SBATCH_VARIABLES[key]}" for key, value in variables.items() if value}
    if path is not None:
        merged["name"], origins["name"] = Path(path).stem, "the file's name"
    if is_script:
        merged["job"], origins["job"] = str(path), "the command line"
    elif path is not None:
        layers += file_layers(Path(path), ())
    described = next((layer for layer in layers if layer.sweep is not None), None)
    if described is not None and not sweep:
        command = shlex.join(["toolkit", "sweep", str(path)])
        raise ConfigError(f"{described.name}: sweep: describes many runs; `{command}` submits them")
    texts = override_texts(overrides)
    layers += map(override_layer, texts)
    # ``params`` are merged later: only the job, which any layer may name, knows which keys they have.
    given = [(layer, pair[1]) for layer in layers if (pair := layer.pairs(layer.root).get("params"))]
    for layer in layers:
        values = read_section(layer, layer.root, JobConfig)
        if "argv" in values:  # a later layer wins, whichever way it gives an option
            merged["args"] = {
                name: value for name, value in merged["args"].items() if name not in option_names(values["argv"])
            }
        _merge(merged, values)
        origins |= dict.fromkeys(_keys_in(values), layer.name)
    # The params of a run were checked when it was submitted, and its job's file may have changed since.
    if not site and project is None:
        for layer, node in given:
            if not isinstance(node, MappingNode):
                raise layer.error(node, "params is a section: give it keys")
            _merge(merged["params"], _plain(layer, node, "params"))
        return merged, None
    job = final_value(merged["job"], str, References(merged), ("job",))
    # Of a run's own config only the changes are checked: its script may be another one now.
    of_user = layers[of_site:] if site else layers[len(layers) - len(texts) :]
    if site or project is not None:
        acting = acting_keys(str(job), merged["argv"], project)
        _refuse_unread(of_user, acting, merged)
        _refuse_idle(of_user, len(texts), acting, merged, sweep=sweep)
    own = _own_keys(str(job), project, given)
    if own is not None:
        merged["params"] = escaped(defaults_of(own, MISSING))
        for layer, node in given:
            values = read_section(layer, node, own, "params.")
            _merge(merged["params"], values)
            origins |= dict.fromkeys(_keys_in(values, "params."), layer.name)
    return merged, own


def _own_keys(job: str, project: Path | None, given: Sequence[tuple[Layer, Node]]) -> type | None:
    """Return the job's ``Params``. None where the job cannot be found or read: `validate()` reports that."""
    try:
        source = None if job == SCRIPT_JOB else params_source(read_source(job_source(job, project)), project)
    except (ConfigError, OSError):
        # Given params cannot be checked without the file, so the error must be raised now.
        if given:
            raise
        return None
    own = None if source is None else dataclass_in(source, "Params")
    for layer, node in given:
        if own is None and not (isinstance(node, MappingNode) and not node.value):
            if source is None:
                why = "a script that knows nothing of the toolkit has none; give it arguments: args.NAME=VALUE"
            else:
                how = "`@dataclass` and `class Params:` with `width: int = 256` below it"
                if "Params" in source.classes:
                    place = source.place(source.classes["Params"])
                    why = f"class Params ({place}) is not a dataclass; write `@dataclass` from dataclasses before it"
                elif source.is_imported("Params"):
                    why = f"{source.path} imports Params, and its keys must be known without importing it: "
                    why += f"write {how} there"
                else:
                    why = f"{source.path} declares no keys of its own; write {how} there, or take them out here"
            raise layer.error(node, f"params: {why}")
    return own


def _refuse_unread(layers: Sequence[Layer], acting: ActingKeys, merged: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first key or option of these layers that makes no difference to the job.

    Log a warning of keys of a program that is not known to read them.
    """
    unchecked = []
    for layer, key, node in _unreferred(layers, merged):
        if not acting.has_effect(key):
            raise layer.error(node, acting.refusal(key, node.value if isinstance(node, ScalarNode) else "..."))
        if key == "args" and isinstance(node, MappingNode):
            for name in layer.pairs(node).keys() - option_names(merged["argv"]):  # words of ``argv`` are set
                if refusal := acting.refusal_of_option(name):
                    raise layer.error(node, refusal)
        if not acting.script and not acting.is_toolkit_key(key):
            unchecked.append(key)
    if unchecked:
        records.warn_once(
            f"{merged['argv'][0]} cannot be read as Python, so whether it reads {listing(unchecked, 4)} is not known"
        )


def _refuse_idle(
    layers: Sequence[Layer], arguments: int, acting: ActingKeys, merged: Mapping[str, Any], *, sweep: bool
) -> None:
    """Raise ConfigError for a key that changes nothing because of another key, such as ``strategy.name``.

    The last ``arguments`` of the layers are the command line's. A warning is enough where a later layer than that of
    the key has set the other one (a file of local_sgd, submitted with ``strategy.name=ddp``), and in a sweep whose
    points may differ in it.
    """
    files = len(layers) - arguments
    order = {id(layer): min(number, files) for number, layer in enumerate(layers)}
    set_in = {key: order[id(layer)] for layer in layers for key, _ in _leaf_nodes(layer, layer.root)}
    for layer, key, node in _unreferred(layers, merged):
        for needs in requirements_of(key):
            values = {other: _at(merged, other) for other in (need.partition("=")[0] for need in needs)}
            is_open = any(isinstance(value, str) and refers(value) for value in values.values())
            is_default = _at(merged, key) == value_of(JobConfig(), key)
            if is_open or is_default or any(_is_met(merged, need) for need in needs):
                continue
            if not acting.is_toolkit_key(key):  # the script reads it, for whatever it needs it
                continue
            shown = {other: value if isinstance(value, str) else json.dumps(value) for other, value in values.items()}
            now = " and ".join(f"{other} is {value}" for other, value in shown.items())
            text = f"{key}: changes nothing while {now}; set {' or '.join(needs)}, or leave it out"
            last = max(set_in.get(other, -1) for other in values)
            if last <= order[id(layer)] and not (sweep and last == files):
                raise layer.error(node, text)
            records.warn_once(text)


def _at(merged: Mapping[str, Any], key: str) -> Any:
    return reduce(getitem, key.split("."), merged)


def _is_met(merged: Mapping[str, Any], need: str) -> bool:
    key, equals, word = need.partition("=")
    return bool(_at(merged, key) == word if equals else _at(merged, key))


def _unreferred(layers: Sequence[Layer], merged: Mapping[str, Any]) -> Iterator[tuple[Layer, str, Node]]:
    """Yield the keys that the layers give, but those to which another refers: these make a difference there."""
    references = re.findall(r"\$\{([^}]*)\}", json.dumps(merged, default=str))
    for layer in layers:
        for key, node in _leaf_nodes(layer, layer.root):
            leaf = key.rpartition(".")[2]
            if not any(leaf in reference for reference in references):
                yield layer, key, node


def _leaf_nodes(layer: Layer, node: MappingNode, prefix: str = "") -> Iterator[tuple[str, Node]]:
    """Yield the keys of the config that a layer gives, with their values."""
    for name, (_, value) in layer.pairs(node).items():
        key = f"{prefix}{name}"
        if isinstance(value, MappingNode) and any(other.startswith(f"{key}.") for other in all_keys()):
            yield from _leaf_nodes(layer, value, f"{key}.")
        else:
            yield key, value


def dump_config(config: JobConfig) -> str:
    """Return the config as YAML that :func:`load_config` reads back to an equal one."""
    return yaml_core.dump(escaped(asdict(config)))


def _keys_in(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of all values, and of the sections and mappings that hold them."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _keys_in(value, f"{prefix}{key}.")


def _merge(below: dict[str, Any], above: dict[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = value


@dataclass(frozen=True)
class Layer:
    """One source of keys and values."""

    name: str  #: name of a file or an argument
    root: MappingNode
    has_lines: bool = True
    sweep: Node | None = None  #: the value of its key ``sweep``, which is no key of a config

    def error(self, node: Node, text: str) -> ConfigError:
        """Return an error that begins with the place of ``node``."""
        if not self.has_lines and self.name.startswith(f"argument '{text.partition(':')[0]}="):
            return ConfigError(text)  # it names the key of the argument
        place = f"{self.name}, line {node.start_mark.line + 1}" if self.has_lines else self.name
        return ConfigError(f"{place}: {text}")

    def pairs(self, node: MappingNode) -> Pairs:
        """Return the keys and values of a mapping. Raises ConfigError for what is not valid YAML."""
        try:
            return yaml_core.pairs_of(node)
        except ValueError as error:
            raise ConfigError(f"{self.name}: is not valid YAML: {error}") from None


def site_path() -> Path:
    """Return the file of the site's defaults."""
    return Path(os.environ.get("TOOLKIT_SITE") or fsio.expand("~/.config/toolkit/site.yaml"))


def site_layers() -> list[Layer]:
    """Return the layers of the site's file; none if it is absent. Raises ConfigError if TOOLKIT_SITE names it."""
    # Path's own is_file raises for a HOME that is too long.
    is_there = os.environ.get("TOOLKIT_SITE") or os.path.isfile(site_path())  # noqa: PTH113
    return file_layers(site_path(), ()) if is_there else []


def _as_program(path: Path) -> str:
    """Return how to run a file that is no config, if its name says that it may be a program."""
    is_config = path.suffix in (".yaml", ".yml")
    return "" if is_config else f"; a program is run by `toolkit exec -- {shlex.quote(str(path.absolute()))}`"


def file_layers(path: Path, above: tuple[Path, ...]) -> list[Layer]:
    """Return the layers of a file, beginning with those that it extends."""
    if path.resolve() in above:
        raise ConfigError(f"{path}: extends itself through {' -> '.join(str(p) for p in above)}; break the circle")
    by = f", which {above[-1]} extends" if above else ""
    try:
        root = yaml_core.compose(fsio.read_text(path))
    except FileNotFoundError:
        others = sorted(map(str, path.parent.glob("*.yaml"))) if path.parent.is_dir() else []
        hint = f"; {did_you_mean(str(path), others)}there are: {', '.join(others)}" if others else ""
        raise ConfigError(f"{path}{by}: no such config file{hint}") from None
    except OSError as error:
        raise ConfigError(f"{path}{by}: cannot be read: {error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}{by}: is not UTF-8 text, and so not a config{_as_program(path)}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid YAML: {error}") from None
    if root is None:
        root = MappingNode("", [])
    if not isinstance(root, MappingNode):
        why = "must hold `key: value` lines, not a list or a single value"
        raise ConfigError(f"{path}: {why}{_as_program(path)}")
    # These are keys of the file, not of the config.
    root, sweep = _without(root, "sweep")
    root, extends = _without(root, "extends")
    layer = Layer(str(path), root, sweep=sweep)
    if extends is None:
        return [layer]
    if not isinstance(extends, ScalarNode) or not extends.value:
        raise layer.error(extends, "extends: takes the name of one file")
    if "\0" in extends.value:
        raise layer.error(extends, "extends: a file's name cannot hold the character NUL")
    return [*file_layers(path.parent / extends.value, (*above, path.resolve())), layer]


def _without(root: MappingNode, name: str) -> tuple[MappingNode, Node | None]:
    """Return a mapping without a key, and the key's value, if it has one."""
    for index, (key, value) in enumerate(root.value):
        if isinstance(key, ScalarNode) and key.value == name:
            left = copy(root)
            left.value = [*root.value[:index], *root.value[index + 1 :]]
            return left, value
    return root, None


#: ``key=value`` texts, one of them, or the values by their dotted keys.
Overrides: TypeAlias = str | Sequence[str] | Mapping[str, Any]


def override_texts(overrides: Overrides) -> list[str]:
    """Return overrides as ``key=value`` texts. Raises ConfigError for a value that YAML has no form for."""
    if isinstance(overrides, str):
        return [overrides]
    if not isinstance(overrides, Mapping):
        return [*overrides]
    try:
        # JSON is YAML, and quotes what would be another type there, such as "0755". It has no paths.
        return [f"{key}={json.dumps(value, default=os.fspath)}" for key, value in overrides.items()]
    except TypeError as error:
        raise ConfigError(f"overrides: {error}; give numbers, texts, true or false, null, lists and mappings") from None


def override_layer(text: str) -> Layer:
    """Return ``key=value`` as a layer of one value."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r}: is not key=value; write it as in optim.lr=0.1")
    try:
        node = yaml_core.compose(value)
    except ValueError as error:
        raise ConfigError(f"{text!r}: the value is not valid YAML: {error}") from None
    # YAML reads what follows a # as a comment: refuse it instead of losing it.
    rest = value[node.end_mark.index if node else 0 :].strip()
    if rest:
        raise ConfigError(f"{text!r}: {rest!r} is a comment to YAML; put quotes around the value, within the shell's")
    node = node or ScalarNode("tag:yaml.org,2002:null", "")
    for part in reversed(parts_of(key)):
        node = MappingNode("", [(ScalarNode("", part), node)])
    assert isinstance(node, MappingNode)
    # Do not show what a user may have given in place of a secret's source.
    shown = f"{key}=..." if key.startswith("secrets") else text
    return Layer(f"argument {shown!r}", node, has_lines=False)


def sweep_of(path: Path) -> tuple[Layer, Node] | None:
    """Return the section ``sweep`` of a file, or of the nearest file that it extends. None without one."""
    found = [(layer, layer.sweep) for layer in file_layers(path, ()) if layer.sweep is not None]
    return found[-1] if found else None


def parts_of(key: str) -> list[str]:
    """Return the parts of a dotted key. What follows a mapping's key is one part: names of layers contain dots."""
    for known in all_keys():
        if key.startswith(f"{known}.") and known != "params":
            return [*known.split("."), key.removeprefix(f"{known}.")]
    return key.split(".")


#: References to the environment are refused: a config is written to the run's folder, TensorBoard and the terminal.
_NO_ENVIRONMENT = (
    "is refused: the variable's value would be written into the run's files. Give what is not secret as an argument "
    "that the shell fills in, key=$VARIABLE; a program of notify finds the variable in its own environment"
)
#: Limit on nesting: an alias in YAML may refer to what contains it.
_MOST_LEVELS = 20
#: Numbers below these keys keep their text, for a program to read: 0755 and 1.10 keep their zeros.
_AS_WRITTEN = ("cluster.extra.", "args.")


def read_section(layer: Layer, node: Node, schema: Any, prefix: str = "") -> dict[str, Any]:
    """Return the keys and values of a section as plain data.

    Raises ConfigError, with the full name and the line, for a key that ``schema`` lacks and for a value of another
    type.
    """
    valid = {f.name: f for f in fields(schema)}
    if not isinstance(node, MappingNode):
        name = prefix.removesuffix(".")
        raise layer.error(node, f"{name} is a section: give it keys, such as {prefix}{next(iter(valid))}")
    values: dict[str, Any] = {}
    for key, (key_node, value) in layer.pairs(node).items():
        full = f"{prefix}{key}"
        if key not in valid:
            # Likeliest is a key misspelled in this section, of this name in another, or the job's own.
            hints, has_keys = hints_of(schema), isinstance(value, MappingNode)
            here = [
                f"{prefix}{n}" for n in valid if not has_keys or is_dataclass(hints[n]) or container_of(hints[n], dict)
            ]
            leaf = full.rpartition(".")[2]
            elsewhere = [key for key in all_keys() if key.rpartition(".")[2] == leaf]
            if prefix in ("", "cluster.") and not elsewhere and (advice := instead_of_flag(key)) is not None:
                raise layer.error(key_node, f"{full}: unknown key; {advice}")
            there = f"did you mean {elsewhere[0]!r}? " if elsewhere else did_you_mean(full, all_keys())
            own = "" if "." in full else f"a key of the job's own is params.{full}; "
            likeliest = (there if elsewhere and not prefix else did_you_mean(full, here)) or there or own
            raise layer.error(key_node, f"{full}: unknown key; {likeliest}valid here: {', '.join(sorted(valid))}")
        if full == "params" and schema is JobConfig:  # the job says what is in there
            continue
        # A section is read key by key, any other value by its type.
        hint = hints_of(schema)[key]
        if is_dataclass(hint):
            values[key] = read_section(layer, value, hint, f"{full}.")
        else:
            values[key] = _value(layer, value, hint, full)
    return values


def _value(layer: Layer, node: Node, hint: Any, full: str) -> Any:
    """Return the plain value of a node, of the type ``hint``."""
    # A key may take several forms, such as `int | list[int]`: the node decides.
    listed, mapping = container_of(hint, list, tuple), container_of(hint, dict)
    if listed is not None and isinstance(node, SequenceNode):
        try:
            hints = item_hints(listed, len(node.value))
        except ValueError as error:
            raise layer.error(node, f"{full}: {error}") from None
        values = []
        for index, (item, each) in enumerate(zip(node.value, hints, strict=True)):
            values.append(_value(layer, item, each, f"{full}[{index}]"))
        return values
    if mapping is not None and isinstance(node, MappingNode):
        each = get_args(mapping)[1]
        return {key: _value(layer, value, each, f"{full}.{key}") for key, (_, value) in layer.pairs(node).items()}
    # No form is left for a scalar.
    if not kinds_of(hint):
        how = "a list: [first, second]" if listed is not None else "a mapping: {key: value}"
        raise layer.error(node, f"{full} is {how}")
    return _scalar(layer, node, hint, full)


def _plain(layer: Layer, node: Node, full: str) -> Any:
    """Return the plain value of a node, of any type."""
    if full.count(".") + full.count("[") > _MOST_LEVELS:
        raise layer.error(node, f"{full}: nests too deep")
    if isinstance(node, SequenceNode):
        return [_plain(layer, item, f"{full}[{index}]") for index, item in enumerate(node.value)]
    if isinstance(node, MappingNode):
        return {key: _plain(layer, value, f"{full}.{key}") for key, (_, value) in layer.pairs(node).items()}
    return _scalar(layer, node, PLAIN, full)


def _scalar(layer: Layer, node: Node, hint: Any, full: str) -> Scalar:
    kinds = kinds_of(hint)
    if not isinstance(node, ScalarNode):
        raise layer.error(node, f"{full} takes {kind_names(kinds)}, not a list or a mapping")
    try:
        value = scalar_of(node)
    except ValueError as error:
        raise layer.error(node, f"{full}: {error}") from None
    # A reference has the type of what it refers to, which is known when all layers are merged.
    if isinstance(value, str) and refers(value):
        if "oc.env" in value:
            raise layer.error(node, f"{full}: {value} {_NO_ENVIRONMENT}")
        return value
    # Keep a number as it is written where YAML would write it differently.
    if full.startswith(_AS_WRITTEN) and not isinstance(value, (str, bool, type(None))):
        written = yaml_core.dump(value).split("\n")[0]
        return value if written == node.value else str(node.value)
    if value == MISSING:
        return value
    if full == "cluster.time_min" and isinstance(value, str):
        value = value if (minutes := parse_minutes(value)) is None else minutes
    if not fits(value, kinds):
        raise layer.error(node, _wrong_type(layer, node.value, value, kinds, full))
    try:
        check_word(full, value, hint)
    except ConfigError as error:
        raise layer.error(node, str(error)) from None
    return as_kind(value, kinds)  # type: ignore[no-any-return]


def _wrong_type(layer: Layer, written: str, value: Any, kinds: tuple[type, ...], full: str) -> str:
    """Return what to write instead of a value of another type."""
    # Each branch is a mistake of its own: an empty value, missing quotes, a time as Slurm writes it.
    takes = f"must be {kind_names(kinds)}"
    if value is None:
        return f"{full}: is empty (null); {takes}"
    kind = NAME_OF_KIND[type(value)]
    if full.startswith("secrets."):  # do not show what may be the secret itself
        return f"{full}: takes `env` or the path of a file, and this is {kind} to YAML"
    if not isinstance(value, str) and str in kinds:
        key = full.rpartition(".")[2]
        quoted = f"{key}: '{written}'" if layer.has_lines else f"""'{full}="{written}"'"""
        return f"{full}: takes text, and {written} is {kind} to YAML; quote it: {quoted}"
    if full == "cluster.time_min":
        takes = "must be minutes, or a time such as 4h, 90min, 2:00:00 or 1-12:00:00"
        if parse_slurms(str(value)):
            takes += f"; Slurm reads this as minutes and seconds: give {written}:00 for hours and minutes"
    return f"{full}: {written!r} is {kind}; {takes}"
