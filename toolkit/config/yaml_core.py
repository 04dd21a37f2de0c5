"""YAML as version 1.2 means it (https://yaml.org/spec/1.2.2/#103-core-schema), read as nodes that know their line.

PyYAML and OmegaConf follow YAML 1.1, in which ``no`` is false, ``16:00`` is 960 and ``0755`` is 493. Here these are
text, text and 755. Texts are written such that readers of both versions read them back unchanged.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, TypeAlias

import yaml
from yaml import MappingNode, Node, ScalarNode, SequenceNode

Scalar: TypeAlias = str | int | float | bool | None
Pairs: TypeAlias = dict[str, tuple[ScalarNode, Node]]

_PREFIX = "tag:yaml.org,2002:"
MERGE = _PREFIX + "merge"
_DECIMAL = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
#: What plain words stand for, by their tags. The last column lists their possible first characters, for PyYAML.
_PLAIN = (
    ("null", re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")),
    ("int", re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), list("-+0123456789")),
    ("float", re.compile(rf"(?:{_DECIMAL}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"), list("-+0123456789.")),
    ("merge", re.compile(r"<<\Z"), ["<"]),  # not in version 1.2, but common
)


class _YamlLoader(yaml.SafeLoader):
    """A loader in Python. The one in C crashes the process where brackets nest too deep."""


class _YamlDumper(yaml.SafeDumper):
    """A dumper that quotes texts which YAML 1.1 or 1.2 would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> ScalarNode:
        """Write a text, with escapes for what is not printable: in other styles some of that would break lines."""
        return self.represent_scalar(_PREFIX + "str", data, style=None if data.isprintable() else '"')


_YamlDumper.add_representer(str, _YamlDumper.represent_str)
_YamlLoader.yaml_implicit_resolvers = {}  # removes those of YAML 1.1
for _name, _pattern, _first in _PLAIN:
    _YamlLoader.add_implicit_resolver(_PREFIX + _name, _pattern, _first)
    _YamlDumper.add_implicit_resolver(_PREFIX + _name, _pattern, _first)


@lru_cache(maxsize=64)  # a sweep reads its file for each point. Callers share the nodes and change none
def compose(text: str) -> Node | None:
    """Return the root of the one document in ``text``; None for an empty one. Raises ValueError with the reason."""
    try:
        node: Node | None = yaml.compose(text, _YamlLoader)
    except RecursionError:
        raise ValueError("it nests too deep") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    return node


def dump(value: Any) -> str:
    """Return mappings, lists and scalars as block YAML in which every text stays on its line."""
    text: str = yaml.dump(value, Dumper=_YamlDumper, sort_keys=False, allow_unicode=True, width=2**31 - 1)
    return text


def scalar_of(node: ScalarNode) -> Scalar:
    """Return what a scalar stands for. Raises ValueError for a tag outside of the core schema, or that does not fit."""
    kind, text = node.tag.removeprefix(_PREFIX), str(node.value)
    if kind in ("str", "merge"):
        return text
    pattern = next((pattern for name, pattern, _ in _PLAIN if name == kind), None)
    if pattern is None or not pattern.match(text):
        raise ValueError(f"{text!r} is not of the type {node.tag}")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def pairs_of(node: MappingNode, done: dict[int, Pairs | None] | None = None) -> Pairs:
    """Return the keys of a mapping as written, each with its node and its value's.

    Merged keys (``<<``) come first. Raises ValueError for a key that is there twice, and for one that is not a single
    word. ``done`` are the pairs of nodes that were read before, and None of one that is being read.
    """
    done = {} if done is None else done
    if id(node) in done:
        known = done[id(node)]
        if known is None:
            raise ValueError(f"{_place(node)}: a mapping that merges itself")
        return known
    done[id(node)] = None
    merged: Pairs = {}
    own: Pairs = {}
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            raise ValueError(f"{_place(key)}: a key must be a single word")
        # A merged key never replaces one of the mapping itself; of several bases the first wins.
        if key.tag == MERGE:
            for base in value.value if isinstance(value, SequenceNode) else [value]:
                if not isinstance(base, MappingNode):
                    raise ValueError(f"{_place(value)}: << takes a mapping")
                merged = {**pairs_of(base, done), **merged}
        elif key.value in own:
            raise ValueError(f"{_place(key)}: {key.value!r} is given twice")
        else:
            own[key.value] = (key, value)
    result = done[id(node)] = {**merged, **own}
    return result


def _place(node: Node) -> str:
    return f"line {node.start_mark.line + 1}"
