"""The points of a sweep: each a whole config, checked like that of a run.

A point is known by the keys that decide its result. Ten thousand configs are checked in seconds. A value of a key is
read once, as the config reads it. Then the keys of one config object are set to the values of each point, and all
checks are made on it. Where a key may change others (a reference, ``job``, a whole section), each point is read anew,
which takes some milliseconds.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from toolkit import config as configs
from toolkit.base.errors import ConfigError, RequestError
from toolkit.config import JobConfig
from toolkit.config.job_module import JobFiles
from toolkit.config.layers import parts_of
from toolkit.files.run_files import AfterRecord
from toolkit.plugins.sweep.axes import Axis, Discrete, Values
from toolkit.plugins.sweep.learnt import Tried
from toolkit.plugins.sweep.request import SweepRequest
from toolkit.run.prepare import new_run as prepare
from toolkit.run.submission.submit import begins_with

#: Keys, and sections with a dot, that do not decide what a run computes: where it runs, and how it is looked after.
#: The same point with more time or memory is the same point.
_BESIDE_THE_RESULT = (
    *("name", "notify", "retry.", "checkpoint.copy_to", "cluster.time_min", "cluster.mem_gb", "cluster.partition"),
    *("cluster.account", "cluster.qos", "cluster.constraint", "cluster.exclude", "cluster.exclusive"),
    *("cluster.setup", "cluster.extra", "cluster.signal_delay_s", "cluster.preflight", "cluster.spare_nodes"),
)
#: Keys whose values name files, or that change what other keys mean.
_READ_ANEW = frozenset({"job", "data.root", "model.init_from"})
#: The config reads each value of an axis with this many values or fewer. Of more numbers it reads three, which show the
#: type of all.
_FEW = 16


@dataclass(frozen=True)
class CheckedPoint:
    """A point whose config has been checked. ``settings`` are its keys that differ from the defaults."""

    id: str
    values: Mapping[str, Any]
    settings: Mapping[str, Any]

    def changes(self, base: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys in which the config differs from one with these settings."""
        changed = {key: value for key, value in self.settings.items() if key not in base or base[key] != value}
        return changed | {key: _DEFAULTS[key] for key in base if key not in self.settings}


_DEFAULTS: Mapping[str, Any] = {key: configs.value_of(JobConfig(), key) for key in configs.all_keys()}


def settings_of(config: JobConfig) -> dict[str, Any]:
    """Return the keys that differ from the defaults."""
    return {
        key: copy.deepcopy(value)
        for key in configs.all_keys()
        if (value := configs.value_of(config, key)) != _DEFAULTS[key]
    }


def config_of(point: CheckedPoint) -> JobConfig:
    """Return the whole config of a point."""
    config = JobConfig()
    for key, value in point.settings.items():
        configs.put(config, key.split("."), copy.deepcopy(value))
    return config


def identity(settings: Mapping[str, Any]) -> str:
    """Return the id of a point. Defaults are no part of it: a newer version may have more keys."""
    deciding = {key: value for key, value in settings.items() if not is_beside(key)}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:16]


@cache
def is_beside(key: str) -> bool:
    """True if the key does not decide what a run computes.

    Such keys say where it runs, and how it is looked after.
    """
    return any(key == each or (each.endswith(".") and key.startswith(each)) for each in _BESIDE_THE_RESULT)


def checked(
    request: SweepRequest,
    project: Path,
    executor: str,
    waits_for: AfterRecord | None = None,
    before: Sequence[Tried] = (),
    metric: str = "",
) -> Iterator[CheckedPoint]:
    """Yield every point of the request, each once. Raises ConfigError or RequestError for the first that is refused."""
    for key in request.axes:
        if is_beside(key):
            raise RequestError(
                f"{key}: runs that differ in it alone compute the same, so it cannot be swept; give it one value"
            )
    points = request.points(before, metric)
    reader = _PointReader(request, project, executor, waits_for)
    seen = set[str]()
    for values in points:
        point = reader.read(values)
        if point.id not in seen:
            seen.add(point.id)
            yield point


class _PointReader:
    """Reads and checks the config of one point after the other."""

    def __init__(self, request: SweepRequest, project: Path, executor: str, waits_for: AfterRecord | None) -> None:
        self._request, self._project, self._executor, self._waits_for = request, project, executor, waits_for
        self._files = JobFiles(project)
        self._parts = {key: parts_of(key) for key in request.axes}
        first = {key: _first(axis) for key, axis in request.axes.items()}
        # Each value of an axis is read with the first values of the others: it may need them.
        self._config = self._load(first)
        self._origin_is_awaited = self._check(self._config)
        self._typed = {key: self._read_axis(key, axis, first) for key, axis in request.axes.items()}
        prepare.fix_paths(self._config, project)
        self._settings = settings_of(self._config)
        # A swept key may change other keys: where it stands for a section, or a value of the config refers to another.
        is_section = any(is_dataclass(_value_at(self._config, parts)) for parts in self._parts.values())
        layers, _ = configs.merged_layers(request.config, request.fixed, project=project, sweep=True)
        has_references = "${" in json.dumps(layers, default=str)
        self._is_simple = _READ_ANEW.isdisjoint(request.axes) and not is_section and not has_references

    def read(self, values: Values) -> CheckedPoint:
        """Return the point with these values."""
        try:
            # A swept key may change other keys: read the whole config.
            if not self._is_simple:
                config = self._load(values)
                self._check(config)
                prepare.fix_paths(config, self._project)
                settings = settings_of(config)
                shown = {key: _value_at(config, self._parts[key]) for key in values}
                return CheckedPoint(identity(settings), shown, settings)
            shown = {key: self._typed[key](text) for key, text in values.items()}
            for key, value in shown.items():
                configs.put(self._config, self._parts[key], value)
            goes_on = self._origin_is_awaited
            configs.validate(self._config, project=self._project, files=self._files, goes_on=goes_on)
        except ConfigError as error:
            raise ConfigError(f"{error} (at the point {', '.join(f'{k}={v}' for k, v in values.items())})") from None
        settings = dict(self._settings)
        for key in shown:
            # ``params`` is the key that holds the value of ``params.width``.
            parts = self._parts[key]
            names = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
            top = next(name for name in names if name in _DEFAULTS)
            settings[top] = copy.deepcopy(configs.value_of(self._config, top))
            if settings[top] == _DEFAULTS[top]:
                del settings[top]
        return CheckedPoint(identity(settings), shown, settings)

    def _check(self, config: JobConfig) -> bool:
        """Check a whole config. Return whether it begins with the weights of a run that is waited for."""
        goes_on = begins_with(config, self._waits_for)
        prepare.check_submittable(config, self._executor, self._project, goes_on=goes_on)
        if config.cluster.components:
            raise ConfigError(
                "cluster.components: Slurm has no arrays of heterogeneous jobs; submit each point by itself"
            )
        return goes_on

    def _load(self, values: Values) -> JobConfig:
        overrides = [*self._request.fixed, *(f"{key}={text}" for key, text in values.items())]
        return prepare.load(self._request.config, overrides, self._project, sweep=True)

    def _read_axis(self, key: str, axis: Axis, first: Values) -> Any:
        """Return a function that turns an axis's text into the config's value."""

        def read(text: str) -> Any:
            return _value_at(self._load({**first, key: text}), self._parts[key])

        if isinstance(axis, Discrete) and len(axis) <= _FEW:
            known = {axis.at(index): read(axis.at(index)) for index in range(len(axis))}
            return known.__getitem__
        kinds = {type(read(axis.at_share(share))) for share in (0.0, 0.3779, 1 - 1e-9)}
        kind = kinds.pop() if len(kinds) == 1 else None
        is_number = kind in (int, float) and not (isinstance(axis, Discrete) and not isinstance(axis.texts, range))
        if is_number:
            return kind
        cache: dict[str, Any] = {}
        return lambda text: cache[text] if text in cache else cache.setdefault(text, read(text))


def _first(axis: Axis) -> str:
    return axis.at_share(0.0)


def _value_at(config: Any, parts: Sequence[str]) -> Any:
    for part in parts:
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config
