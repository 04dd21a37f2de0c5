"""How the ranks share one optimizer step; :func:`build_strategy` picks the class by the config's name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from toolkit.config import StrategyConfig
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

_LAYOUTS: dict[str, Callable[..., Layout]] = {
    "ddp": Replicas,
    "fsdp": Shards,
    "zero": partial(Shards, reshard_after_forward=False),
}


def build_strategy(
    config: StrategyConfig, session: Session, *, precision: str = "fp32", accumulate: int = 1, compile: bool = False
) -> Strategy:
    """The strategy that ``config.name`` stands for, not built yet: its ``share`` is known, its model is not.

    ``precision`` is fp32 or bf16 (weights and optimizer stay fp32), ``accumulate`` the number of parts in which a rank
    works through its share of a batch. Raises ConfigError for an unknown name.
    """
    if config.name not in _LAYOUTS:
        hint = nearest(config.name, _LAYOUTS)
        raise ConfigError(f"strategy.name: there is no {config.name!r}; {hint}valid: {', '.join(_LAYOUTS)}")
    layout = _LAYOUTS[config.name](
        session.device, bf16=precision == "bf16", compile=compile, recompute=config.activation_checkpointing
    )
    return Spmd(session, layout, accumulate=accumulate, compile=compile)
