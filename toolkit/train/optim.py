"""The optimizer, and its learning rate as a pure function of the step: there is no scheduler whose state to save."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from toolkit.config import OptimConfig
from toolkit.errors import ConfigError, nearest

Schedule: TypeAlias = Callable[[int], float]
#: Devices for which torch has fused optimizers.
_FUSED = ("cpu", "cuda")


def build_optimizer(config: OptimConfig, model: nn.Module) -> Optimizer:
    """The optimizer that ``config.name`` stands for, over the parameters of ``model`` that are not frozen.

    Fused, that is with one kernel for all parameters, where torch has it: faster, and able to leave out a step without
    the host knowing. For sharded weights it has no fused SGD.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    fused = all(parameter.device.type in _FUSED and parameter.is_floating_point() for parameter in parameters)
    if config.name == "sgd":
        fused = fused and not any(isinstance(parameter, DTensor) for parameter in parameters)
        return SGD(parameters, config.lr, momentum=config.momentum, weight_decay=config.weight_decay, fused=fused)
    if config.name == "adam":
        return Adam(parameters, config.lr, weight_decay=config.weight_decay, fused=fused)
    if config.name == "adamw":
        return AdamW(parameters, config.lr, weight_decay=config.weight_decay, fused=fused)
    raise _unknown("optim.name", config.name, ("sgd", "adam", "adamw"))


def build_schedule(config: OptimConfig, total_steps: int) -> Schedule:
    """``lr(step)`` for steps 0 to ``total_steps`` - 1: a linear warm-up to ``config.lr``, then the schedule's shape.

    Warm-up step n (from 0) has lr * (n + 1) / warmup_steps: the first step moves, the last one has the full rate. After
    it ``linear`` and ``cosine`` fall from lr towards 0, which they would reach at step ``total_steps``.
    """
    if config.schedule not in _SHAPES:
        raise _unknown("optim.schedule", config.schedule, tuple(_SHAPES))
    return partial(_rate, _SHAPES[config.schedule], config.lr, config.warmup_steps, total_steps)


def _rate(shape: Callable[[float], float], peak: float, warmup: int, total: int, step: int) -> float:
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * shape(min(1.0, (step - warmup) / max(1, total - warmup)))


_SHAPES: dict[str, Callable[[float], float]] = {  # of the part done after the warm-up, 0 to 1
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def _unknown(key: str, name: str, valid: tuple[str, ...]) -> ConfigError:
    return ConfigError(f"{key}: there is no {name!r}; {nearest(name, valid)}valid: {', '.join(valid)}")
