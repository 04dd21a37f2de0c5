"""Every check of a config that can be made before anything is queued."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit import fsio, origin, rundir, secret_values
from toolkit.config.catalog import check_datasets, data_root
from toolkit.config.cluster_checks import check_cluster
from toolkit.config.data_checks import check_data
from toolkit.config.hints import limits_of
from toolkit.config.job_module import JobFiles
from toolkit.config.optim_checks import check_optim
from toolkit.config.params import leaves
from toolkit.config.places import check_places
from toolkit.config.ranks import check_batch
from toolkit.config.schema import (
    FIXED_ON_RESUME,
    FOREIGN_JOB,
    STATELESS,
    STEPS,
    TENSOR_STYLES,
    JobConfig,
    MeshConfig,
    StrategyConfig,
    all_keys,
    value_of,
)
from toolkit.config.script_arguments import NEWEST
from toolkit.config.strategy_traits import SAME_STATE
from toolkit.config.update_checks import check_compression, check_step
from toolkit.config.words import is_one_line, tensor_style
from toolkit.errors import ConfigError, DataMissingError


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
    check_cluster(config)
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
    alike: tuple[Any, ...] = {"strategy.name": SAME_STATE, "strategy.compression": STATELESS}.get(key, ())
    return bool(then == now or (then in alike and now in alike))


def _check_values(config: JobConfig) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", config.name):
        raise ConfigError(
            f"name: {config.name!r} names a folder: 100 letters, digits, . _ - at most, the first a letter or a digit; "
            "without the key it is the config file's name"
        )
    secret_values.check_form(config.secrets)  # before the others, whose errors show values
    # Single words and numbers first: the checks below rely on them.
    for key, limit in limits_of(JobConfig).items():
        limit.check(key, value_of(config, key))
    _check_texts(config)
    _check_options(config.args)
    for key in ("optim.momentum", "strategy.local_sgd.outer_momentum"):
        if value_of(config, key) == 1:
            raise ConfigError(f"{key}: 1 never forgets anything; use less than 1, such as 0.9")
    # Then keys that depend on each other.
    _check_strategy(config.strategy)
    _check_local_sgd(config)
    _check_custom(config)
    if config.checkpoint.keep < 2:
        raise ConfigError(
            f"checkpoint.keep: {config.checkpoint.keep} is refused: if the only checkpoint turns out damaged, nothing "
            "is left to resume from; use 2 or more"
        )
    if config.notify and not config.notify[0]:
        raise ConfigError(
            f"notify: {config.notify!r} is no command: a list of a program and its arguments, such as "
            "[mail, -s, done, me@example.org]"
        )
    if config.checkpoint.keep_best is not None and not re.fullmatch(r"-?[^\s-].*", config.checkpoint.keep_best):
        raise ConfigError(
            f"checkpoint.keep_best: {config.checkpoint.keep_best!r} is no metric: give its name as in TensorBoard, "
            "such as eval/accuracy, with a minus before it (-eval/loss) if less is better"
        )
    copy_to = config.checkpoint.copy_to
    if copy_to is not None and not fsio.expand(copy_to).is_absolute():
        raise ConfigError(
            f"checkpoint.copy_to: {copy_to!r} is relative, and ranks run elsewhere: give an absolute path"
        )
    stage_dir = config.cluster.stage_dir
    if stage_dir is not None and not fsio.expand(stage_dir).is_absolute():
        raise ConfigError(f"cluster.stage_dir: {stage_dir!r} is relative: give an absolute path on each node")
    check_data(config)
    check_step(config.train, config.strategy)
    check_optim(config)
    _check_every("train.eval_every", config.train.eval_every, "epoch")
    for key in ("checkpoint.every_steps", "checkpoint.memory_every_steps"):
        if (every := value_of(config, key)) is not None:
            _check_every(key, every, "auto")
    check_compression(config)


#: Control characters that keys may contain besides: their words are for a shell or a program.
_ALSO = {"cluster.setup": "\t", **dict.fromkeys(("notify", "params", "argv", "args", "on_restart"), "\t\r\n")}
_PATHS = (
    *("cluster.container_mounts", "cluster.stage_dir", "data.stage", "data.root"),
    *("model.init_from", "checkpoint.copy_to"),
)


def _check_options(options: Mapping[str, Any]) -> None:
    for name in options:
        if not re.fullmatch(r"[^\W_][^\s=]*", name):
            raise ConfigError(f"args.{name}: give the option's name without the dashes before it: args.epochs=3")


def _check_texts(config: JobConfig) -> None:
    """Refuse control characters: a line break would start a new line in the job's script."""
    for key in all_keys():
        value = value_of(config, key)
        if value is None or value == {} or value == [] or isinstance(value, (int, float)):  # no texts, of most keys
            continue
        also = _ALSO.get(key, "")
        # Name each word of a list or a mapping in the error.
        words = {key: value}
        if isinstance(value, list):
            words = {f"{key}[{index}]": word for index, word in enumerate(value)}
        elif key == "params":
            words = {name: word if isinstance(word, str) else repr(word) for name, word in leaves(value)}
        elif isinstance(value, dict):
            words = {f"{key}.{name}": f"{name}{word}" for name, word in value.items()}
        for full, word in words.items():
            if isinstance(word, str) and not ((word.strip() or also) and is_one_line(word, also)):
                raise ConfigError(f"{full}: {word!r} is empty or holds a line break or another control character")
            if key in _PATHS and isinstance(word, str):
                # Paths must be such that the system can look them up.
                try:
                    Path(word).expanduser().exists()
                except RuntimeError:
                    raise ConfigError(f"{full}: there is no user whose home folder {word!r} could be in") from None
                except OSError as error:
                    raise ConfigError(f"{full}: {word!r} cannot be looked for: {error.strerror}") from None


def _check_strategy(strategy: StrategyConfig) -> None:
    """Refuse keys that the chosen strategy does not use, instead of ignoring them silently."""
    if strategy.cpu_offload and strategy.name != "fsdp":
        raise ConfigError(
            f"strategy.cpu_offload: only fsdp lets go of the weights between blocks, and strategy.name is "
            f"{strategy.name}; use fsdp, or set it to false"
        )
    if strategy.prefetch_blocks != 1 and strategy.name not in ("fsdp", "zero"):
        raise ConfigError(
            f"strategy.prefetch_blocks: only fsdp and zero gather weights, and strategy.name is {strategy.name}; leave "
            "it at 1"
        )
    if strategy.name == "auto" and strategy.mesh != MeshConfig():
        raise ConfigError("strategy.mesh: auto lays out the ranks itself; leave the mesh at null, or name a strategy")
    for key in ("tensor_plan", "sequence_parallel"):
        if getattr(strategy, key) and strategy.name != "tensor":
            raise ConfigError(f"strategy.{key}: only strategy.name tensor cuts layers; use it, or leave this key out")
    for pattern, style in strategy.tensor_plan.items():
        tensor_style(f"strategy.tensor_plan: {pattern}", style, TENSOR_STYLES)


def _check_local_sgd(config: JobConfig) -> None:
    local, every = config.strategy.local_sgd, config.checkpoint.every_steps
    is_between = not isinstance(every, int) or every % local.round_steps != 0 or config.checkpoint.every_min is not None
    if config.strategy.name == "local_sgd" and config.retry.allow_fewer_nodes and is_between:
        raise ConfigError(
            "retry.allow_fewer_nodes: with local_sgd fewer ranks go on from the end of a round only, and checkpoints "
            f"would be made inside of rounds, too; set checkpoint.every_steps to a multiple of {local.round_steps} "
            "(strategy.local_sgd.round_steps) and checkpoint.every_min to null"
        )


def _check_custom(config: JobConfig) -> None:
    """Refuse keys that the job's own step would ignore."""
    if config.strategy.name != "custom":
        return
    defaults = JobConfig()
    for key in (
        "model.freeze",
        "strategy.activation_checkpointing",
        "train.accumulate",
        "train.compile",
        "train.precision",
    ):
        if value_of(config, key) != value_of(defaults, key):
            raise ConfigError(
                f"{key}: the step of {config.job} is its own (strategy.name: custom), and it would have to do this "
                f"itself; leave it at {value_of(defaults, key)!r}"
            )


def _check_every(key: str, value: int | str, word: str) -> None:
    if value != word and not (isinstance(value, int) and 1 <= value <= STEPS):
        raise ConfigError(f"{key}: {value!r} is not a number of steps (1 or more) or {word!r}")
