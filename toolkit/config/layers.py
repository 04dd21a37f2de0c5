"""How the layers of a configuration merge.

Later ones win: the defaults of schema.py, the site's defaults (``$TOOLKIT_SITE`` or
``~/.config/toolkit/site.yaml``), the file that ``extends:`` names, the file itself, ``key=value`` arguments.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toolkit.config.schema import JobConfig, all_keys
from toolkit.errors import ConfigError, nearest


def load_config(path: str | Path | None, overrides: Sequence[str] = (), *, site: bool = True) -> JobConfig:
    """Read ``path`` with what it extends, merge the layers and return the typed config.

    Without a path the layers are defaults, site and overrides. ``overrides`` are ``key=value`` with dotted keys and
    YAML values. Keys, types and values are checked; whether the config fits a machine is the business of
    :func:`validate`. Raises ConfigError.
    """
    files = [] if path is None else _file_layers(Path(path), ())
    name = [] if path is None else [("its name", OmegaConf.create({"name": Path(path).stem}))]
    layers: list[tuple[str, Any]] = [*name, *_site_layer(site), *files, *_override_layers(overrides)]
    for source, layer in layers:
        _check_keys(layer, JobConfig, source)
    try:
        merged = OmegaConf.merge(_defaults(), *(layer for _, layer in layers))  # one by one takes several times as long
    except OmegaConfBaseException as error:
        _blame(layers)
        raise _type_error(error, "the merged config") from None
    return _typed(merged)


@cache
def _defaults() -> Any:
    """Not to be changed."""
    return OmegaConf.structured(JobConfig)


def _blame(layers: Iterable[tuple[str, Any]]) -> None:
    """Raises ConfigError that names the first of the layers whose values do not fit."""
    merged = _defaults()
    for source, layer in layers:
        try:
            merged = OmegaConf.merge(merged, layer)
        except OmegaConfBaseException as error:
            raise _type_error(error, source) from None


def dump_config(config: JobConfig) -> str:
    """The config as YAML that :func:`load_config` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def _typed(merged: Any) -> JobConfig:
    try:
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise _type_error(error, "the merged config") from None
    assert isinstance(config, JobConfig)
    return config


def _site_layer(enabled: bool) -> list[tuple[str, Any]]:
    named = os.environ.get("TOOLKIT_SITE")
    path = Path(named) if named else Path("~/.config/toolkit/site.yaml").expanduser()
    if not enabled or not (named or path.is_file()):
        return []
    return _file_layers(path, ())


def _file_layers(path: Path, above: tuple[Path, ...]) -> list[tuple[str, Any]]:
    """The layers of a file, what it extends first."""
    if path.resolve() in above:
        raise ConfigError(f"{path}: extends itself through {' -> '.join(str(p) for p in above)}; break the circle")
    layer = _read_yaml(path)
    base = layer.pop("extends", None)
    if base is None:
        return [(str(path), layer)]
    return [*_file_layers(path.parent / str(base), (*above, path.resolve())), (str(path), layer)]


def _read_yaml(path: Path) -> DictConfig:
    try:
        layer = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file{_nearby_files(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except Exception as error:  # the YAML parser's own tree of exceptions is not part of OmegaConf's interface
        raise ConfigError(f"{path}: is not valid YAML: {error}") from None
    if not isinstance(layer, DictConfig):
        raise ConfigError(f"{path}: must hold `key: value` lines, not a list or a single value")
    return layer


def _nearby_files(path: Path) -> str:
    found = sorted(str(p) for p in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    return f"; {nearest(str(path), found)}there are: {', '.join(found)}" if found else ""


def _override_layers(overrides: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"{text!r}: an override is key=value, such as optim.lr=0.1")
        try:
            yield f"argument {text!r}", OmegaConf.from_dotlist([text])
        except Exception as error:  # a value that is not YAML
            raise ConfigError(f"{text!r}: the value is not valid YAML: {error}") from None


def _check_keys(layer: Any, schema: Any, source: str, prefix: str = "") -> None:
    """Refuse a key that no dataclass has, by its full name, with the nearest valid one."""
    valid = {f.name: f for f in fields(schema)}
    for key in layer:
        full = f"{prefix}{key}"
        if key not in valid:
            hint = _nearest_key(full, [f"{prefix}{name}" for name in valid])
            raise ConfigError(f"{source}: unknown key {full!r}; {hint}valid here: {', '.join(sorted(valid))}")
        section = valid[key].default_factory
        if section is list and not isinstance(layer._get_node(key), ListConfig):
            raise ConfigError(f"{source}: {full} is a list: [first, second]")
        if section is MISSING or not is_dataclass(section):
            continue
        value = layer._get_node(key)
        if not isinstance(value, DictConfig):
            raise ConfigError(f"{source}: {full} is a section: give it keys, such as {full}.{fields(section)[0].name}")
        _check_keys(value, section, source, f"{full}.")


def _nearest_key(full: str, here: list[str]) -> str:
    """The likeliest key meant: a misspelt one of this section, or one of this name in another section."""
    leaf = full.rpartition(".")[2]
    elsewhere = [key for key in all_keys() if key.rpartition(".")[2] == leaf]
    return nearest(full, here) or (f"did you mean {elsewhere[0]!r}? " if elsewhere else nearest(full, all_keys()))


def _type_error(error: OmegaConfBaseException, source: str) -> ConfigError:
    message = str(error.msg or error).split("\n")[0]
    return ConfigError(f"{source}: {error.full_key or '?'}: {message}")
