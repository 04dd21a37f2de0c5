"""How the ranks share the work: the keys of the strategies."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from toolkit import registry
from toolkit.base.errors import ConfigError
from toolkit.constraints import MANY, STEPS, Count, Factor, Momentum, OneOf, Range, Steps, Where, tensor_style

#: Values in ``strategy.tensor_plan``: see `toolkit.plugins.model_parallel`.
TENSOR_STYLES = ("colwise", "gathered", "rowwise", "sequence")
#: Kinds of compression that keep nothing from one step to the next.
STATELESS = ("none", "fp16", "bf16")
_DECAY = Where(lambda decay: 0 < decay < 1, "{!r} is out of range; must be between 0 and 1, such as 0.9")
_RATIO = Where(
    lambda part: 0 < part <= 1,
    "{!r} is out of range; must be above 0 and at most 1: the part of the values that is sent",
)


@dataclass
class MeshConfig:
    """How many ways each kind of parallelism goes; their product is the number of ranks. ``null``: what is left."""

    replicas: Count | None = None  #: copies of the model, each with samples of its own
    shards: Count | None = None  #: parts of each weight that the ranks of a copy keep: fsdp's
    tensor: Count | None = None  #: ranks that compute a layer together
    stages: Count | None = None  #: parts of the model that follow each other: a pipeline's


@dataclass
class LocalSgdConfig:
    """How often the ranks of ``strategy.name: local_sgd`` meet, and what they make of their weights then."""

    round_steps: Steps = 8  #: steps that each rank makes by itself
    after_steps: Annotated[int, Range(0, STEPS)] = 0  #: steps of ordinary ddp before the first round
    #: the mean of the weights; diloco: a step of an outer SGD towards it
    outer: Annotated[str, OneOf("average", "diloco")] = "average"
    outer_lr: Factor = 0.7  #: of diloco
    outer_momentum: Momentum = 0.9  #: of diloco


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
class StrategyConfig:
    """How the ranks share the work."""

    name: Annotated[str, OneOf(kind="strategies")] = "ddp"  #: see docs/strategies.md
    #: of ddp's gradients, for slow links; with fsdp and zero bf16
    compression: Annotated[str, OneOf("none", "fp16", "bf16", "int8", "topk", "powersgd")] = "none"
    compression_ratio: Annotated[float, _RATIO] = 0.01  #: topk: the part of the values that is sent
    compression_rank: Annotated[int, Range(1, 65_536)] = 4  #: powersgd
    #: topk, powersgd, int8: decay of a moving average of each rank's gradients, which is sent in their place
    compression_average: Annotated[float, _DECAY] | None = None
    compression_layers: dict[str, Any] = field(default_factory=dict)  #: pattern of parameters: ratio, rank or none
    mesh: MeshConfig = field(default_factory=MeshConfig)
    find_unused: bool = False  #: ddp: parameters that a step does not use get a gradient of zero, not an error
    activation_checkpointing: bool = False  #: compute a block's activations again in the backward pass, to save memory
    #: with it: of every so many blocks the last one
    activation_checkpointing_every: Annotated[int, Range(1, 10_000)] = 1
    cpu_offload: bool = False  #: fsdp: weights, gradients and optimizer state in host memory, the update on the CPU
    #: fsdp and zero: how many blocks' weights are gathered ahead; more takes more memory
    prefetch_blocks: Annotated[int, Range(1, 1000)] = 1
    tensor_plan: dict[str, str] = field(default_factory=dict)  #: layer: how it is cut; empty: the model's own plan
    sequence_parallel: bool = False  #: tensor: between the layers that are cut a rank has a part of each sequence
    local_sgd: LocalSgdConfig = field(default_factory=LocalSgdConfig)
    parameter_server: ParameterServerConfig = field(default_factory=ParameterServerConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)

    def check(self) -> None:
        """Refuse keys that the chosen strategy does not use, instead of ignoring them silently. Raises ConfigError."""
        for key in ("cpu_offload", "prefetch_blocks", "tensor_plan", "sequence_parallel", "find_unused"):
            if getattr(self, key) != getattr(_DEFAULTS, key):
                refuse_without(key, f"strategy.{key}: this", self.name)
        for pattern, style in self.tensor_plan.items():
            tensor_style(f"strategy.tensor_plan: {pattern}", style, TENSOR_STYLES)
        if self.find_unused and self.compression != "none":
            raise ConfigError(
                f"strategy.find_unused: does not go with strategy.compression: {self.compression}; leave it out"
            )
        _check_compression(self)


_DEFAULTS = StrategyConfig()


def refuse_without(option: str, key: str, name: str, instead: str = "leave it out") -> None:
    """Refuse ``key``, which asks for an ``option`` that the strategy ``name`` does not have. Raises ConfigError."""
    if option not in registry.strategy(name).options:
        able = " or ".join(registry.with_trait(option))
        raise ConfigError(f"{key} goes with strategy.name {able} only, not {name}; {instead}")


def _check_compression(strategy: StrategyConfig) -> None:
    kind = strategy.compression
    # These reduce the gradients themselves: only the number format can be chosen.
    goes_with_shards = kind == "bf16" and "bf16_compression" in registry.strategy(strategy.name).options
    if kind != "none" and not goes_with_shards:
        in_bf16 = " and ".join(registry.with_trait("bf16_compression"))
        instead = f"set it to none (with {in_bf16} bf16 can be used too)"
        refuse_without("compression", f"strategy.compression: {kind}", strategy.name, instead)
    if goes_with_shards and strategy.compression_layers:
        raise ConfigError(
            f"strategy.compression_layers: with strategy.name: {strategy.name} all gradients are sent in bf16; leave "
            "it {}"
        )
    if kind == "none" and strategy.compression_layers:
        raise ConfigError(
            "strategy.compression_layers: nothing is compressed; set strategy.compression, or leave it {}"
        )
    if strategy.compression_average is not None and kind in STATELESS:
        raise ConfigError(
            f"strategy.compression_average: with strategy.compression: {kind} nothing is sent late that an average "
            "could steady; leave it null, or use topk, powersgd or int8"
        )
    for pattern, value in strategy.compression_layers.items():
        key = f"strategy.compression_layers: {pattern}"
        if kind == "topk" and type(value) in (int, float):
            _RATIO.check(key, value)
        elif value != "none" and not (kind == "powersgd" and type(value) is int and value >= 1):
            valid = {"topk": "the part of the values that is sent, such as 0.05, or none"}
            valid["powersgd"] = "a rank of 1 or more, or none"
            how = valid.get(kind, "none, or not listed")
            raise ConfigError(f"{key}: {value!r} is not valid; must be {how} with {kind}")


def mesh_of(strategy: StrategyConfig, ranks: int) -> MeshConfig:
    """Return ``strategy.mesh`` for ``ranks`` ranks, every dimension a number. Raises ConfigError for a mismatch."""
    dimensions = registry.strategy(strategy.name).mesh
    given = {f.name: size for f in fields(MeshConfig) if (size := getattr(strategy.mesh, f.name)) is not None}
    for name, size in given.items():
        if name not in dimensions and size != 1:
            others = [other for other in registry.names("strategies") if name in registry.strategy(other).mesh]
            raise ConfigError(
                f"strategy.mesh.{name}: strategy.name {strategy.name} has no such dimension; leave it at null, or use "
                f"a strategy that has it: {', '.join(others) or 'none'}"
            )
    # What the given dimensions leave goes to the first that is free.
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
