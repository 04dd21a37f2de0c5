"""The config of a run: its sections, their keys with defaults, words and bounds, and what each section refuses.

What depends on several sections is in validation.py. The last lines name the keys that a run may change while it
trains.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, TypeAlias

from toolkit import registry
from toolkit.base.errors import ConfigError
from toolkit.config.cluster import ClusterConfig
from toolkit.config.optim import OptimConfig
from toolkit.config.params import leaves
from toolkit.config.strategy import StrategyConfig
from toolkit.constraints import (
    LINES,
    MANY,
    PATH,
    STEPS,
    TEXT,
    Count,
    OneOf,
    Range,
    Steps,
    Where,
    is_absolute,
    steps_or,
)

#: ``job`` of a run whose ranks run a script that does not know the toolkit: `toolkit exec`.
SCRIPT_JOB = "toolkit.nodes.start.user_script"
#: ``job`` of a run that another program has started by calling ``toolkit.start()``, such as a job of submitit's or a
#: notebook. Only that program can start it again.
CALLED_JOB = "toolkit.start"

#: Keys that a resume may not change: the data order and the shape of the state follow from them.
FIXED_ON_RESUME = (
    *("job", "strategy.name", "strategy.compression", "strategy.compression_average"),
    *("data.name", "data.global_batch_size", "data.augment_repeats", "data.partition"),
    *("model.name", "optim.name", "train.seed"),
)
#: What a key, or a section with a dot, needs to act: one of these, a key that is on or that has this value. A section
#: that is named after a strategy needs that strategy.
_ACTS_WITH: Mapping[str, tuple[str, ...]] = {
    "cluster.gpu_type": ("cluster.gpus_per_node", "cluster.components"),
    "cluster.stage_dir": ("cluster.stage=auto", "cluster.stage=always", "data.stage"),
    "cluster.container_mounts": ("cluster.container",),
    "strategy.compression_ratio": ("strategy.compression=topk",),
    "strategy.compression_rank": ("strategy.compression=powersgd",),
    "strategy.activation_checkpointing_every": ("strategy.activation_checkpointing",),
    "strategy.local_sgd.outer_lr": ("strategy.local_sgd.outer=diloco",),
    "strategy.local_sgd.outer_momentum": ("strategy.local_sgd.outer=diloco",),
    "strategy.parameter_server.staleness": ("strategy.parameter_server.mode=bounded",),
    "strategy.pipeline.stages_per_rank": ("strategy.pipeline.schedule=interleaved",),
    "data.max_bad_samples": ("data.bad_samples=skip",),
    "data.images.magnitude": ("data.images.policy=rand_augment",),
    "model.init_from_average": ("model.init_from",),
    "optim.momentum": ("optim.name=sgd", "optim.name=muon"),
    "optim.decay_norms_and_biases": ("optim.weight_decay", "optim.groups"),
    "train.pruning.": ("train.pruning.amount",),
}
#: What an option of a script may be. A list is an option with several words; true is an option without one.
Argument: TypeAlias = str | int | float | bool | list[str | int | float]
_DECAY = Where(lambda decay: 0 < decay < 1, "{!r} is out of range; must be between 0 and 1, such as 0.999")
_PRUNED = Where(lambda amount: 0 <= amount < 1, "{!r} is out of range; must be from 0 to below 1, such as 0.8")
_ENOUGH = Where(
    lambda keep: keep >= 2,
    "{!r} is out of range; must be 2 or more: a run cannot resume if its only checkpoint is damaged",
)
_METRIC = Where(
    re.compile(r"-?[^\s-].*").fullmatch,
    "{!r} is not a metric: give its name as in TensorBoard, such as eval/accuracy, with a minus before it (-eval/loss) "
    "if less is better",
)
_ELSEWHERE = Where(is_absolute, "{!r} is relative, and ranks run elsewhere: give an absolute path")
_NAME = Where(
    re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}").fullmatch,
    "{!r} names a folder: 100 letters, digits, . _ - at most, the first a letter or a digit; without the key it is the "
    "config file's name",
)
_EVENTS = Where(
    {"end", "failure", "preemption", "first_step"}.issuperset,
    "{!r} is not a list of events: end, failure, preemption, first_step",
)
_ADDRESS = Where(re.compile(r"[^\s@,<>]+@[^\s@,<>]+").fullmatch, "{!r} is not a mail address, such as me@example.org")
_COMMAND = Where(
    lambda words: not words or words[0],
    "{!r} is not a command: give a list of a program and its arguments, such as [mail, -s, done, me@example.org]",
)


class _OwnKeys:
    """Texts of several lines, in sections of the job's own."""

    def check(self, key: str, value: Mapping[str, Any]) -> None:
        for name, word in leaves(value, key):
            if isinstance(word, str):
                LINES.check(name, word)


@dataclass
class RetryConfig:
    """How often the supervisor starts again what failed."""

    #: restarts after failures, since the run last gained more time than they cost; 0: none
    max_failures: Annotated[int, Range(0, MANY)] = 4
    #: times that the job goes back into the queue without a new checkpoint in between
    max_requeues: Annotated[int, Range(0, MANY)] = 100
    no_progress_attempts: Count = 2  #: failures at one step, or time limits, without a new step: then it is given up
    allow_fewer_nodes: bool = False  #: continue with the nodes that are left


@dataclass
class DistConfig:
    """The process group."""

    backend: Annotated[str, OneOf(kind="backends")] = "auto"  #: auto: nccl with GPUs, else gloo
    timeout_s: Annotated[int, Range(1, 7 * 86_400)] = 600  #: half of it without progress counts as a hang


@dataclass
class ImageConfig:
    """How the photographs of ``data.name: image_folder`` are changed and cut, see docs/images.md."""

    #: with augment: more random changes of training images
    policy: Annotated[str, OneOf("none", "auto_augment", "rand_augment", "trivial_augment", "augmix")] = "none"
    magnitude: Annotated[int, Range(0, 30)] = 9  #: of rand_augment, 0 to 30
    #: with augment: the probability that a rectangle of a training image is erased
    erase: Annotated[float, Range(0, 1)] = 0.0
    interpolation: Annotated[str, OneOf("bilinear", "bicubic")] = "bilinear"  #: bicubic: sharper, and slower
    val_size: Annotated[int, Range(1, 65_536)] | None = None  #: edge of an evaluated image; null: data.image_size
    #: shorter side to which it is resized before; null: 256/224 of its edge
    val_resize: Annotated[int, Range(1, 65_536)] | None = None
    #: with augment: memory of each node for decoded training images; 0: none are kept
    cache_gb: Annotated[float, Range(0, 65_536)] = 0.0


@dataclass
class DataConfig:
    """What to train on. ``root: null`` means ``$TOOLKIT_DATA``, or ``./data``; for text, Python's standard library."""

    name: Annotated[str, OneOf(kind="datasets")] = "digits"
    root: Annotated[str, PATH] | None = None  #: the folder of the data
    #: files and folders to copy to the nodes' own disks
    stage: Annotated[list[str], PATH] = field(default_factory=list)
    global_batch_size: Count = 64  #: samples of a step, of all ranks together
    workers: Annotated[int, Range(0, 1024)] = 0  #: processes of each rank that load samples; 0: the rank itself
    augment: bool = False  #: shift training images at random, and mirror photographs
    image_size: Annotated[int, Range(1, 65_536)] | None = None  #: edge of an image; null: as they are
    #: skip: a training sample that cannot be loaded is replaced by another one, and listed
    bad_samples: Annotated[str, OneOf("fail", "skip")] = "fail"
    max_bad_samples: Annotated[int, Range(0, STEPS)] = 100  #: with skip; more of them in the whole run end it
    #: auto: slower ranks get fewer samples of each global batch
    balance: Annotated[str, OneOf("even", "auto")] = "even"
    #: a global batch holds each of its images so many times, each time augmented differently
    augment_repeats: Annotated[int, Range(1, 1024)] = 1
    images: ImageConfig = field(default_factory=ImageConfig)  #: of image_folder
    #: blocks or hash: each rank reads the same part of the data set for the whole run
    partition: Annotated[str, OneOf("global", "blocks", "hash")] = "global"

    def check(self) -> None:
        """Refuse keys of the data that do not go with each other. Raises ConfigError."""
        # Refuse keys of photographs that would change nothing.
        if self.images != ImageConfig() and self.name != "image_folder":
            raise ConfigError(
                f"data.images: these keys are for data.name image_folder, and it is {self.name}; leave them out"
            )
        for option in ("policy", "erase", "cache_gb"):
            if getattr(self.images, option) != getattr(ImageConfig(), option) and not self.augment:
                raise ConfigError(
                    f"data.images.{option}: changes nothing while data.augment is false; set that to true"
                )
        if self.images.policy == "augmix" and self.images.interpolation != "bilinear":
            raise ConfigError("data.images.interpolation: torchvision's augmix can do bilinear only; use that")
        size = self.images.val_size or self.image_size or 224
        if self.images.val_resize is not None and self.images.val_resize < size:
            raise ConfigError(
                f"data.images.val_resize: {self.images.val_resize} is less than the edge {size} that is cut out of it; "
                f"use {size} or more"
            )
        # These would change which samples a rank reads.
        for key, is_set, why in (
            ("augment_repeats", self.augment_repeats > 1, "copies of a sample would be on other ranks; use 1"),
            ("balance", self.balance == "auto", "auto would change how far each rank is in its part; use even"),
            ("bad_samples", self.bad_samples == "skip", "skip takes another sample, of any part; use fail"),
        ):
            if is_set and self.partition != "global":
                raise ConfigError(
                    f"data.{key}: does not go with data.partition: {self.partition}: {why}, or data.partition: global"
                )


@dataclass
class ModelConfig:
    """What to train. ``init_from``: where a new run's weights are; ``init_from_average``: which."""

    name: str = "mlp"  #: of one of the job's models
    init_from: Annotated[str, PATH] | None = None  #: a run, a checkpoint or a file of weights
    init_from_average: bool | None = None  #: true: the average of its weights; false: the raw ones; null: what it has
    freeze: list[str] = field(default_factory=list)  #: patterns of parameters that are not trained, such as layer1.*


@dataclass
class PruningConfig:
    """Weights that are set to 0 for good: the smallest ones, more and more of them, see docs/steps.md."""

    #: the part of the weights that is 0 in the end, from 0 (nothing is pruned) to below 1
    amount: Annotated[float, _PRUNED] = 0.0
    structured: bool = False  #: whole outputs of a layer, by their norm, instead of single weights
    start_step: Annotated[int, Range(0, STEPS)] = 0  #: before it nothing is pruned
    end_step: Steps | None = None  #: when ``amount`` is reached
    every_steps: Steps = 100  #: steps from one pruning to the next

    def check(self) -> None:
        """Refuse a pruning that does not end. Raises ConfigError."""
        if self.amount and self.end_step is None:
            raise ConfigError("train.pruning.end_step: say in which step train.pruning.amount is to be reached")
        if self.amount and self.end_step is not None and self.end_step < self.start_step:
            raise ConfigError(
                f"train.pruning.end_step: {self.end_step} is before train.pruning.start_step {self.start_step}"
            )


@dataclass
class TrainConfig:
    """How long, how precisely and how talkatively to train."""

    epochs: Count = 10  #: passes over the data
    max_steps: Steps | None = None  #: end earlier, after so many steps
    #: of the initial weights, the order of the data and all random numbers
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    precision: Annotated[str, OneOf("fp32", "bf16", "fp16")] = "fp32"  #: what the model computes in
    accumulate: Count = 1  #: parts of a rank's samples that go through the model one after another, to save memory
    compile: bool = False  #: torch.compile the model
    deterministic: bool = False  #: only kernels of torch that give the same bits each time; slower
    log_every: Steps = 20  #: steps from one line of metrics to the next
    eval_every: Annotated[int | str, TEXT, steps_or("epoch")] = "epoch"  #: epoch, or a number of steps
    #: the largest norm of a step's gradient, over all parameters
    clip_norm: Annotated[float, Range(1e-12, 1e12)] | None = None
    skip_bad_steps: bool = False  #: leave out a step whose gradient is not finite, and list its samples
    #: and one whose gradient's norm is so many times its moving average
    spike_factor: Annotated[float, Range(1.01, 1e12)] | None = None
    #: at the second logging step in a row whose mean loss is not finite; warn: train on
    on_nan: Annotated[str, OneOf("stop", "warn")] = "stop"
    rollback_after: Steps | None = None  #: after so many left out in a row, back to the last checkpoint's weights
    ema_decay: Annotated[float, _DECAY] | None = None  #: keep a moving average of the weights, and evaluate that
    sync_batch_norm: bool = False  #: BatchNorm's statistics of a step are those of all ranks' samples
    channels_last: bool = False  #: lay out images and convolutions with the channels last
    #: on GPUs, products of fp32 matrices; high: in TF32, with 10 bits of 23, and faster
    float32_matmul: Annotated[str, OneOf("highest", "high", "medium")] = "highest"
    cudnn_benchmark: bool = True  #: on GPUs, time cuDNN's algorithms for each shape; not with deterministic
    expandable_segments: bool = False  #: on GPUs, memory in pieces that grow: fewer gaps where sizes change
    pruning: PruningConfig = field(default_factory=PruningConfig)

    def check(self) -> None:
        """Refuse keys that change nothing. Raises ConfigError."""
        for key in ("spike_factor", "rollback_after"):
            if getattr(self, key) is not None and not self.skip_bad_steps:
                raise ConfigError(f"train.{key}: nothing is left out without train.skip_bad_steps: true; set that, too")


@dataclass
class CheckpointConfig:
    """When to save, and how many checkpoints to keep."""

    #: auto: as often as pays, by time; null: by time only, see every_min
    every_steps: Annotated[int | str, TEXT, steps_or("auto")] | None = 200
    #: as well: when so many minutes have passed since the last save
    every_min: Annotated[float, Range(0.01, 366 * 24 * 60)] | None = None
    #: as well, into the nodes' memory; auto: for 1 % of the time
    memory_every_steps: Annotated[int | str, TEXT, steps_or("auto")] | None = None
    keep: Annotated[int, Range(0, MANY), _ENOUGH] = 2  #: so many of the newest
    keep_every: Steps | None = None  #: and each whose step this number divides
    #: and the best by this metric: eval/accuracy, or -eval/loss where less is better
    keep_best: Annotated[str, TEXT, _METRIC] | None = None
    copy_to: Annotated[str, PATH, _ELSEWHERE] | None = None  #: a second folder for them, on another disk
    background: bool = True  #: write while the training continues; takes host memory for a copy of what a rank writes


@dataclass
class NotifyConfig:
    """Who is told what becomes of the run, see docs/notify.md."""

    #: end, failure (also one after which it restarts), preemption (whatever takes it back to the queue), first_step
    when: Annotated[list[str], _EVENTS] = field(default_factory=lambda: ["end"])
    command: Annotated[list[str], LINES, _COMMAND] = field(default_factory=list)  #: a program that is called
    slack: Annotated[str, PATH, _ELSEWHERE] | None = None  #: a file of mode 600 with the address of a webhook
    mail: Annotated[str, TEXT, _ADDRESS] | None = None  #: an address; the batch host must have a sendmail


@dataclass
class JobConfig:
    """A whole job; each component is handed its own section, never this::

    >>> config = toolkit.JobConfig()
    >>> config.train.epochs, config.checkpoint.keep
    (10, 2)
    """

    name: Annotated[str, _NAME] = "run"  #: of the run's folder; the config file's own name where it is left out
    job: str = "jobs.classify"  #: a module (jobs.classify), or the path of a file (train.py)
    #: the job's own keys: its class Params, see docs/config.md
    params: Annotated[dict[str, Any], _OwnKeys()] = field(default_factory=dict)
    #: a script's command line: the words after `--`; docs/loop.md
    argv: Annotated[list[str], LINES] = field(default_factory=list)
    #: a script's options by name: {epochs: 3} is --epochs 3
    args: Annotated[dict[str, Argument], LINES] = field(default_factory=dict)
    #: of `toolkit exec`: more words, from the second attempt on
    restart_args: Annotated[list[str], LINES] = field(default_factory=list)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    retry: RetryConfig = field(default_factory=RetryConfig)
    dist: DistConfig = field(default_factory=DistConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    secrets: dict[str, str] = field(default_factory=dict)  #: variable of the ranks: env, or a file; docs/security.md
    #: [wandb, mlflow:PROJECT] get the curves while the run continues
    trackers: Annotated[list[str], LINES] = field(default_factory=list)
    notify: NotifyConfig = field(default_factory=NotifyConfig)


@cache
def all_keys(schema: Any = JobConfig, prefix: str = "") -> tuple[str, ...]:
    """Return every dotted key that a config can hold."""
    keys: list[str] = []
    for f in fields(schema):
        if is_dataclass(f.default_factory):
            keys += all_keys(f.default_factory, f"{prefix}{f.name}.")
        else:
            keys.append(f"{prefix}{f.name}")
    return tuple(keys)


def requirements_of(key: str) -> Iterator[tuple[str, ...]]:
    """Yield what ``key`` needs to act, each time one of several: a key that is on, or ``key=value``."""
    top, _, rest = key.partition(".")
    section, dot, _ = rest.partition(".")
    if top == "strategy" and dot and section in registry.STRATEGIES:
        yield (f"strategy.name={section}",)
    for name, needs in _ACTS_WITH.items():
        if key == name or (name.endswith(".") and key.startswith(name)):
            yield needs


def value_of(config: Any, key: str) -> Any:
    """Return the value at a dotted key."""
    return _reader(key)(config)


_reader = cache(attrgetter)  # thousands of configs are read key by key


def put(config: Any, parts: Sequence[str], value: Any) -> None:
    """Set the value at a dotted key. Below ``params`` and other mappings the last part is the mapping's key."""
    for name in parts[:-1]:
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    if isinstance(config, dict):
        config[parts[-1]] = value
    else:
        setattr(config, parts[-1], value)
