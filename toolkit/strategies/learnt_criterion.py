"""A criterion that learns (a temperature, weights of several losses). Its parameters are trained with the model's."""

from __future__ import annotations

import torch
from torch import nn

from toolkit.base.errors import ConfigError, listing
from toolkit.ranks.collectives import broadcast_tensors
from toolkit.strategies.objective import Objective


def learnt(objective: Objective) -> nn.Module | None:
    """Return the objective's module if it has parameters that are trained, else None."""
    module = objective.module
    return module if module is not None and any(p.requires_grad for p in module.parameters()) else None


def placed(objective: Objective, device: torch.device) -> nn.Module | None:
    """Put what an objective learns on ``device``, with rank 0's first values. Every rank calls it."""
    module = learnt(objective)
    if module is not None:
        module.to(device).train()
        broadcast_tensors([*module.parameters(), *module.buffers()], source=0)
    return module


def refuse_learnt(objective: Objective, strategy: str) -> None:
    """Raise ConfigError for an objective that learns, whose parameters ``strategy`` would not train."""
    module = learnt(objective)
    if module is not None:
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        raise ConfigError(
            f"strategy.name: {strategy} trains the model alone, and the criterion has parameters, too "
            f"({listing(names, 3)}); use ddp, fsdp, zero or tensor, or make them parameters of the model"
        )
