"""The configuration: dataclasses, how the layers merge, and every check that can be made before anything is queued.

Layers, later ones win: the defaults below, the site's defaults (``$TOOLKIT_SITE`` or
``~/.config/toolkit/site.yaml``), the file that ``extends:`` names, the file itself, ``key=value`` arguments.
Nothing here imports torch or the job: a config is checked on the login node in well under a second.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toolkit import origin, rundir
from toolkit.cluster import container
from toolkit.errors import ConfigError, nearest

DATASETS = ("digits", "mnist", "fashion_mnist", "cifar10", "image_folder", "synthetic", "text")
BACKENDS = ("auto", "nccl", "gloo", "mpi")
STRATEGIES = (
    *("ddp", "fsdp", "zero", "tensor", "pipeline", "parameter_server", "local_sgd", "dp", "auto"),
    "custom",
)
COMPRESSIONS = ("none", "fp16", "bf16", "int8", "topk", "powersgd")
SERVER_MODES = ("sync", "async", "bounded")
PIPELINE_SCHEDULES = ("1f1b", "gpipe", "interleaved")
OUTER_STEPS = ("average", "diloco")
#: What a pattern of ``strategy.tensor_plan`` may stand for: see strategies/plan.py.
TENSOR_STYLES = ("colwise", "gathered", "rowwise", "sequence")
OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "linear", "cosine")
PRECISIONS = ("fp32", "bf16", "fp16")
BAD_SAMPLES = ("fail", "skip")
SHARES = ("even", "auto")
SPLITS = ("global", "blocks", "hash")
#: Strategies whose ranks compute a step up to its backward pass before they wait for each other.
OWN_TIME = ("ddp",)
#: ``job`` of a run whose ranks are somebody else's script: `toolkit exec`.
FOREIGN_JOB = "toolkit.launch.foreign"


@dataclass
class ClusterConfig:
    """The size of the job and how to ask Slurm for it; inside an allocation the allocation's own size wins."""

    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    gpu_type: str | None = None
    mem_gb: float | None = None
    time_min: int = 30
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    exclusive: bool = False
    spare_nodes: int = 0
    signal_delay_s: int = 120
    preflight: bool = True
    setup: list[str] = field(default_factory=list)
    container: str | None = None  #: an image in which the ranks run, see cluster/container.py
    container_mounts: list[str] = field(default_factory=list)  #: more folders that they see
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class RetryConfig:
    """How often the supervisor starts again what failed."""

    max_failures: int = 4
    max_requeues: int = 100
    no_progress_attempts: int = 2
    allow_fewer_nodes: bool = False


@dataclass
class DistConfig:
    """The process group."""

    backend: str = "auto"
    timeout_s: int = 600


@dataclass
class MeshConfig:
    """How many ways each kind of parallelism goes; their product is the number of ranks. ``null``: what is left."""

    replicas: int | None = None  #: copies of the model, each with samples of its own
    shards: int | None = None  #: parts of each weight that the ranks of a copy keep: fsdp's
    tensor: int | None = None  #: ranks that compute a layer together
    stages: int | None = None  #: parts of the model that follow each other: a pipeline's


@dataclass
class ParameterServerConfig:
    """Of ``strategy.name: parameter_server``: the first ranks are servers, the others workers."""

    servers: int = 1
    mode: str = "sync"  #: async: each worker's gradient is applied as it comes; bounded: within limits, see staleness
    staleness: int = 4  #: with bounded: so many shares a worker may be ahead of the slowest


@dataclass
class PipelineConfig:
    """How micro-batches go through the stages of a pipeline."""

    schedule: str = "1f1b"  #: gpipe keeps the activations of all micro-batches; interleaved idles less and sends more
    micro_batches: int | None = None  #: parts of a pipeline's samples; null: four for each rank of it, if so many fit
    split: list[str] = field(default_factory=list)  #: the layer that each stage but the first begins with; empty: even
    stages_per_rank: int = 2  #: with interleaved


@dataclass
class LocalSgdConfig:
    """How often the ranks of ``strategy.name: local_sgd`` meet, and what they make of their weights then."""

    round_steps: int = 8  #: steps that each rank makes by itself
    after_steps: int = 0  #: steps of ordinary ddp before the first round
    outer: str = "average"  #: the mean of the weights; diloco: a step of an outer SGD towards it
    outer_lr: float = 0.7  #: of diloco
    outer_momentum: float = 0.9


@dataclass
class StrategyConfig:
    """How the ranks share the work."""

    name: str = "ddp"  #: see docs/strategies.md
    compression: str = "none"  #: of ddp's gradients, for slow links
    compression_ratio: float = 0.01  #: topk: the part of the values that is sent
    compression_rank: int = 4  #: powersgd
    compression_layers: dict[str, Any] = field(default_factory=dict)  #: pattern of parameters: ratio, rank or none
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    local_sgd: LocalSgdConfig = field(default_factory=LocalSgdConfig)
    activation_checkpointing: bool = False  #: compute a block's activations again in the backward pass, to save memory
    cpu_offload: bool = False  #: fsdp: weights, gradients and optimizer state in host memory, the update on the CPU
    tensor_plan: dict[str, str] = field(default_factory=dict)  #: layer: how it is cut; empty: the model's own plan
    sequence_parallel: bool = False  #: tensor: between the layers that are cut a rank has a part of each sequence
    parameter_server: ParameterServerConfig = field(default_factory=ParameterServerConfig)


@dataclass
class DataConfig:
    """What to train on. ``root: null`` means ``$TOOLKIT_DATA``, or ``./data``; for text, Python's standard library."""

    name: str = "digits"
    root: str | None = None
    global_batch_size: int = 64
    workers: int = 0
    augment: bool = False
    image_size: int | None = None
    bad_samples: str = "fail"  #: skip: a training sample that cannot be loaded is replaced by another one, and listed
    max_bad_samples: int = 100  #: with skip; more of them in the whole run end it
    share: str = "even"  #: auto: slower ranks get fewer samples of each global batch
    split: str = "global"  #: blocks or hash: each rank reads the same part of the data set for the whole run


@dataclass
class ModelConfig:
    """What to train. ``init_from``: where a new run's weights come from, see origin.py."""

    name: str = "mlp"
    init_from: str | None = None


@dataclass
class OptimConfig:
    """The optimizer and its learning rate as a function of the step."""

    name: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 0


@dataclass
class PruningConfig:
    """Weights that are set to 0 for good: the smallest ones, more and more of them, see docs/steps.md."""

    amount: float = 0.0  #: the part of the weights that is 0 in the end, from 0 (nothing is pruned) to below 1
    structured: bool = False  #: whole outputs of a layer, by their norm, instead of single weights
    start_step: int = 0
    end_step: int | None = None  #: when ``amount`` is reached
    every_steps: int = 100


@dataclass
class TrainConfig:
    """How long, how precisely and how talkatively to train."""

    epochs: int = 10
    max_steps: int | None = None
    seed: int = 0
    precision: str = "fp32"
    accumulate: int = 1
    compile: bool = False
    deterministic: bool = False
    log_every: int = 20
    eval_every: int | str = "epoch"
    clip_norm: float | None = None  #: the largest norm of a step's gradient, over all parameters
    skip_bad_steps: bool = False  #: leave out a step whose gradient is not finite, and list its samples
    spike_factor: float | None = None  #: and one whose gradient's norm is so many times its moving average
    rollback_after: int | None = None  #: after so many left out in a row, back to the last checkpoint's weights
    ema_decay: float | None = None  #: keep a moving average of the weights, and evaluate that
    channels_last: bool = False  #: lay out images and convolutions with the channels last
    pruning: PruningConfig = field(default_factory=PruningConfig)


@dataclass
class CheckpointConfig:
    """When to save, and how many checkpoints to keep."""

    every_steps: int | str | None = 200  #: auto: as often as pays, by time; null: by time only, see every_min
    every_min: float | None = None  #: as well: when so many minutes have passed since the last save
    keep: int = 2  #: so many of the newest
    keep_every: int | None = None  #: and each whose step this number divides
    keep_best: str | None = None  #: and the best by this metric: eval/accuracy, or -eval/loss where less is better
    copy_to: str | None = None  #: a second folder for them, on another disk
    background: bool = True  #: write while the training goes on; takes host memory for a copy of what a rank writes


@dataclass
class JobConfig:
    """A whole job; each component is handed its own section, never this."""

    name: str = "run"
    job: str = "jobs.classify"
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    notify: list[str] = field(default_factory=list)  #: a command that is called at the run's end, see launch/notify.py


# ---------------------------------------------------------------------------------------------------------- loading


def load_config(path: str | Path | None, overrides: Sequence[str] = (), *, site: bool = True) -> JobConfig:
    """Read ``path`` with what it extends, merge the layers and return the typed config.

    Without a path the layers are defaults, site and overrides. ``overrides`` are ``key=value`` with dotted keys and
    YAML values. Keys, types and values are checked; whether the config fits a machine is the business of
    :func:`validate`. Raises ConfigError.
    """
    files = [] if path is None else _file_layers(Path(path), ())
    layers: list[tuple[str, Any]] = [*_site_layer(site), *files, *_override_layers(overrides)]
    merged = OmegaConf.structured(JobConfig() if path is None else JobConfig(name=Path(path).stem))
    for source, layer in layers:
        _check_keys(layer, JobConfig, source)
        try:
            merged = OmegaConf.merge(merged, layer)
        except OmegaConfBaseException as error:
            raise _type_error(error, source) from None
    return _typed(merged)


def dump_config(config: JobConfig) -> str:
    """The config as YAML that :func:`load_config` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


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


def all_keys(schema: Any = JobConfig, prefix: str = "") -> list[str]:
    """Every dotted key that a config can hold."""
    keys: list[str] = []
    for f in fields(schema):
        if is_dataclass(f.default_factory):
            keys += all_keys(f.default_factory, f"{prefix}{f.name}.")
        else:
            keys.append(f"{prefix}{f.name}")
    return keys


def _type_error(error: OmegaConfBaseException, source: str) -> ConfigError:
    message = str(error.msg or error).split("\n")[0]
    return ConfigError(f"{source}: {error.full_key or '?'}: {message}")


# ------------------------------------------------------------------------------------------------------- validation


def validate(
    config: JobConfig, *, ranks: int | None = None, login_node: bool = True, project: Path | None = None
) -> None:
    """Refuse what cannot work, before anything is queued. Raises ConfigError or DataMissingError with the remedy.

    ``ranks`` is the number of ranks that an allocation really has; None takes it from ``cluster``. ``login_node=False``
    leaves out the checks for GPUs that only the submitting side makes of its request. ``project`` is the folder that
    holds the job, the current one if None.
    """
    _check_values(config)
    _check_cluster(config)
    if config.job == FOREIGN_JOB:  # the rest is the script's own business
        return
    _check_job(config, project)
    if config.strategy.name == "dp" and (ranks or config.cluster.nodes * config.cluster.tasks_per_node) > 1:
        raise ConfigError(
            "strategy.name: dp is one process with all GPUs of a node; use ddp, or set cluster.nodes and "
            "cluster.tasks_per_node to 1"
        )
    goes_on = rundir.RUN_DIR_VARIABLE in os.environ  # then the first weights may be gone
    if config.model.init_from is not None and not goes_on:
        origin.find(config.model.init_from)
    ranks = ranks or config.cluster.nodes * config.cluster.tasks_per_node
    check_batch(config, ranks)
    check_compiled(config.strategy, config.train, ranks)
    if login_node and config.dist.backend == "nccl" and config.cluster.gpus_per_node == 0:
        raise ConfigError(
            "dist.backend: nccl needs GPUs, and cluster.gpus_per_node is 0; set cluster.gpus_per_node, "
            "or dist.backend to auto or gloo"
        )
    if login_node and config.cluster.container is not None:
        container.refuse_missing(config.cluster.container)
    from toolkit.data.catalog import check_datasets

    check_datasets(config.data)


def _one_of(key: str, value: str, valid: Iterable[str]) -> None:
    names = list(valid)
    if value not in names:
        shown = ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:12])} and {len(names) - 12} more"
        raise ConfigError(f"{key}: there is no {value!r}; {nearest(value, names)}valid: {shown}")


def _at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and not least <= value < math.inf:  # also refuses NaN
        raise ConfigError(f"{key}: {value} is refused; it must be a number of {least} or more")


def _check_values(config: JobConfig) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", config.name):
        raise ConfigError(f"name: {config.name!r} names a folder: letters, digits, . _ - only, starting with neither")
    _one_of("strategy.name", config.strategy.name, STRATEGIES)
    _one_of("strategy.compression", config.strategy.compression, COMPRESSIONS)
    _one_of("strategy.parameter_server.mode", config.strategy.parameter_server.mode, SERVER_MODES)
    _one_of("dist.backend", config.dist.backend, BACKENDS)
    _one_of("data.name", config.data.name, DATASETS)
    _one_of("data.bad_samples", config.data.bad_samples, BAD_SAMPLES)
    _one_of("data.share", config.data.share, SHARES)
    _one_of("data.split", config.data.split, SPLITS)
    _one_of("optim.name", config.optim.name, OPTIMIZERS)
    _one_of("optim.schedule", config.optim.schedule, SCHEDULES)
    _one_of("train.precision", config.train.precision, PRECISIONS)
    _one_of("strategy.pipeline.schedule", config.strategy.pipeline.schedule, PIPELINE_SCHEDULES)
    for key, least in _LEAST.items():
        _at_least(key, value_of(config, key), least)
    _check_strategy(config.strategy)
    _check_local_sgd(config)
    _check_custom(config)
    if config.checkpoint.keep < 2:
        raise ConfigError(
            f"checkpoint.keep: {config.checkpoint.keep} is refused: if the only checkpoint turns out damaged, nothing "
            "is left to resume from; use 2 or more"
        )
    if (config.notify and not config.notify[0]) or any("\0" in word for word in config.notify):
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
    if copy_to is not None and not Path(copy_to).expanduser().is_absolute():
        raise ConfigError(
            f"checkpoint.copy_to: {copy_to!r} is relative, and ranks run elsewhere: give an absolute path"
        )
    _check_parts(config)
    check_step(config.train, config.strategy)
    if config.train.skip_bad_steps and config.optim.name == "sgd" and config.strategy.name in SHARDED:
        raise ConfigError(
            f"train.skip_bad_steps: torch's sgd cannot leave out a step of weights sharded by {config.strategy.name}; "
            "use optim.name adam or adamw, or strategy.name ddp"
        )
    _check_every("train.eval_every", config.train.eval_every, "epoch")
    if config.checkpoint.every_steps is not None:
        _check_every("checkpoint.every_steps", config.checkpoint.every_steps, "auto")
    _check_compression(config)


def _check_compression(config: JobConfig) -> None:
    strategy, kind = config.strategy, config.strategy.compression
    if kind != "none" and strategy.name != "ddp":
        raise ConfigError(
            f"strategy.compression: {kind} goes with strategy.name: ddp only, whose gradients lie whole on every rank; "
            f"with {strategy.name} set it to none"
        )
    if kind != "none" and config.train.precision not in ("fp32", "bf16"):
        raise ConfigError(
            f"strategy.compression: {kind} needs gradients whose scale stays the same; with train.precision: "
            f"{config.train.precision} set it to none, or train in bf16"
        )
    if kind not in STATELESS and config.train.spike_factor is not None:
        raise ConfigError(
            f"train.spike_factor: with strategy.compression: {kind} a part of what a step left out is added to later "
            "ones; leave it out, or use bf16"
        )
    if kind == "none" and strategy.compression_layers:
        raise ConfigError(
            "strategy.compression_layers: nothing is compressed; set strategy.compression, or leave it {}"
        )
    _check_ratio("strategy.compression_ratio", strategy.compression_ratio)
    for pattern, value in strategy.compression_layers.items():
        _check_layer(f"strategy.compression_layers: {pattern}", kind, value)


def _check_ratio(key: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ConfigError(f"{key}: {value} is refused; it is the part of the values that is sent: above 0, 1 at most")


def _check_layer(key: str, kind: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value == "none":
        return
    if kind == "topk" and number:
        _check_ratio(key, value)
    elif not (kind == "powersgd" and isinstance(value, int) and number and value >= 1):
        valid = {"topk": "the part of the values that is sent, such as 0.05, or none"}
        valid["powersgd"] = "a rank of 1 or more, or none"
        raise ConfigError(f"{key}: {value!r} is refused; with {kind} it is {valid.get(kind, 'none, or not listed')}")


def check_step(train: TrainConfig, strategy: StrategyConfig) -> None:
    """Refuse what cannot be done between the gradients and the weights of a step, by itself or with this strategy."""
    for key in ("spike_factor", "rollback_after"):
        if getattr(train, key) is not None and not train.skip_bad_steps:
            raise ConfigError(f"train.{key}: nothing is left out without train.skip_bad_steps: true; set that, too")
    if train.ema_decay is not None and not 0 < train.ema_decay < 1:
        raise ConfigError(f"train.ema_decay: {train.ema_decay} is refused; between 0 and 1, such as 0.999")
    if strategy.name not in WHOLE_UPDATE:
        clips = strategy.name == "local_sgd"  # each rank's gradient by its own norm
        for key in ("skip_bad_steps", "ema_decay") if clips else ("clip_norm", "skip_bad_steps", "ema_decay"):
            if getattr(train, key):
                raise ConfigError(f"train.{key}: does not go with strategy.name {strategy.name}; leave it out")
        if train.pruning.amount:
            raise ConfigError(f"train.pruning: does not go with strategy.name {strategy.name}; leave it out")
    if train.precision == "fp16" and strategy.name != "ddp":
        raise ConfigError(f"train.precision: fp16 goes with strategy.name ddp only, not {strategy.name}; use bf16")
    if train.channels_last and strategy.name != "ddp":
        raise ConfigError(
            f"train.channels_last: goes with strategy.name ddp only, not {strategy.name}; set it to false"
        )
    _check_pruning(train.pruning)


def _check_pruning(pruning: PruningConfig) -> None:
    if not 0 <= pruning.amount < 1:
        raise ConfigError(f"train.pruning.amount: {pruning.amount} is refused; from 0 to below 1, such as 0.8")
    if not pruning.amount:
        return
    if pruning.end_step is None:
        raise ConfigError("train.pruning.end_step: say in which step train.pruning.amount is to be reached")
    if pruning.end_step < pruning.start_step:
        raise ConfigError(
            f"train.pruning.end_step: {pruning.end_step} is before train.pruning.start_step {pruning.start_step}"
        )


def _check_strategy(strategy: StrategyConfig) -> None:
    """Keys that concern some strategies only are refused for the others, never silently ignored."""
    if strategy.cpu_offload and strategy.name != "fsdp":
        raise ConfigError(
            f"strategy.cpu_offload: only fsdp lets go of the weights between blocks, and strategy.name is "
            f"{strategy.name}; use fsdp, or set it to false"
        )
    if strategy.name == "auto" and strategy.mesh != MeshConfig():
        raise ConfigError("strategy.mesh: auto lays out the ranks itself; leave the mesh at null, or name a strategy")
    for key in ("tensor_plan", "sequence_parallel"):
        if getattr(strategy, key) and strategy.name != "tensor":
            raise ConfigError(f"strategy.{key}: only strategy.name tensor cuts layers; use it, or leave this key out")
    for pattern, style in strategy.tensor_plan.items():
        _one_of(f"strategy.tensor_plan: {pattern}", style, TENSOR_STYLES)


def _check_local_sgd(config: JobConfig) -> None:
    local, every = config.strategy.local_sgd, config.checkpoint.every_steps
    _one_of("strategy.local_sgd.outer", local.outer, OUTER_STEPS)
    if local.outer_momentum >= 1:
        raise ConfigError(
            f"strategy.local_sgd.outer_momentum: {local.outer_momentum} never forgets anything; use less than 1"
        )
    is_between = not isinstance(every, int) or every % local.round_steps != 0 or config.checkpoint.every_min is not None
    if config.strategy.name == "local_sgd" and config.retry.allow_fewer_nodes and is_between:
        raise ConfigError(
            "retry.allow_fewer_nodes: with local_sgd fewer ranks go on from the end of a round only, and checkpoints "
            f"would be made inside of rounds, too; set checkpoint.every_steps to a multiple of {local.round_steps} "
            "(strategy.local_sgd.round_steps) and checkpoint.every_min to null"
        )


def _check_custom(config: JobConfig) -> None:
    """The job's own step takes no notice of these."""
    if config.strategy.name != "custom":
        return
    defaults = JobConfig()
    for key in ("strategy.activation_checkpointing", "train.accumulate", "train.compile", "train.precision"):
        if value_of(config, key) != value_of(defaults, key):
            raise ConfigError(
                f"{key}: the step of {config.job} is its own (strategy.name: custom), and it would have to do this "
                f"itself; leave it at {value_of(defaults, key)!r}"
            )


_LEAST: Mapping[str, float] = {
    "cluster.nodes": 1,
    "cluster.tasks_per_node": 1,
    "cluster.cpus_per_task": 1,
    "cluster.gpus_per_node": 0,
    "cluster.spare_nodes": 0,
    "cluster.mem_gb": 0.001,
    "cluster.time_min": 1,
    "cluster.signal_delay_s": 0,
    "retry.max_failures": 0,
    "retry.max_requeues": 0,
    "dist.timeout_s": 1,
    "strategy.compression_rank": 1,
    "strategy.mesh.replicas": 1,
    "strategy.mesh.shards": 1,
    "strategy.mesh.tensor": 1,
    "strategy.mesh.stages": 1,
    "strategy.parameter_server.servers": 1,
    "strategy.parameter_server.staleness": 0,
    "strategy.pipeline.micro_batches": 1,
    "strategy.pipeline.stages_per_rank": 2,
    "strategy.local_sgd.round_steps": 1,
    "strategy.local_sgd.after_steps": 0,
    "strategy.local_sgd.outer_lr": 0,
    "strategy.local_sgd.outer_momentum": 0,
    "data.global_batch_size": 1,
    "data.workers": 0,
    "data.image_size": 1,
    "data.max_bad_samples": 0,
    "optim.lr": 0,
    "optim.momentum": 0,
    "optim.weight_decay": 0,
    "optim.warmup_steps": 0,
    "train.epochs": 1,
    "train.max_steps": 1,
    "train.accumulate": 1,
    "train.log_every": 1,
    "train.clip_norm": 1e-12,
    "train.spike_factor": 1.01,
    "train.rollback_after": 1,
    "train.pruning.start_step": 0,
    "train.pruning.end_step": 1,
    "train.pruning.every_steps": 1,
    "checkpoint.every_min": 0.01,
    "checkpoint.keep_every": 1,
}


def _check_parts(config: JobConfig) -> None:
    """Who may be given which samples: what goes with shares that move, and with parts that never do."""
    data, name = config.data, config.strategy.name
    if data.share == "auto" and name not in OWN_TIME:
        raise ConfigError(
            f"data.share: auto needs each rank's own time of a step, and shares of any size; with strategy.name {name} "
            f"ranks wait for each other all through a step, or shapes are fixed: use {', '.join(OWN_TIME)}, or even"
        )
    if data.split == "global":
        return
    for key, value, why in (
        ("data.share", data.share == "auto", "auto would change how far each rank is in its part; use even"),
        ("data.bad_samples", data.bad_samples == "skip", "skip takes another sample, of any part; use fail"),
        ("retry.allow_fewer_nodes", config.retry.allow_fewer_nodes, "fewer ranks would have other parts; use false"),
    ):
        if value:
            raise ConfigError(f"{key}: does not go with data.split: {data.split}: {why}, or data.split: global")


def _check_every(key: str, value: int | str, word: str) -> None:
    if value != word and not (isinstance(value, int) and value >= 1):
        raise ConfigError(f"{key}: {value!r} is not a number of steps (1 or more) or {word!r}")


def _check_cluster(config: JobConfig) -> None:
    """Values that end up in ``#SBATCH`` lines: a line break would start a shell line of its own."""
    cluster = config.cluster
    texts = {f.name: getattr(cluster, f.name) for f in fields(cluster)}
    texts.update({f"extra.{key}": value for key, value in cluster.extra.items()})
    for name, value in texts.items():
        if isinstance(value, str) and not (value.isprintable() and value):
            raise ConfigError(f"cluster.{name}: {value!r} is empty or holds a line break or another control character")
    for key, value in cluster.extra.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*", str(key).replace("_", "-")):
            raise ConfigError(f"cluster.extra: {key!r} is not the long name of an sbatch flag, such as 'nodelist'")
        if not isinstance(value, (str, int, float, bool)):
            raise ConfigError(f"cluster.extra.{key}: {value!r} must be a text, a number or true")
        flag = str(key).replace("-", "_")
        if flag in _OWN_FLAGS:
            raise ConfigError(f"cluster.extra.{key}: use {_OWN_FLAGS[flag]} for this")
    if 0 < cluster.gpus_per_node < cluster.tasks_per_node:
        raise ConfigError(
            f"cluster.tasks_per_node: {cluster.tasks_per_node} ranks cannot share {cluster.gpus_per_node} GPUs of a "
            "node; each rank needs one of its own: set both keys to the same number"
        )
    if cluster.container is not None:
        container.parse(cluster.container)
        container.outermost(cluster.container_mounts)
    for line in cluster.setup:
        if "\n" in line or "\r" in line:
            raise ConfigError(f"cluster.setup: {line!r}: one list entry for each shell line")


#: sbatch flags with a key of their own, or that the toolkit itself must set.
_OWN_FLAGS: Mapping[str, str] = {
    "nodes": "cluster.nodes",
    "ntasks": "cluster.nodes and cluster.tasks_per_node",
    "ntasks_per_node": "cluster.tasks_per_node",
    "cpus_per_task": "cluster.cpus_per_task",
    "gpus_per_node": "cluster.gpus_per_node",
    "gpus_per_task": "cluster.gpus_per_node (per task hides the peers' devices from NCCL)",
    "mem": "cluster.mem_gb",
    "time": "cluster.time_min",
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "constraint": "cluster.constraint",
    "exclude": "cluster.exclude",
    "exclusive": "cluster.exclusive",
    "signal": "cluster.signal_delay_s",
    "job_name": "name",
    "output": "`toolkit logs` (the run folder holds every log)",
    "error": "`toolkit logs` (the run folder holds every log)",
    "no_kill": "cluster.spare_nodes or retry.allow_fewer_nodes (without them nobody would requeue the job)",
    "open_mode": "nothing: logs are always appended to",
    "array": "one submit for each run",
    "wrap": "`job`",
    "export": "nothing: the ranks need the environment",
}


def micro_batches(config: PipelineConfig, stages: int, samples: int, *, least: int = 1) -> int:
    """Into how many parts a pipeline of ``stages`` ranks cuts its ``samples`` of a global batch.

    Without a number in the config four for each rank, or ``least`` if that is more, as long as each has two samples (a
    batch norm needs them); interleaved wants a multiple of the ranks.
    """
    if config.micro_batches is not None:
        return config.micro_batches
    count = max(stages, min(max(4 * stages, least), samples // 2))
    return count - count % stages if config.schedule == "interleaved" else count


def check_pipeline(config: StrategyConfig, ranks: int, samples: int, accumulate: int) -> None:
    """Refuse what ``ranks`` ranks cannot do as pipelines with global batches of ``samples``. Raises ConfigError."""
    sizes = mesh_of(config, ranks)
    stages, replicas = sizes.stages or 1, sizes.replicas or 1
    _check_micro_batches(config.pipeline, stages, accumulate)
    count = micro_batches(config.pipeline, stages, samples // replicas, least=accumulate)
    if samples < replicas * count:
        raise ConfigError(
            f"data.global_batch_size: {samples} samples cannot be shared by {replicas} x {stages} ranks in "
            f"{replicas} x {count} micro-batches (pipelines x strategy.pipeline.micro_batches); use {replicas * count} "
            "or more"
        )


def _check_micro_batches(config: PipelineConfig, stages: int, accumulate: int) -> None:
    count, interleaved = config.micro_batches, config.schedule == "interleaved"
    parts = stages * (config.stages_per_rank if interleaved and stages > 1 else 1)
    if config.split and len(config.split) != parts - 1:
        raise ConfigError(
            f"strategy.pipeline.split: {len(config.split)} layers begin a stage, and {parts} stages need {parts - 1} "
            "of them (the first stage begins with the model); name so many, or none"
        )
    if count is None:
        return
    if count < stages:
        raise ConfigError(
            f"strategy.pipeline.micro_batches: {count} do not fill a pipeline of {stages} ranks; use {stages} or more, "
            "best several times as many"
        )
    if interleaved and count % stages:
        raise ConfigError(
            f"strategy.pipeline.micro_batches: interleaved goes through the {stages} ranks of a pipeline in rounds of "
            f"as many micro-batches, and {count} is no multiple of {stages}"
        )
    if accumulate > count:
        raise ConfigError(
            f"train.accumulate: {accumulate} parts are more than strategy.pipeline.micro_batches: {count}, and in a "
            "pipeline both are the same; set one of them"
        )


def check_batch(config: JobConfig, ranks: int) -> None:
    """Refuse a global batch that ``ranks`` ranks cannot share. Raises ConfigError."""
    if config.strategy.name == "pipeline":
        check_pipeline(config.strategy, ranks, config.data.global_batch_size, config.train.accumulate)
        return
    size = config.data.global_batch_size
    together = mesh_of(config.strategy, ranks).tensor or 1
    ranks = (ranks - _servers(config, ranks)) // together
    who = "ranks" if together == 1 else f"groups of {together} ranks"
    if size < ranks:
        raise ConfigError(
            f"data.global_batch_size: {size} samples cannot be shared by {ranks} {who}; use {ranks} or more, "
            "or fewer ranks (cluster.nodes x cluster.tasks_per_node)"
        )
    if config.train.accumulate > size // ranks:
        raise ConfigError(
            f"train.accumulate: {config.train.accumulate} parts of a share of {size // ranks} samples "
            f"(data.global_batch_size {size} on {ranks} {who}) would be empty; use {size // ranks} or less"
        )


def _servers(config: JobConfig, ranks: int) -> int:
    """How many of ``ranks`` ranks get no samples. Raises ConfigError when that leaves none that does."""
    if config.strategy.name != "parameter_server":
        return 0
    servers = config.strategy.parameter_server.servers
    if servers >= ranks:
        raise ConfigError(
            f"strategy.parameter_server.servers: {servers} of {ranks} ranks leave no worker; use fewer, "
            "or more ranks (cluster.nodes x cluster.tasks_per_node)"
        )
    return servers


#: The dimensions that the mesh of a strategy may have; the first one that is null takes the ranks that are left.
_DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    "ddp": ("replicas",),
    "fsdp": ("shards", "replicas"),
    "zero": ("shards", "replicas"),
    "tensor": ("tensor", "replicas", "shards"),
    "pipeline": ("stages", "replicas"),
}


def check_compiled(strategy: StrategyConfig, train: TrainConfig, ranks: int) -> None:
    """Refuse what torch.compile makes wrong in silence: layers that are cut and sharded as well. Raises ConfigError."""
    sizes = mesh_of(strategy, ranks)
    if train.compile and strategy.name == "tensor" and (sizes.shards or 1) > 1:
        raise ConfigError(
            f"train.compile: compiled layers that are cut (strategy.name tensor) and sharded as well "
            f"(strategy.mesh.shards {sizes.shards}) train to other weights than plain ones, with torch 2.15; set it to "
            "false, or use replicas instead of shards"
        )


def mesh_of(strategy: StrategyConfig, ranks: int) -> MeshConfig:
    """``strategy.mesh`` for so many ranks, every dimension a number. Raises ConfigError where they do not match."""
    dimensions = _DIMENSIONS.get(strategy.name, ("replicas",))
    given = {f.name: size for f in fields(MeshConfig) if (size := getattr(strategy.mesh, f.name)) is not None}
    for name, size in given.items():
        if name not in dimensions and size != 1:
            other = ", ".join(key for key, known in _DIMENSIONS.items() if name in known) or "none"
            raise ConfigError(
                f"strategy.mesh.{name}: strategy.name {strategy.name} has no such dimension; leave it at null, or use "
                f"a strategy that has it: {other}"
            )
    product = math.prod(given.values())
    free = [name for name in dimensions if name not in given]
    if ranks % product or (product != ranks and not free):
        shown = " x ".join(f"{size} {name}" for name, size in given.items())
        raise ConfigError(
            f"strategy.mesh: {shown} = {product}, and there are {ranks} ranks: "
            + (f"{product} must divide their number" if free else "the product must be their number")
            + " (cluster.nodes x cluster.tasks_per_node); null stands for what is left"
        )
    sizes = dict.fromkeys((f.name for f in fields(MeshConfig)), 1) | given
    return MeshConfig(**(sizes | dict.fromkeys(free[:1], ranks // product)))


def _check_job(config: JobConfig, project: Path | None) -> None:
    """The job module must be there with a ``main``; found and parsed, not imported (it imports torch)."""
    source = job_source(config.job, project)
    tree = ast.parse(source.read_text(), filename=str(source))
    if not any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body):
        raise ConfigError(f"job: {config.job} ({source}) has no function main(config)")
    models = _declared_models(tree)
    if models is not None:
        _one_of("model.name", config.model.name, models)


def job_source(dotted: str, project: Path | None = None) -> Path:
    """The file of the job module, looked for in ``project`` (the current folder) first, as the ranks will. Raises
    ConfigError."""
    project = project or Path.cwd()
    with _as_if_started_in(project, dotted.partition(".")[0]):
        try:
            spec = importlib.util.find_spec(dotted)
        except (ImportError, ValueError):
            spec = None
    if spec is None or spec.origin is None:
        file = Path(dotted.replace(".", "/") + ".py")
        if (
            project / file
        ).is_file():  # a package of the same name elsewhere on the path wins over a folder without __init__.py
            raise ConfigError(f"job: {file} is there but cannot be imported; add {file.parent / '__init__.py'}")
        found = sorted(f"{p.parent.name}.{p.stem}" for p in project.glob("jobs/*.py") if p.stem != "__init__")
        there = f"there are: {', '.join(found)}" if found else "run from the folder that holds the jobs/ package"
        raise ConfigError(f"job: no module {dotted!r}; {nearest(dotted, found)}{there}")
    return Path(spec.origin)


@contextmanager
def _as_if_started_in(folder: Path, package: str) -> Iterator[None]:
    """``folder`` first on the path, and ``package`` not imported yet: it may be another project's ``jobs``."""
    here = str(folder)
    hidden = {name: sys.modules.pop(name) for name in _modules_of(package)}
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(here)
        for name in _modules_of(package):
            del sys.modules[name]
        sys.modules.update(hidden)


def _modules_of(package: str) -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == package]


def _declared_models(tree: ast.Module) -> list[str] | None:
    """The names that a job says it can build, by its literal ``MODELS = (...)``; None when it does not say.

    ``"torchvision"`` among them stands for every classification model of torchvision.
    """
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "MODELS" for t in node.targets):
            names = _literal_names(node.value)
            return [n for n in names if n != "torchvision"] + (torchvision_models() if "torchvision" in names else [])
    return None


def _literal_names(node: ast.expr) -> list[str]:
    try:
        return [str(name) for name in ast.literal_eval(node)]
    except (ValueError, TypeError):
        raise ConfigError(
            f"job: line {node.lineno}: MODELS must be a literal such as ('mlp', 'lenet'), for it is read without "
            "running the job; or leave it out"
        ) from None


@lru_cache(maxsize=1)
def torchvision_models() -> list[str]:
    """The classification models of torchvision, from the list we ship: importing torchvision takes 7 s."""
    return Path(__file__).with_name("torchvision_models.txt").read_text().split()


#: What a resume may not change: the data order and the shape of the state follow from these.
FIXED_ON_RESUME = (
    "job",
    "strategy.name",
    "strategy.compression",
    "data.name",
    "data.global_batch_size",
    "data.split",
    "model.name",
    "optim.name",
    "train.seed",
)
#: Strategies whose state has the same names and values: a run of one may be continued by another, to rounding.
#: Strategies whose state has the same names and values (local_sgd: at the end of a round, with the mean): a run of one
#: may be continued by another, to rounding.
SAME_STATE = ("ddp", "fsdp", "zero", "tensor", "pipeline", "parameter_server", "local_sgd", "dp", "auto")
#: Those that do all that train: asks for between gradients and weights.
WHOLE_UPDATE = ("ddp", "fsdp", "zero", "dp", "auto")
#: Those of which a rank holds a part of each weight.
SHARDED = ("fsdp", "zero")
#: And kinds of compression that keep nothing from one step to the next.
STATELESS = ("none", "fp16", "bf16")


def value_of(config: Any, key: str) -> Any:
    """The value at a dotted key."""
    for name in key.split("."):
        config = getattr(config, name)
    return config
