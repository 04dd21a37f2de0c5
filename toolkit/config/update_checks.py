"""Checks what a config asks for between the gradients and the weights of a step.

Many of these options go with some strategies only.
"""

from __future__ import annotations

from typing import Any

from toolkit.config.schema import STATELESS, JobConfig, StrategyConfig, TrainConfig
from toolkit.config.strategy_traits import SYNC_BATCH_NORM, WHOLE_UPDATE
from toolkit.errors import ConfigError


def check_step(train: TrainConfig, strategy: StrategyConfig) -> None:
    """Refuse what cannot be done between the gradients and the weights of a step. Raises ConfigError.

    A key is refused by itself, or with this strategy.
    """
    for key in ("spike_factor", "rollback_after"):
        if getattr(train, key) is not None and not train.skip_bad_steps:
            raise ConfigError(f"train.{key}: nothing is left out without train.skip_bad_steps: true; set that, too")
    if train.ema_decay is not None and not 0 < train.ema_decay < 1:
        raise ConfigError(f"train.ema_decay: {train.ema_decay} is refused; between 0 and 1, such as 0.999")
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
    pruning = train.pruning
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


def check_compression(config: JobConfig) -> None:
    """Refuse compression that does not go with the strategy or the precision. Raises ConfigError."""
    # Combinations first, then the values of single keys.
    strategy, kind = config.strategy, config.strategy.compression
    if strategy.find_unused and (strategy.name != "ddp" or kind != "none"):
        other = f"strategy.name: {strategy.name}" if strategy.name != "ddp" else f"strategy.compression: {kind}"
        raise ConfigError(
            f"strategy.find_unused: goes with strategy.name: ddp only, and not with {other}; leave it out"
        )
    # fsdp and zero reduce the gradients themselves: only the number format can be chosen.
    goes_with_shards = kind == "bf16" and strategy.name in ("fsdp", "zero")
    if kind != "none" and strategy.name != "ddp" and not goes_with_shards:
        raise ConfigError(
            f"strategy.compression: {kind} goes with strategy.name: ddp only, whose gradients lie whole on every rank; "
            f"with {strategy.name} set it to none (with fsdp and zero bf16 can be used too)"
        )
    if goes_with_shards and strategy.compression_layers:
        raise ConfigError(
            f"strategy.compression_layers: with strategy.name: {strategy.name} all gradients are sent in "
            "bf16; leave it {}"
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
    if strategy.compression_average is not None:
        if not 0 < strategy.compression_average < 1:
            raise ConfigError(
                f"strategy.compression_average: {strategy.compression_average} is refused; between 0 and 1, such as 0.9"
            )
        if kind in STATELESS:
            raise ConfigError(
                f"strategy.compression_average: with strategy.compression: {kind} nothing is sent late that an average "
                "could steady; leave it null, or use topk, powersgd or int8"
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
