"""How the ranks share one optimizer step; :func:`build_strategy` picks the class by the config's name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from toolkit.config import StrategyConfig, TrainConfig, mesh_of
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
    "ddp": lambda *given: _spmd("ddp", *given),
    "fsdp": lambda *given: _spmd("fsdp", *given),
    "zero": lambda *given: _spmd("zero", *given),
    "tensor": lambda *given: _spmd("tensor", *given),
    "auto": lambda *given: _auto(*given),
}


def build_strategy(config: StrategyConfig, session: Session, train: TrainConfig | None = None) -> Strategy:
    """The strategy that ``config.name`` stands for, not built yet: its ``share`` is known, its model is not.

    Of ``train`` it takes how a step is computed: precision, accumulation, compiling. Raises ConfigError for an unknown
    name, and for a mesh that does not match the number of ranks.
    """
    if config.name not in _BUILDERS:
        hint = nearest(config.name, _BUILDERS)
        raise ConfigError(f"strategy.name: there is no {config.name!r}; {hint}valid: {', '.join(_BUILDERS)}")
    return _BUILDERS[config.name](config, session, train or TrainConfig())


def _spmd(name: str, config: StrategyConfig, session: Session, train: TrainConfig) -> Strategy:
    layout = _layout(name, config, session, train)
    return Spmd(session, layout, accumulate=train.accumulate, compile=train.compile)


def _auto(config: StrategyConfig, session: Session, train: TrainConfig) -> Strategy:
    from toolkit.strategies.auto import Auto

    def layout(name: str) -> Layout:
        return _layout(name, config, session, train)

    return Auto(session, layout, bf16=train.precision == "bf16", accumulate=train.accumulate, compile=train.compile)


def _layout(name: str, config: StrategyConfig, session: Session, train: TrainConfig) -> Layout:
    sizes = mesh_of(replace(config, name=name), session.world_size)
    how: dict[str, Any] = {
        "bf16": train.precision == "bf16",
        "compile": train.compile,
        "recompute": config.activation_checkpointing,
    }
    if name == "ddp":
        return Replicas(session, **how)
    if name != "tensor":
        return Shards(session, sizes, reshard_after_forward=name == "fsdp", cpu_offload=config.cpu_offload, **how)
    from toolkit.strategies.plan import Plan
    from toolkit.strategies.tensor import TensorParallel

    plan = Plan(config.tensor_plan, config.sequence_parallel)
    if sizes.shards == 1:
        return TensorParallel(session, sizes, plan, **how)
    return Shards(session, sizes, plan=plan, **how)
