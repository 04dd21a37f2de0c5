"""How the ranks share one optimizer step; :func:`build_strategy` picks the class by the config's name."""

from __future__ import annotations

from toolkit.config import StrategyConfig
from toolkit.dist.session import Session
from toolkit.errors import ConfigError, nearest
from toolkit.strategies.protocol import Criterion, Measure, ModelFactory, OptimizerFactory, StepOutput, Strategy, Sums
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

_CLASSES = {"ddp": Spmd}


def build_strategy(
    config: StrategyConfig, session: Session, *, precision: str = "fp32", accumulate: int = 1, compile: bool = False
) -> Strategy:
    """The strategy that ``config.name`` stands for, not built yet: its ``share`` is known, its model is not.

    ``precision`` is fp32 or bf16 (autocast; weights and optimizer stay fp32), ``accumulate`` the number of parts in
    which a rank works through its share of a batch. Raises ConfigError for an unknown name.
    """
    if config.name not in _CLASSES:
        hint = nearest(config.name, _CLASSES)
        raise ConfigError(f"strategy.name: there is no {config.name!r}; {hint}valid: {', '.join(_CLASSES)}")
    return _CLASSES[config.name](session, precision=precision, accumulate=accumulate, compile=compile)
