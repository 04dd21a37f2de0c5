"""What a user asks for: a config, the keys to sweep, and how. From arguments, and from a file's section ``sweep``.

Each point is a whole config, checked like that of a run. A point is known by the keys that decide its result.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from yaml import MappingNode, Node, ScalarNode, SequenceNode

from toolkit import config as configs
from toolkit.base.errors import ConfigError, RequestError, did_you_mean
from toolkit.config import JobConfig
from toolkit.config.layers import parts_of, sweep_of
from toolkit.files.run_files import DependencyRecord
from toolkit.plugins.sweep import axes
from toolkit.plugins.sweep.axes import Axis, Tried, Values
from toolkit.run.prepare import new_run as prepare
from toolkit.run.submission.submit import resolve_init_from

#: Keys, and sections with a dot, that do not decide what a run computes: where it runs, and how it is looked after.
#: The same point with more time or memory is the same point.
_BESIDE_THE_RESULT = (
    *("name", "notify.", "retry.", "checkpoint.copy_to", "cluster.time_min", "cluster.mem_gb", "cluster.partition"),
    *("cluster.account", "cluster.qos", "cluster.constraint", "cluster.exclude", "cluster.exclusive"),
    *("cluster.setup", "cluster.extra", "cluster.save_before_limit_s", "cluster.preflight", "cluster.spare_nodes"),
)
#: Processes are started to check this many points: each takes some 10 ms.
_MANY = 200


@dataclass(frozen=True)
class Options:
    """How the points are chosen and run. None: not given."""

    name: str | None = None
    random: int | None = None
    optuna: int | None = None
    seed: int | None = None
    max_running: int | None = None
    metric: str | None = None  #: as in ``checkpoint.keep_best``: with a minus before it if less is better


@dataclass(frozen=True)
class SweepRequest:
    """A sweep as asked for. ``fixed`` are overrides of all points."""

    config: Path
    fixed: Sequence[str]
    axes: Mapping[str, Axis]
    options: Options

    def points(self, before: Sequence[Tried] = (), metric: str = "") -> Iterator[Values]:
        """Return the values of each point: of a grid, of a sample, or those that Optuna adds to ``before``."""
        if not self.axes:
            raise RequestError(
                "a sweep needs a key with several values, such as optim.lr=1e-4,1e-3 or train.seed=0..4; "
                "`toolkit submit` submits a single run"
            )
        random, optuna = self.options.random, self.options.optuna
        if random is not None and optuna is not None:
            raise RequestError("--random: does not go with --optuna; leave one of them out")
        seed = self.options.seed or 0
        if optuna is not None:
            return iter(axes.suggest_points(self.axes, optuna, seed, before, less_is_better=metric.startswith("-")))
        return axes.grid(self.axes) if random is None else axes.sample(self.axes, random, seed)


def read(config: str | Path, overrides: Sequence[str], options: Options) -> SweepRequest:
    """Return the request of a file and of arguments; arguments win. Raises RequestError and ConfigError."""
    path = Path(config)
    found: dict[str, Axis] = {}
    if path.suffix != ".py" and (section := sweep_of(path)) is not None:
        found, options = _of_section(*section, options)
    fixed = []
    for override in overrides:
        key, equals, text = override.partition("=")
        axis = axes.parse(key, text) if equals else None
        found.pop(key, None)  # also a single value replaces what the file sweeps
        if axis is None:
            fixed.append(override)
        else:
            found[key] = axis
    if options.name is not None and not re.fullmatch(r"[\w][\w.-]{0,99}", options.name):
        raise RequestError(f"--name: {options.name!r} cannot be a folder; use letters, digits, -, _ and .")
    if options.max_running is not None and options.max_running < 1:
        raise RequestError(f"--max-running: {options.max_running} runs would never end; use 1 or more")
    return SweepRequest(path, fixed, found, options)


def _of_section(layer: Any, node: Node, options: Options) -> tuple[dict[str, Axis], Options]:
    """Return the axes and options of a section. Options that were given as arguments win."""
    if not isinstance(node, MappingNode):
        raise layer.error(node, "sweep: is a section: give it keys, such as optim.lr: [1e-4, 1e-3]")
    found: dict[str, Axis] = {}
    there: dict[str, Any] = {}
    kinds = {field.name: str(field.type) for field in fields(Options)}
    for key, (key_node, value) in layer.pairs(node).items():
        # A key is an option of the sweep, a key to sweep, or a mistake.
        if key in kinds:
            is_number = "int" in kinds[key]
            text = value.value if isinstance(value, ScalarNode) else ""
            if not text or (is_number and not re.fullmatch(r"\d{1,9}", text)):
                raise layer.error(value, f"sweep.{key}: takes {'a whole number' if is_number else 'a word'}")
            there[key] = int(text) if is_number else str(text)
        elif "." in key or key in configs.all_keys():
            # A YAML list holds the values; a text is read as on the command line.
            if isinstance(value, SequenceNode):
                if not value.value:
                    raise layer.error(value, f"sweep: {key}: an empty list has no value to run")
                found[key] = axes.of_list([_text(layer, item, key) for item in value.value])
            else:
                text = _text(layer, value, key)
                try:
                    axis = axes.parse(key, text)
                except RequestError as error:
                    raise layer.error(value, f"sweep: {error}") from None
                found[key] = axes.of_list([text]) if axis is None else axis
        else:
            hint = did_you_mean(key, [*kinds, *configs.all_keys()])
            raise layer.error(
                key_node,
                f"sweep: {key!r} is neither a key of the config nor one of {', '.join(kinds)}; {hint}".rstrip("; "),
            )
    given = {name: value for name in kinds if (value := getattr(options, name)) is not None}
    return found, replace(options, **{**there, **given})


def _text(layer: Any, node: Node, key: str) -> str:
    """Return a value as text that YAML reads back as the same value."""
    if not isinstance(node, ScalarNode):
        raise layer.error(node, f"sweep: {key}: takes single values; put a list as a value in quotes: '[1, 2]'")
    is_plain = node.style is None or (node.style in "'\"" and str(node.value)[:1] in "[{")
    return str(node.value) if is_plain else "'" + str(node.value).replace("'", "''") + "'"


@dataclass(frozen=True)
class CheckedPoint:
    """A point whose config has been checked. ``values`` are those of the swept keys, as the config has read them."""

    id: str
    values: Mapping[str, Any]
    config: JobConfig


def check_points(
    request: SweepRequest,
    project: Path,
    executor: str,
    waits_for: DependencyRecord | None = None,
    before: Sequence[Tried] = (),
    metric: str = "",
) -> list[CheckedPoint]:
    """Return every point of the request, each once. Raises ConfigError or RequestError for the first refused one."""
    for key in request.axes:
        if _is_beside(key):
            raise RequestError(
                f"{key}: runs that differ in it alone compute the same, so it cannot be swept; give it one value"
            )
    check = partial(_check_point, request, project, executor, waits_for)
    # What the first one warns of the others do not say again.
    points = request.points(before, metric)
    found = [check(texts) for texts in islice(points, 1)]
    left = list(points)
    if len(left) < _MANY:
        found += map(check, left)
    else:
        with ProcessPoolExecutor(min(8, len(os.sched_getaffinity(0))), get_context("fork")) as pool:
            found += pool.map(check, left, chunksize=20)
    unique: dict[str, CheckedPoint] = {}
    for point in found:
        unique.setdefault(point.id, point)
    return list(unique.values())


def _check_point(
    request: SweepRequest, project: Path, executor: str, waits_for: DependencyRecord | None, texts: Values
) -> CheckedPoint:
    overrides = [f"{key}={text}" for key, text in texts.items()]
    try:
        config = prepare.load(request.config, [*request.fixed, *overrides], project, sweep=True)
        is_resume = resolve_init_from(config, waits_for)
        prepare.check_submittable(config, executor, project, is_resume=is_resume)
    except ConfigError as error:
        raise ConfigError(f"{error} (at the point {', '.join(overrides)})") from None
    if config.cluster.components:
        raise ConfigError("cluster.components: Slurm has no arrays of heterogeneous jobs; submit each point by itself")
    values = {}
    for key in texts:
        value: Any = config
        for part in parts_of(key):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        values[key] = value
    prepare.fix_paths(config, project)
    return CheckedPoint(_identity(config), values, config)


def _identity(config: JobConfig) -> str:
    """Return the id of a point. Defaults are no part of it: a newer version may have more keys."""
    defaults = _defaults()
    deciding = {
        key: value
        for key in defaults
        if (value := configs.value_of(config, key)) != defaults[key] and not _is_beside(key)
    }
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:16]


@cache
def _defaults() -> dict[str, Any]:
    return {key: configs.value_of(JobConfig(), key) for key in configs.all_keys()}


def _is_beside(key: str) -> bool:
    return any(key == each or (each.endswith(".") and key.startswith(each)) for each in _BESIDE_THE_RESULT)
