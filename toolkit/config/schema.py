"""The keys of a config, their defaults, and the words and numbers that they may hold.

A number beyond the bounds of its key is a mistake, and would overflow somewhere. :func:`validate` refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, TypeAlias

from toolkit.config.catalog import CATALOG
from toolkit.config.strategy_traits import STRATEGIES
from toolkit.config.words import OneOf, Range

#: Values in ``strategy.tensor_plan``: see strategies/layouts/plan.py.
TENSOR_STYLES = ("colwise", "gathered", "rowwise", "sequence")
#: ``optim.name`` may also be the path of a class.
OPTIMIZERS = ("sgd", "adam", "adamw", "muon")
#: ``job`` of a run whose ranks run a script that does not know the toolkit: `toolkit exec`.
FOREIGN_JOB = "toolkit.nodes.start.foreign"

#: Keys that a resume may not change: the data order and the shape of the state follow from them.
FIXED_ON_RESUME = (
    *("job", "strategy.name", "strategy.compression", "strategy.compression_average"),
    *("data.name", "data.global_batch_size", "data.repeats", "data.split"),
    *("model.name", "optim.name", "train.seed"),
)
MANY, STEPS = 10**9, 10**12
Count: TypeAlias = Annotated[int, Range(1, MANY)]
Steps: TypeAlias = Annotated[int, Range(1, STEPS)]
#: Slurm counts nodes, tasks and CPUs of a task in 16 bits.
SLURMS_MOST = 65_533
#: Kinds of compression that keep nothing from one step to the next.
STATELESS = ("none", "fp16", "bf16")


@dataclass
class PriceConfig:
    """What this site charges; for the table at the end of a run, see docs/efficiency.md."""

    cpu_hour: Annotated[float, Range(0, 1e6)] = 0.0  #: for an hour of one CPU
    gpu_hour: Annotated[float, Range(0, 1e6)] = 0.0  #: for an hour of one GPU
    currency: str | None = None  #: such as EUR, or credits


@dataclass
class ClusterConfig:
    """The size of the job and how to ask Slurm for it; inside an allocation the allocation's own size wins."""

    nodes: Annotated[int, Range(1, SLURMS_MOST)] = 1  #: nodes of the job
    #: ranks on each of them; one for each GPU where there are GPUs
    tasks_per_node: Annotated[int, Range(1, SLURMS_MOST)] = 1
    cpus_per_task: Annotated[int, Range(1, SLURMS_MOST)] = 1  #: CPU cores of each rank, for it and its data workers
    gpus_per_node: Annotated[int, Range(0, 1024)] = 0  #: 0: a job on CPUs
    gpu_type: str | None = None  #: the type in a site's --gres, such as a100
    mem_gb: Annotated[float, Range(0.001, 2**20)] | None = None  #: memory of a node; null: the site's default
    #: the time limit; the run goes on in another job when it is over
    time_min: Annotated[int, Range(1, 366 * 24 * 60)] = 30
    partition: str | None = None  #: null: the default of the site, as for account and qos
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None  #: features of nodes, as for sbatch --constraint
    exclude: str | None = None  #: nodes that are never used: n[1-4,7], or the path of a file of them
    exclusive: bool = False  #: no other job on the same nodes
    #: more nodes than the ranks need, to go on without one that fails
    spare_nodes: Annotated[int, Range(0, SLURMS_MOST)] = 0
    #: a checkpoint is committed at least so long before the time limit
    signal_delay_s: Annotated[int, Range(0, 65_535)] = 120
    preflight: bool = True  #: check the nodes before the ranks start
    #: always, never: copy the Python environment to the nodes' own disks; auto: if that pays
    stage: Annotated[str, OneOf("auto", "always", "never")] = "auto"
    stage_dir: str | None = None  #: the folder for copies on each node; null: a temporary one with room
    setup: list[str] = field(default_factory=list)  #: lines for the shell of the job's script, such as module load cuda
    container: str | None = None  #: an image in which the ranks run, see slurm/container.py
    container_mounts: list[str] = field(default_factory=list)  #: more folders that they see
    price: PriceConfig = field(default_factory=PriceConfig)  #: what an hour costs
    extra: dict[str, Any] = field(default_factory=dict)  #: any other option of sbatch: {mail-type: FAIL}


@dataclass
class RetryConfig:
    """How often the supervisor starts again what failed."""

    #: restarts after failures, since the run last gained more time than they cost; 0: none
    max_failures: Annotated[int, Range(0, MANY)] = 4
    #: times that the job goes back into the queue without a new checkpoint in between
    max_requeues: Annotated[int, Range(0, MANY)] = 100
    no_progress_attempts: Count = 2  #: failures at one step, or time limits, without a new step: then it is given up
    allow_fewer_nodes: bool = False  #: go on with the nodes that are left


@dataclass
class DistConfig:
    """The process group."""

    backend: Annotated[str, OneOf("auto", "nccl", "gloo", "mpi")] = "auto"  #: auto: nccl with GPUs, else gloo
    timeout_s: Annotated[int, Range(1, 7 * 86_400)] = 600  #: after which a rank that hangs is noticed


@dataclass
class MeshConfig:
    """How many ways each kind of parallelism goes; their product is the number of ranks. ``null``: what is left."""

    replicas: Count | None = None  #: copies of the model, each with samples of its own
    shards: Count | None = None  #: parts of each weight that the ranks of a copy keep: fsdp's
    tensor: Count | None = None  #: ranks that compute a layer together
    stages: Count | None = None  #: parts of the model that follow each other: a pipeline's


@dataclass
class ParameterServerConfig:
    """Of ``strategy.name: parameter_server``: the first ranks are servers, the others workers."""

    servers: Count = 1  #: ranks that hold the weights; all others compute gradients
    #: async: each worker's gradient is applied as it comes; bounded: within limits, see staleness
    mode: Annotated[str, OneOf("sync", "async", "bounded")] = "sync"
    staleness: Annotated[int, Range(0, MANY)] = 4  #: with bounded: so many shares a worker may be ahead of the slowest


@dataclass
class PipelineConfig:
    """How micro-batches go through the stages of a pipeline."""

    #: gpipe keeps the activations of all micro-batches; interleaved idles less and sends more
    schedule: Annotated[str, OneOf("1f1b", "gpipe", "interleaved")] = "1f1b"
    micro_batches: Count | None = None  #: parts of a pipeline's samples; null: four for each rank of it, if so many fit
    split: list[str] = field(default_factory=list)  #: the layer that each stage but the first begins with; empty: even
    stages_per_rank: Annotated[int, Range(2, 1000)] = 2  #: with interleaved


@dataclass
class LocalSgdConfig:
    """How often the ranks of ``strategy.name: local_sgd`` meet, and what they make of their weights then."""

    round_steps: Steps = 8  #: steps that each rank makes by itself
    after_steps: Annotated[int, Range(0, STEPS)] = 0  #: steps of ordinary ddp before the first round
    #: the mean of the weights; diloco: a step of an outer SGD towards it
    outer: Annotated[str, OneOf("average", "diloco")] = "average"
    outer_lr: Annotated[float, Range(0, 10_000)] = 0.7  #: of diloco
    outer_momentum: Annotated[float, Range(0, 1)] = 0.9  #: of diloco


@dataclass
class StrategyConfig:
    """How the ranks share the work."""

    name: Annotated[str, OneOf(*STRATEGIES)] = "ddp"  #: see docs/strategies.md
    #: of ddp's gradients, for slow links; with fsdp and zero bf16
    compression: Annotated[str, OneOf("none", "fp16", "bf16", "int8", "topk", "powersgd")] = "none"
    compression_ratio: float = 0.01  #: topk: the part of the values that is sent
    compression_rank: Annotated[int, Range(1, 65_536)] = 4  #: powersgd
    #: topk, powersgd, int8: decay of a moving average of each rank's gradients, which is sent in their place
    compression_average: float | None = None
    compression_layers: dict[str, Any] = field(default_factory=dict)  #: pattern of parameters: ratio, rank or none
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    local_sgd: LocalSgdConfig = field(default_factory=LocalSgdConfig)
    find_unused: bool = False  #: ddp: parameters that a step does not use get a gradient of zero, not an error
    activation_checkpointing: bool = False  #: compute a block's activations again in the backward pass, to save memory
    #: with it: of every so many blocks the last one
    activation_checkpointing_every: Annotated[int, Range(1, 10_000)] = 1
    cpu_offload: bool = False  #: fsdp: weights, gradients and optimizer state in host memory, the update on the CPU
    #: fsdp and zero: how many blocks' weights are gathered ahead; more takes more memory
    prefetch_blocks: Annotated[int, Range(1, 1000)] = 1
    tensor_plan: dict[str, str] = field(default_factory=dict)  #: layer: how it is cut; empty: the model's own plan
    sequence_parallel: bool = False  #: tensor: between the layers that are cut a rank has a part of each sequence
    parameter_server: ParameterServerConfig = field(default_factory=ParameterServerConfig)


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

    name: Annotated[str, OneOf(*CATALOG)] = "digits"
    root: str | None = None  #: the folder of the data
    stage: list[str] = field(default_factory=list)  #: files and folders to copy to the nodes' own disks
    global_batch_size: Count = 64  #: samples of a step, of all ranks together
    workers: Annotated[int, Range(0, 1024)] = 0  #: processes of each rank that load samples; 0: the rank itself
    augment: bool = False  #: shift training images at random, and mirror photographs
    image_size: Annotated[int, Range(1, 65_536)] | None = None  #: edge of an image; null: as they are
    #: skip: a training sample that cannot be loaded is replaced by another one, and listed
    bad_samples: Annotated[str, OneOf("fail", "skip")] = "fail"
    max_bad_samples: Annotated[int, Range(0, STEPS)] = 100  #: with skip; more of them in the whole run end it
    share: Annotated[str, OneOf("even", "auto")] = "even"  #: auto: slower ranks get fewer samples of each global batch
    #: a global batch holds each of its images so many times, each time augmented differently
    repeats: Annotated[int, Range(1, 1024)] = 1
    images: ImageConfig = field(default_factory=ImageConfig)  #: of image_folder
    #: blocks or hash: each rank reads the same part of the data set for the whole run
    split: Annotated[str, OneOf("global", "blocks", "hash")] = "global"


@dataclass
class ModelConfig:
    """What to train. ``init_from``: where a new run's weights come from, see origin.py; ``init_weights``: which."""

    name: str = "mlp"  #: of one of the job's models
    init_from: str | None = None  #: a run, a checkpoint or a file of weights
    #: average or raw; null: the average of the weights where there is one
    init_weights: Annotated[str, OneOf("average", "raw")] | None = None
    freeze: list[str] = field(default_factory=list)  #: patterns of parameters that are not trained, such as layer1.*


#: What an option of a script may be. A list is an option with several words; true is an option without one.
Argument: TypeAlias = str | int | float | bool | list[str | int | float]
#: What an optimizer's argument may be.
Setting: TypeAlias = str | int | float | bool | list[float]


@dataclass
class OptimConfig:
    """The optimizer and its learning rate as a function of the step, see docs/optimizers.md."""

    name: str = "sgd"  #: sgd, adam, adamw, muon, or a class by its path: mypackage.MyOptimizer
    arguments: dict[str, Setting] = field(default_factory=dict)  #: of a class by its path, and of torch's Muon
    lr: Annotated[float, Range(0, 10_000)] = 0.05  #: the rate after the warm-up
    momentum: Annotated[float, Range(0, 1)] | None = None  #: of sgd and muon; null: 0.9, with muon 0.95
    nesterov: bool | None = None  #: of sgd and muon; null: false, with muon true
    betas: list[float] = field(default_factory=list)  #: of adam, adamw and muon's AdamW; empty: torch's
    eps: Annotated[float, Range(1e-30, 1)] | None = None  #: of the same; null: torch's
    weight_decay: Annotated[float, Range(0, 10_000)] = 0.0  #: of what no group has one of its own for
    decay_norms_and_biases: bool = True  #: false: weight_decay is for weights of two dimensions or more
    #: each block has its next one's rate times this; the last layers have lr
    layer_decay: Annotated[float, Range(1e-6, 1)] | None = None
    groups: dict[str, dict[str, Setting]] = field(default_factory=dict)  #: pattern of parameters: their own settings
    #: how the rate goes on after the warm-up
    schedule: Annotated[str, OneOf("constant", "linear", "cosine", "wsd")] = "constant"
    min_lr: Annotated[float, Range(0, 10_000)] = 0.0  #: to which a schedule falls
    warmup_steps: Annotated[int, Range(0, STEPS)] = 0  #: the first steps, in which the rate rises
    decay_steps: Steps | None = None  #: with wsd: the last steps, in which it falls; null: a fifth of all


@dataclass
class PruningConfig:
    """Weights that are set to 0 for good: the smallest ones, more and more of them, see docs/steps.md."""

    amount: float = 0.0  #: the part of the weights that is 0 in the end, from 0 (nothing is pruned) to below 1
    structured: bool = False  #: whole outputs of a layer, by their norm, instead of single weights
    start_step: Annotated[int, Range(0, STEPS)] = 0  #: before it nothing is pruned
    end_step: Steps | None = None  #: when ``amount`` is reached
    every_steps: Steps = 100  #: steps from one pruning to the next


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
    eval_every: int | str = "epoch"  #: epoch, or a number of steps
    #: the largest norm of a step's gradient, over all parameters
    clip_norm: Annotated[float, Range(1e-12, 1e12)] | None = None
    skip_bad_steps: bool = False  #: leave out a step whose gradient is not finite, and list its samples
    #: and one whose gradient's norm is so many times its moving average
    spike_factor: Annotated[float, Range(1.01, 1e12)] | None = None
    #: at the second logging step in a row whose mean loss is not finite; warn: train on
    on_nan: Annotated[str, OneOf("stop", "warn")] = "stop"
    rollback_after: Steps | None = None  #: after so many left out in a row, back to the last checkpoint's weights
    ema_decay: float | None = None  #: keep a moving average of the weights, and evaluate that
    sync_batch_norm: bool = False  #: BatchNorm's statistics of a step are those of all ranks' samples
    channels_last: bool = False  #: lay out images and convolutions with the channels last
    #: on GPUs, products of fp32 matrices; high: in TF32, with 10 bits of 23, and faster
    float32_matmul: Annotated[str, OneOf("highest", "high", "medium")] = "highest"
    cudnn_benchmark: bool = True  #: on GPUs, time cuDNN's algorithms for each shape; not with deterministic
    expandable_segments: bool = False  #: on GPUs, memory in pieces that grow: fewer gaps where sizes change
    pruning: PruningConfig = field(default_factory=PruningConfig)


@dataclass
class CheckpointConfig:
    """When to save, and how many checkpoints to keep."""

    every_steps: int | str | None = 200  #: auto: as often as pays, by time; null: by time only, see every_min
    #: as well: when so many minutes have passed since the last save
    every_min: Annotated[float, Range(0.01, 366 * 24 * 60)] | None = None
    memory_every_steps: int | str | None = None  #: as well, into the nodes' memory; auto: for 1 % of the time
    keep: Annotated[int, Range(0, MANY)] = 2  #: so many of the newest
    keep_every: Steps | None = None  #: and each whose step this number divides
    keep_best: str | None = None  #: and the best by this metric: eval/accuracy, or -eval/loss where less is better
    copy_to: str | None = None  #: a second folder for them, on another disk
    background: bool = True  #: write while the training goes on; takes host memory for a copy of what a rank writes


@dataclass
class JobConfig:
    """A whole job; each component is handed its own section, never this::

    >>> config = toolkit.JobConfig()
    >>> config.train.epochs, config.checkpoint.keep
    (10, 2)
    """

    name: str = "run"  #: of the run's folder; the config file's own name where it is left out
    job: str = "jobs.classify"  #: a module (jobs.classify), or the path of a file (train.py)
    params: dict[str, Any] = field(default_factory=dict)  #: the job's own keys: its class Params, see docs/config.md
    argv: list[str] = field(default_factory=list)  #: a script's command line: the words after `--`; docs/loop.md
    args: dict[str, Argument] = field(default_factory=dict)  #: its options by name: {epochs: 3} is --epochs 3
    on_restart: list[str] = field(default_factory=list)  #: of `toolkit exec`: more words, from the second attempt on
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
    notify: list[str] = field(default_factory=list)  #: a command that is called at the end: run/attempt/notify.py


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


def value_of(config: Any, key: str) -> Any:
    """Return the value at a dotted key."""
    return _reader(key)(config)


#: Thousands of configs are read key by key.
_reader = cache(attrgetter)


def put(config: Any, parts: Sequence[str], value: Any) -> None:
    """Set the value at a dotted key. Below ``params`` and other mappings the last part is the mapping's key."""
    for name in parts[:-1]:
        config = config[name] if isinstance(config, dict) else getattr(config, name)
    if isinstance(config, dict):
        config[parts[-1]] = value
    else:
        setattr(config, parts[-1], value)
