"""A criterion that learns (a temperature, weights of several losses): its parameters are trained with the model's."""

from __future__ import annotations

import torch
from torch import nn

from toolkit.dist.collectives import broadcast_tensors
from toolkit.errors import ConfigError, listing
from toolkit.strategies.protocol import Criterion


def learnt(criterion: Criterion) -> nn.Module | None:
    """Return ``criterion`` where it is a module with parameters that are trained, else None."""
    if not isinstance(criterion, nn.Module):
        return None
    return criterion if any(parameter.requires_grad for parameter in criterion.parameters()) else None


def placed(criterion: Criterion, device: torch.device) -> nn.Module | None:
    """Put a criterion that learns on ``device``, with rank 0's first values; every rank calls it."""
    module = learnt(criterion)
    if module is not None:
        module.to(device).train()
        broadcast_tensors([*module.parameters(), *module.buffers()], source=0)
    return module


def refuse_learnt(criterion: Criterion, strategy: str) -> None:
    """Raise ConfigError for a criterion that learns, where ``strategy`` would leave its parameters as they are."""
    module = learnt(criterion)
    if module is not None:
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        raise ConfigError(
            f"strategy.name: {strategy} trains the model alone, and the criterion has parameters, too "
            f"({listing(names, 3)}); use ddp, fsdp, zero or tensor, or make them parameters of the model"
        )
