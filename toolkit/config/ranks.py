"""How many ranks a strategy needs, and which global batches they can share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields

from toolkit.config.schema import JobConfig, MeshConfig, PipelineConfig, StrategyConfig
from toolkit.errors import ConfigError


def micro_batches(config: PipelineConfig, stages: int, samples: int, *, least: int = 1) -> int:
    """Return how many micro-batches a pipeline of ``stages`` ranks makes of its ``samples``.

    Without a number in the config there are four for each rank, or ``least`` if that is more, as long as each has two
    samples (a batch norm needs them). interleaved needs a multiple of the ranks.
    """
    if config.micro_batches is not None:
        return config.micro_batches
    count = max(stages, min(max(4 * stages, least), samples // 2))
    return count - count % stages if config.schedule == "interleaved" else count


def check_pipeline(config: StrategyConfig, ranks: int, samples: int, accumulate: int) -> None:
    """Refuse what ``ranks`` ranks cannot do as pipelines with global batches of ``samples``. Raises ConfigError."""
    sizes = mesh_of(config, ranks)
    stages, replicas = sizes.stages or 1, sizes.replicas or 1
    given, interleaved = config.pipeline.micro_batches, config.pipeline.schedule == "interleaved"
    # Only interleaved gives a rank several stages.
    parts = stages * (config.pipeline.stages_per_rank if interleaved and stages > 1 else 1)
    split = config.pipeline.split
    if split and len(split) != parts - 1:
        raise ConfigError(
            f"strategy.pipeline.split: {len(split)} layers begin a stage, and {parts} stages need {parts - 1} "
            "of them (the first stage begins with the model); name so many, or none"
        )
    # Without a number a fitting one is chosen, see :func:`micro_batches`.
    if given is not None and given < stages:
        raise ConfigError(
            f"strategy.pipeline.micro_batches: {given} do not fill a pipeline of {stages} ranks; use {stages} or more, "
            "best several times as many"
        )
    if given is not None and interleaved and given % stages:
        raise ConfigError(
            f"strategy.pipeline.micro_batches: interleaved goes through the {stages} ranks of a pipeline in rounds of "
            f"as many micro-batches, and {given} is no multiple of {stages}"
        )
    if given is not None and accumulate > given:
        raise ConfigError(
            f"train.accumulate: {accumulate} parts are more than strategy.pipeline.micro_batches: {given}, and in a "
            "pipeline both are the same; set one of them"
        )
    count = micro_batches(config.pipeline, stages, samples // replicas, least=accumulate)
    if samples < replicas * count:
        raise ConfigError(
            f"data.global_batch_size: {samples} samples cannot be shared by {replicas} x {stages} ranks in "
            f"{replicas} x {count} micro-batches (pipelines x strategy.pipeline.micro_batches); use {replicas * count} "
            "or more"
        )


def check_batch(config: JobConfig, ranks: int) -> None:
    """Refuse a global batch that ``ranks`` ranks cannot share. Raises ConfigError."""
    if config.strategy.name == "pipeline":
        check_pipeline(config.strategy, ranks, config.data.global_batch_size, config.train.accumulate)
        return
    size = config.data.global_batch_size
    # Ranks that compute a layer together get the same samples, and servers get none.
    together = mesh_of(config.strategy, ranks).tensor or 1
    ranks = (ranks - _servers(config, ranks)) // together
    who = "ranks" if together == 1 else f"groups of {together} ranks"
    # Every share needs a sample, and so does each part of a share.
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
    if config.train.compile and config.strategy.name == "tensor" and size // ranks // config.train.accumulate < 2:
        raise ConfigError(
            "train.compile: with torch 2.15 compiled layers that are cut fail, or train to wrong weights, where a part "
            f"of a batch is a single sample (data.global_batch_size {size} on {ranks} {who} in train.accumulate "
            f"{config.train.accumulate} parts); use more samples, fewer parts, or set it to false"
        )


def _servers(config: JobConfig, ranks: int) -> int:
    """Return how many of ``ranks`` ranks get no samples. Raises ConfigError when that leaves none that does."""
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


def mesh_of(strategy: StrategyConfig, ranks: int) -> MeshConfig:
    """Return ``strategy.mesh`` for ``ranks`` ranks, every dimension a number. Raises ConfigError for a mismatch."""
    dimensions = _DIMENSIONS.get(strategy.name, ("replicas",))
    given = {f.name: size for f in fields(MeshConfig) if (size := getattr(strategy.mesh, f.name)) is not None}
    for name, size in given.items():
        if name not in dimensions and size != 1:
            other = ", ".join(key for key, known in _DIMENSIONS.items() if name in known) or "none"
            raise ConfigError(
                f"strategy.mesh.{name}: strategy.name {strategy.name} has no such dimension; leave it at null, or use "
                f"a strategy that has it: {other}"
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
