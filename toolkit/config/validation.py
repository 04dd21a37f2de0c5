"""Every check of a config that can be made before anything is queued."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from toolkit import registry
from toolkit.base import fsio, secret_values
from toolkit.base.errors import ConfigError, DataMissingError
from toolkit.config.catalog import check_datasets, data_root
from toolkit.config.combinations import check_batch, check_combinations
from toolkit.config.hints import hints_of, limits_of
from toolkit.config.job_module import JobFiles
from toolkit.config.schema import FIXED_ON_RESUME, FOREIGN_JOB, JobConfig, all_keys, value_of
from toolkit.config.script_arguments import NEWEST
from toolkit.config.strategy import STATELESS
from toolkit.files import origin, rundir
from toolkit.slurm import container


def validate(
    config: JobConfig,
    *,
    ranks: int | None = None,
    login_node: bool = True,
    project: Path | None = None,
    goes_on: bool = False,
    files: JobFiles | None = None,
) -> None:
    """Refuse what cannot work, before anything is queued. Raises ConfigError or DataMissingError with the remedy.

    ``ranks`` is the number of ranks that an allocation really has; None computes it from ``cluster``.
    ``login_node=False`` leaves out what the submitting side checks of its request: GPUs, and the programs and folders
    that it names. ``project`` is the folder that holds the job, the current one if None. A run that ``goes_on`` (a
    resume) needs no first weights: they may be gone. ``files`` remembers the jobs' files from one call to the next.
    """
    try:
        _validate(config, ranks, login_node, files or JobFiles(project), goes_on)
    except OSError as error:  # from a path, for example a name that is too long
        path = str(error.filename)
        # Name the key whose value is the longest part of the path.
        candidates = [(0, "a path")]
        for key in all_keys():
            value = value_of(config, key)
            for part in value if isinstance(value, list) else [value]:
                text = str(part or "")
                # The name of a module is a path with dots.
                if text and (text in path or text.replace(".", "/") in path):
                    candidates.append((len(text), key))
        raise ConfigError(f"{max(candidates)[1]}: {path[:200]}: {error.strerror}") from None


def _validate(config: JobConfig, ranks: int | None, login_node: bool, files: JobFiles, goes_on: bool) -> None:
    _check_values(config)
    if login_node:
        check_places(config)
    if config.job == FOREIGN_JOB:  # the script itself is responsible for the rest
        if any("{newest" in NEWEST.sub("", word) for word in config.on_restart):
            raise ConfigError("on_restart: the newest file that matches a pattern is {newest:ckpt/*.pt}, for example")
        return
    if config.on_restart:
        raise ConfigError("on_restart: is for scripts under `toolkit exec`; any other run goes on without being told")
    if not files.is_loop(config.job):
        # A job with its own loop checks its own config.
        files.check(config)
        for key in ("argv", "args"):
            if value_of(config, key):
                raise ConfigError(
                    f"{key}: arguments are for a script with a loop of its own, and {config.job} is none: give it keys "
                    "of its own, params.NAME=VALUE, with a class Params (docs/config.md)"
                )
        if config.strategy.name == "dp" and (ranks or config.cluster.nodes * config.cluster.tasks_per_node) > 1:
            raise ConfigError(
                "strategy.name: dp is one process with all GPUs of a node; use ddp, or set cluster.nodes and "
                "cluster.tasks_per_node to 1"
            )
        # A run that has begun needs no first weights.
        if config.model.init_from is not None and not goes_on and rundir.RUN_DIR_VARIABLE not in os.environ:
            origin.find(config.model.init_from)
        ranks = ranks or config.cluster.nodes * config.cluster.tasks_per_node
        check_batch(config, ranks)
        check_datasets(config.data)
        if login_node and config.data.root is not None and not data_root(config.data.root).is_dir():
            raise DataMissingError(f"data.root: there is no folder {data_root(config.data.root)}")
    if login_node and config.dist.backend == "nccl" and config.cluster.gpus_per_node == 0:
        raise ConfigError(
            "dist.backend: nccl needs GPUs, and cluster.gpus_per_node is 0; set cluster.gpus_per_node, "
            "or dist.backend to auto or gloo"
        )


def check_change(then: JobConfig, now: JobConfig) -> None:
    """Refuse a change that a run cannot continue with. Raises ConfigError with every such key."""
    keys = [key for key in FIXED_ON_RESUME if not goes_on_with(key, value_of(then, key), value_of(now, key))]
    if then.name != now.name:
        keys.insert(0, "name")
    if keys:
        changed = "; ".join(f"{key} was {value_of(then, key)!r}, not {value_of(now, key)!r}" for key in keys)
        raise ConfigError(
            f"a run cannot go on with another {keys[0]}: {changed}. Set {'them' if len(keys) > 1 else 'it'} back, or "
            f"start a new run with `toolkit submit` (fixed: name, {', '.join(FIXED_ON_RESUME)})"
        )


def goes_on_with(key: str, then: Any, now: Any) -> bool:
    """True if a run that had the value ``then`` may have ``now``. Strategies that keep the same state may change."""
    if then == now or key not in ("strategy.name", "strategy.compression"):
        return bool(then == now)
    alike = STATELESS if key == "strategy.compression" else registry.with_trait("same_state")
    return then in alike and now in alike


def _check_values(config: JobConfig) -> None:
    secret_values.check_form(config.secrets)  # before the others, whose errors show values
    check_section(config)
    for name in config.args:
        if not re.fullmatch(r"[^\W_][^\s=]*", name):
            raise ConfigError(f"args.{name}: give the option's name without the dashes before it: args.epochs=3")
    check_combinations(config)


def check_section(section: Any, prefix: str = "") -> None:
    """Refuse values that a section's annotations do not allow, and then what it refuses itself. Raises ConfigError.

    The same is done with the sections in it. Their own checks rely on the values of single keys.
    """
    kind: Any = type(section)
    for key, limits in limits_of(kind).items():
        value = value_of(section, key)
        for limit in limits:
            limit.check(prefix + key, value)
    for name in _checked(kind):
        value_of(section, name).check()
    if hasattr(section, "check"):
        section.check()


@cache
def _checked(schema: Any, prefix: str = "") -> tuple[str, ...]:
    """Return the dotted names of the sections in a section that have a check of their own."""
    found: list[str] = []
    for name, hint in hints_of(schema).items():
        if is_dataclass(hint):
            found += _checked(hint, f"{prefix}{name}.")  # type: ignore[arg-type]
            found += [f"{prefix}{name}"] if hasattr(hint, "check") else []
    return tuple(found)


def check_places(config: JobConfig) -> None:
    """Refuse a missing program, secret or folder, and one that cannot be written. Raises ConfigError.

    Only the login node is asked: the compute nodes may see other files.
    """
    secret_values.check_sources(config.secrets)
    if config.cluster.container is not None:
        container.refuse_missing(config.cluster.container)
    for folder in config.cluster.container_mounts:
        if not fsio.expand(folder).is_dir():
            raise ConfigError(f"cluster.container_mounts: there is no folder {folder}")
    if config.notify and shutil.which(config.notify[0]) is None:
        raise ConfigError(
            f"notify: there is no program {config.notify[0]!r}; give its path, or [sh, -c, 'LINE'] for a shell's"
        )
    if config.checkpoint.copy_to is not None:
        copy_to = fsio.expand(config.checkpoint.copy_to)
        there = next(path for path in (copy_to, *copy_to.parents) if path.exists())
        # Create a folder there: permissions do not show that a disk is read-only, full or /proc.
        try:
            with tempfile.TemporaryDirectory(prefix=".toolkit-", dir=there):
                pass
        except OSError as error:
            raise ConfigError(f"checkpoint.copy_to: {copy_to} cannot be written: {there}: {error.strerror}") from None
