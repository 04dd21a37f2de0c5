"""How the ranks share one optimizer step; :func:`build_strategy` picks the class by the config's name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from toolkit.config import StrategyConfig, TrainConfig, check_step
from toolkit.dist.session import Session
from toolkit.errors import ConfigError, nearest
from toolkit.strategies.layout import Layout
from toolkit.strategies.protocol import Criterion, Measure, ModelFactory, OptimizerFactory, StepOutput, Strategy, Sums
from toolkit.strategies.replicas import Replicas
from toolkit.strategies.shards import Shards
from toolkit.strategies.spmd import Spmd

__all__ = [
    "Criterion",
    "Measure",
    "ModelFactory",
    "OptimizerFactory",
    "StepOutput",
    "Strategy",
    "Sums",
    "build_strategy",
]

#: A strategy of each name, not built yet. Imported only where it is used: torch's pipelining alone takes a second.
_BUILDERS: dict[str, Callable[[StrategyConfig, Session, TrainConfig], Strategy]] = {
    "ddp": lambda *given: _spmd(_replicas(given[0], given[2]), *given),
    "fsdp": lambda *given: _spmd(Shards, *given),
    "zero": lambda *given: _spmd(partial(Shards, reshard_after_forward=False), *given),
    "parameter_server": lambda *given: _parameter_server(*given),
}


def build_strategy(config: StrategyConfig, session: Session, train: TrainConfig | None = None) -> Strategy:
    """The strategy that ``config.name`` stands for, not built yet: its ``share`` is known, its model is not.

    Of ``train`` it takes how a step is computed: precision, accumulation, compiling. Raises ConfigError for an unknown
    name, and where ``train`` asks for what this strategy cannot do.
    """
    if config.name not in _BUILDERS:
        hint = nearest(config.name, _BUILDERS)
        raise ConfigError(f"strategy.name: there is no {config.name!r}; {hint}valid: {', '.join(_BUILDERS)}")
    train = train or TrainConfig()
    check_step(train, config)
    return _BUILDERS[config.name](config, session, train)


def _replicas(config: StrategyConfig, train: TrainConfig) -> Callable[..., Layout]:
    if config.compression == "none":
        return partial(Replicas, fp16=train.precision == "fp16", channels_last=train.channels_last)
    from toolkit.strategies.compressed import Compressed

    return partial(Compressed, config=config, channels_last=train.channels_last)


def _spmd(make: Callable[..., Layout], config: StrategyConfig, session: Session, train: TrainConfig) -> Strategy:
    bf16, recompute = train.precision == "bf16", config.activation_checkpointing
    layout = make(session, bf16=bf16, compile=train.compile, recompute=recompute)
    return Spmd(session, layout, accumulate=train.accumulate, compile=train.compile, train=train)


def _parameter_server(config: StrategyConfig, session: Session, train: TrainConfig) -> Strategy:
    from toolkit.strategies import parameter_server

    return parameter_server.build(config, session, train)
