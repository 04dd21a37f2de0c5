"""Reads the nodes of one layer as the keys and types of a schema.

An error for a misfit names the key and the line, and says what to write.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any, get_args

from yaml import MappingNode, Node, ScalarNode, SequenceNode

from toolkit.base.durations import parse_slurms
from toolkit.base.errors import ConfigError, nearest
from toolkit.config import yaml_core
from toolkit.config.hints import (
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
from toolkit.config.layer_files import Layer
from toolkit.config.references import MISSING, refers
from toolkit.config.schema import JobConfig, all_keys
from toolkit.config.yaml_core import Scalar, scalar_of

#: References to the environment are refused: a config is written to the run's folder, TensorBoard and the terminal.
_NO_ENVIRONMENT = (
    "is refused: the variable's value would be written into the run's files. Give what is no secret as an argument "
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
            here = [f"{prefix}{name}" for name in valid]
            leaf = full.rpartition(".")[2]
            elsewhere = [key for key in all_keys() if key.rpartition(".")[2] == leaf]
            there = f"did you mean {elsewhere[0]!r}? " if elsewhere else nearest(full, all_keys())
            own = "" if "." in full else f"a key of the job's own is params.{full}; "
            likeliest = nearest(full, here) or there or own
            raise layer.error(key_node, f"unknown key {full!r}; {likeliest}valid here: {', '.join(sorted(valid))}")
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


def read_mapping(layer: Layer, node: Node, full: str) -> dict[str, Any]:
    """Return the plain values of a mapping, of any type."""
    if not isinstance(node, MappingNode):
        raise layer.error(node, f"{full} is a section: give it keys")
    return {key: _plain(layer, value, f"{full}.{key}") for key, (_, value) in layer.pairs(node).items()}


def _plain(layer: Layer, node: Node, full: str) -> Any:
    if full.count(".") + full.count("[") > _MOST_LEVELS:
        raise layer.error(node, f"{full}: nests too deep")
    if isinstance(node, SequenceNode):
        return [_plain(layer, item, f"{full}[{index}]") for index, item in enumerate(node.value)]
    if isinstance(node, MappingNode):
        return read_mapping(layer, node, full)
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
    if not fits(value, kinds):
        raise layer.error(node, _misfit(layer, node.value, value, kinds, full))
    try:
        check_word(full, value, hint)
    except ConfigError as error:
        raise layer.error(node, str(error)) from None
    return as_kind(value, kinds)  # type: ignore[no-any-return]


def _misfit(layer: Layer, written: str, value: Any, kinds: tuple[type, ...], full: str) -> str:
    """Return what to write instead of a value of another type."""
    # Each branch is a mistake of its own: an empty value, missing quotes, a time as Slurm writes it.
    takes = f"this key takes {kind_names(kinds)}"
    if value is None:
        return f"{full}: is empty (null), and {takes}"
    kind = NAME_OF_KIND[type(value)]
    if full.startswith("secrets."):  # do not show what may be the secret itself
        return f"{full}: takes `env` or the path of a file, and this is {kind} to YAML"
    if not isinstance(value, str) and str in kinds:
        key = full.rpartition(".")[2]
        quoted = f"{key}: '{written}'" if layer.has_lines else f"""'{full}="{written}"'"""
        return f"{full}: takes text, and {written} is {kind} to YAML; quote it: {quoted}"
    seconds = parse_slurms(str(value)) if full == "cluster.time_min" else None
    if seconds:
        takes += f"; in minutes that is {math.ceil(seconds / 60)}"
    return f"{full}: {written!r} is {kind}, and {takes}"
