"""What pipelines and tensor parallelism refuse in a config."""

from __future__ import annotations

from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig, StrategyConfig, TrainConfig, mesh_of
from toolkit.config.strategy import PipelineConfig
from toolkit.config.validation import StrategyChecks, whole_model_error


class PipelineChecks(StrategyChecks):
    def config(self, config: JobConfig) -> None:
        if config.optim.layer_decay is not None:
            raise whole_model_error("optim.layer_decay", config.strategy)

    def step(self, train: TrainConfig, strategy: StrategyConfig) -> None:
        if train.pruning.amount and train.pruning.structured:
            raise ConfigError(
                "train.pruning.structured: with strategy.name pipeline each rank would leave the outputs of its own "
                "last layer whole, and not only those of the model's; set it to false, or use fsdp"
            )

    def batch(self, config: JobConfig, ranks: int) -> None:
        check_pipeline(config.strategy, ranks, config.data.global_batch_size, config.train.accumulate)


def check_pipeline(config: StrategyConfig, ranks: int, samples: int, accumulate: int) -> None:
    """Refuse what ``ranks`` ranks cannot do as pipelines with global batches of ``samples``. Raises ConfigError."""
    sizes = mesh_of(config, ranks)
    stages, replicas = sizes.stages or 1, sizes.replicas or 1
    pipeline: PipelineConfig = config.pipeline
    given, interleaved = pipeline.micro_batches, pipeline.schedule == "interleaved"
    # Only interleaved gives a rank several stages.
    parts = stages * (pipeline.stages_per_rank if interleaved and stages > 1 else 1)
    split = pipeline.split
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
            f"as many micro-batches, and {given} is not a multiple of {stages}"
        )
    if given is not None and accumulate > given:
        raise ConfigError(
            f"train.accumulate: {accumulate} parts are more than strategy.pipeline.micro_batches: {given}, and in a "
            "pipeline both are the same; set one of them"
        )
    count = micro_batches(pipeline, stages, samples // replicas, least=accumulate)
    if samples < replicas * count:
        raise ConfigError(
            f"data.global_batch_size: {samples} samples cannot be shared by {replicas} x {stages} ranks in "
            f"{replicas} x {count} micro-batches (pipelines x strategy.pipeline.micro_batches); use {replicas * count} "
            "or more"
        )


def micro_batches(config: PipelineConfig, stages: int, samples: int, *, least: int = 1) -> int:
    """Return how many micro-batches a pipeline of ``stages`` ranks makes of its ``samples``.

    Without a number in the config there are four for each rank, or ``least`` if that is more, as long as each has two
    samples (a batch norm needs them). interleaved needs a multiple of the ranks.
    """
    if config.micro_batches is not None:
        return config.micro_batches
    count = max(stages, min(max(4 * stages, least), samples // 2))
    return count - count % stages if config.schedule == "interleaved" else count


class TensorChecks(StrategyChecks):
    def batch(self, config: JobConfig, ranks: int) -> None:
        super().batch(config, ranks)
        size, parts = config.data.global_batch_size, config.train.accumulate
        together = mesh_of(config.strategy, ranks).tensor or 1
        groups = ranks // together
        who = f"{ranks} ranks" if together == 1 else f"{groups} groups of {together} ranks"
        if config.train.compile and size // groups // parts < 2:
            raise ConfigError(
                "train.compile: with torch 2.15 compiled layers that are cut fail, or train to wrong weights, where a "
                f"part of a batch is a single sample (data.global_batch_size {size} on {who} in train.accumulate "
                f"{parts} parts); use more samples, fewer parts, or set it to false"
            )
