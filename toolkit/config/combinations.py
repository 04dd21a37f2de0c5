"""Checks of what several sections of a config ask for together; a section's own are with its keys."""

from __future__ import annotations

from toolkit.base.errors import ConfigError
from toolkit.config.schema import JobConfig, TrainConfig, value_of
from toolkit.config.strategy import (
    OWN_TIME,
    SHARDED,
    STATELESS,
    SYNC_BATCH_NORM,
    WHOLE_UPDATE,
    StrategyConfig,
    mesh_of,
    micro_batches,
)


def check_combinations(config: JobConfig) -> None:
    """Refuse what the chosen strategy, or another section, cannot do. Raises ConfigError."""
    _check_local_sgd(config)
    _check_custom(config)
    _check_data(config)
    check_step(config.train, config.strategy)
    _check_optim(config)
    _check_compression(config)


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


def _check_data(config: JobConfig) -> None:
    data, strategy = config.data, config.strategy
    if data.share == "auto" and strategy.name not in OWN_TIME:
        raise ConfigError(
            "data.share: auto needs each rank's own time of a step, and shares of any size; with strategy.name "
            f"{strategy.name} ranks wait for each other all through a step, or shapes are fixed: use "
            f"{', '.join(OWN_TIME)}, or even"
        )
    if data.split != "global" and config.retry.allow_fewer_nodes:
        raise ConfigError(
            f"retry.allow_fewer_nodes: does not go with data.split: {data.split}: fewer ranks would have other parts; "
            "use false, or data.split: global"
        )


def check_step(train: TrainConfig, strategy: StrategyConfig) -> None:
    """Refuse what this strategy cannot do between the gradients and the weights of a step. Raises ConfigError."""
    if strategy.name not in WHOLE_UPDATE:
        _check_some_of_step(train, strategy)
    # Single keys that go with some strategies only.
    if train.pruning.amount and train.pruning.structured and strategy.name == "pipeline":
        raise ConfigError(
            "train.pruning.structured: with strategy.name pipeline each rank would leave the outputs of its own last "
            "layer whole, and not only those of the model's; set it to false, or use fsdp"
        )
    if train.precision == "fp16" and strategy.name != "ddp":
        raise ConfigError(f"train.precision: fp16 goes with strategy.name ddp only, not {strategy.name}; use bf16")
    if train.channels_last and strategy.name != "ddp":
        raise ConfigError(
            f"train.channels_last: goes with strategy.name ddp only, not {strategy.name}; set it to false"
        )
    if train.sync_batch_norm and (strategy.name not in SYNC_BATCH_NORM or train.compile):
        other = "train.compile" if train.compile else f"strategy.name {strategy.name}"
        raise ConfigError(
            f"train.sync_batch_norm: goes with strategy.name {', '.join(SYNC_BATCH_NORM)} and without train.compile, "
            f"and not with {other}; set it to false"
        )


def _check_some_of_step(train: TrainConfig, strategy: StrategyConfig) -> None:
    """Refuse what strategies outside of ``WHOLE_UPDATE`` cannot do.

    local_sgd clips each rank's gradient by its own norm. A parameter server that is the only one does what does not
    concern its workers.
    """
    asked = [key for key in ("clip_norm", "skip_bad_steps", "ema_decay") if getattr(train, key)]
    asked += ["pruning"] if train.pruning.amount else []
    served = strategy.parameter_server
    for key in asked:
        if strategy.name != "parameter_server":
            if (key, strategy.name) != ("clip_norm", "local_sgd"):
                raise ConfigError(f"train.{key}: does not go with strategy.name {strategy.name}; leave it out")
            continue
        # Clipping and pruning need the gradients and weights alone, which a single server has.
        if key not in ("clip_norm", "pruning"):
            why = "workers, who evaluate and keep the buffers, hear nothing of it; leave it out, or use ddp"
        elif key == "pruning" and served.mode != "sync":
            why = f"it goes by steps, and in mode {served.mode} an update is less than one; use mode sync"
        elif served.servers > 1:
            why = "a server sees its own part of the gradient only; set strategy.parameter_server.servers to 1"
        else:
            continue
        raise ConfigError(f"train.{key}: does not go with strategy.name parameter_server so: {why}")


def _check_optim(config: JobConfig) -> None:
    optim, strategy = config.optim, config.strategy
    if optim.name == "muon" and strategy.name == "parameter_server" and strategy.parameter_server.servers > 1:
        raise ConfigError(
            "optim.name: muon needs each matrix as a whole, and with strategy.parameter_server.servers "
            f"{strategy.parameter_server.servers} a server has some of its rows; set that to 1, or use adamw"
        )
    if optim.layer_decay is not None and strategy.name in ("pipeline", "custom"):
        raise ConfigError(
            f"optim.layer_decay: needs all blocks of one model, and with strategy.name {strategy.name} a rank or a "
            "network has some; give rates as optim.groups.PATTERN.lr_scale"
        )
    if config.train.skip_bad_steps and optim.name == "sgd" and strategy.name in SHARDED:
        raise ConfigError(
            f"train.skip_bad_steps: torch's sgd cannot leave out a step of weights that {strategy.name} cuts; "
            "use optim.name adam, adamw or muon, or strategy.name ddp"
        )


def _check_compression(config: JobConfig) -> None:
    kind = config.strategy.compression
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
