"""Reads the sources of a configuration.

These are the site's file, a file and what it extends, and ``key=value`` arguments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from yaml import MappingNode, Node, ScalarNode

from toolkit.base import fsio
from toolkit.base.errors import ConfigError, nearest
from toolkit.config import yaml_core
from toolkit.config.schema import all_keys
from toolkit.config.yaml_core import Pairs


@dataclass(frozen=True)
class Layer:
    """One source of keys and values."""

    name: str  #: name of a file or an argument
    root: MappingNode
    has_lines: bool = True
    sweep: Node | None = None  #: the value of its key ``sweep``, which is no key of a config

    def error(self, node: Node, text: str) -> ConfigError:
        """Return an error that begins with the place of ``node``."""
        place = f"{self.name}, line {node.start_mark.line + 1}" if self.has_lines else self.name
        return ConfigError(f"{place}: {text}")

    def pairs(self, node: MappingNode) -> Pairs:
        """Return the keys and values of a mapping. Raises ConfigError for what is not valid YAML."""
        try:
            return yaml_core.pairs_of(node)
        except ValueError as error:
            raise ConfigError(f"{self.name}: is not valid YAML: {error}") from None


def site_layers(enabled: bool) -> list[Layer]:
    """Return the layers of the site's file; none if it is absent.

    Raises ConfigError if TOOLKIT_SITE names a file that is absent.
    """
    named = os.environ.get("TOOLKIT_SITE")
    path = Path(named) if named else fsio.expand("~/.config/toolkit/site.yaml")
    # Path's own is_file raises for a HOME that is too long.
    if not enabled or not (named or os.path.isfile(path)):  # noqa: PTH113
        return []
    return file_layers(path, ())


def file_layers(path: Path, above: tuple[Path, ...]) -> list[Layer]:
    """Return the layers of a file, beginning with those that it extends."""
    if path.resolve() in above:
        raise ConfigError(f"{path}: extends itself through {' -> '.join(str(p) for p in above)}; break the circle")
    by = f", which {above[-1]} extends" if above else ""
    try:
        root = yaml_core.compose(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        others = sorted(map(str, path.parent.glob("*.yaml"))) if path.parent.is_dir() else []
        hint = f"; {nearest(str(path), others)}there are: {', '.join(others)}" if others else ""
        raise ConfigError(f"{path}{by}: no such config file{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}{by}: cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not valid YAML: {error}") from None
    if root is None:
        root = MappingNode("", [])
    if not isinstance(root, MappingNode):
        raise ConfigError(f"{path}: must hold `key: value` lines, not a list or a single value")
    layer = Layer(str(path), root)
    # `sweep` is no key of a config: keep it beside the layer.
    for key, value in layer.root.value:
        if isinstance(key, ScalarNode) and key.value == "sweep":
            layer.root.value.remove((key, value))
            layer = replace(layer, sweep=value)
            break
    # `extends` is a key of the file, not of the config: take it out.
    for key, value in layer.root.value:
        if isinstance(key, ScalarNode) and key.value == "extends":
            if not isinstance(value, ScalarNode) or not value.value:
                raise layer.error(value, "extends: takes the name of one file")
            if "\0" in value.value:
                raise layer.error(value, "extends: a file's name cannot hold the character NUL")
            layer.root.value.remove((key, value))
            return [*file_layers(path.parent / value.value, (*above, path.resolve())), layer]
    return [layer]


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
