"""How the ranks share one optimizer step; :func:`build_strategy` picks the class by the config's name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from toolkit.config import StrategyConfig, TrainConfig
from toolkit.dist.session import Session
from toolkit.errors import ConfigError, nearest
from toolkit.strategies.alone import Alone, data_parallel
from toolkit.strategies.custom import Custom
from toolkit.strategies.layout import Layout
from toolkit.strategies.local_sgd import LocalSgd
from toolkit.strategies.protocol import Criterion, Measure, ModelFactory, OptimizerFactory, StepOutput, Strategy, Sums
from toolkit.strategies.replicas import Replicas
from toolkit.strategies.shards import Shards
from toolkit.strategies.spmd import Spmd

__all__ = [
    "Criterion",
    "Custom",
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
    "custom": lambda *given: _custom(),
    "ddp": lambda *given: _spmd(Replicas, *given),
    "dp": lambda *given: _spmd(data_parallel, *given),
    "fsdp": lambda *given: _spmd(Shards, *given),
    "local_sgd": lambda *given: _local_sgd(*given),
    "zero": lambda *given: _spmd(partial(Shards, reshard_after_forward=False), *given),
}


def build_strategy(config: StrategyConfig, session: Session, train: TrainConfig | None = None) -> Strategy:
    """The strategy that ``config.name`` stands for, not built yet: its ``share`` is known, its model is not.

    Of ``train`` it takes how a step is computed: precision, accumulation, compiling. Raises ConfigError for an unknown
    name.
    """
    if config.name not in _BUILDERS:
        hint = nearest(config.name, _BUILDERS)
        raise ConfigError(f"strategy.name: there is no {config.name!r}; {hint}valid: {', '.join(_BUILDERS)}")
    return _BUILDERS[config.name](config, session, train or TrainConfig())


def _local_sgd(config: StrategyConfig, session: Session, train: TrainConfig) -> Strategy:
    bf16, recompute = train.precision == "bf16", config.activation_checkpointing
    make = Replicas if config.local_sgd.after_steps else Alone  # DDP's buckets are as large as the model
    layout = make(session, bf16=bf16, compile=train.compile, recompute=recompute)
    return LocalSgd(session, config.local_sgd, layout, accumulate=train.accumulate, compile=train.compile)


def _custom() -> Strategy:
    raise ConfigError(
        "strategy.name: custom is for a job with a step of its own, a subclass of toolkit.strategies.Custom that the "
        "job makes itself (see jobs/custom.py); this job asks for one of the toolkit's: use ddp"
    )


def _spmd(make: Callable[..., Layout], config: StrategyConfig, session: Session, train: TrainConfig) -> Strategy:
    bf16, recompute = train.precision == "bf16", config.activation_checkpointing
    layout = make(session, bf16=bf16, compile=train.compile, recompute=recompute)
    return Spmd(session, layout, accumulate=train.accumulate, compile=train.compile)
