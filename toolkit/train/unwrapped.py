"""Takes the wrappers off models and optimizers that a script hands over."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from toolkit.base.errors import ConfigError
from toolkit.strategies.update.optimizer_state import refuse_lost_state


def bare(module: nn.Module) -> nn.Module:
    """Return the module within DDP, DataParallel, torch.compile and Fabric, whose names are the model's own."""
    while True:
        if isinstance(module, (DistributedDataParallel, nn.DataParallel)):
            module = module.module
        elif is_compiled(module):
            module = module._orig_mod  # type: ignore[assignment]
        elif type(module).__name__ == "_FabricModule":
            module = module._forward_module  # type: ignore[assignment]
        else:
            return module


def is_compiled(module: nn.Module) -> bool:
    """True for what ``torch.compile(module)`` returns. Goes by name: importing torch's compiler takes a second."""
    return type(module).__name__ == "OptimizedModule"


def is_metric(module: nn.Module) -> bool:
    """True for a metric of torchmetrics.

    It is a module whose state is each rank's own, and is not in its ``state_dict`` unless asked for.
    """
    return any(kind.__module__.startswith("torchmetrics") for kind in type(module).__mro__)


def bare_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer within accelerate's or Fabric's wrapper.

    Raises ConfigError for others with a state that would be lost, and for torch's ZeroRedundancyOptimizer.
    """
    if type(optimizer).__name__ == "ZeroRedundancyOptimizer":
        raise ConfigError(
            "run.resumable: ZeroRedundancyOptimizer keeps parts of its state on each rank, under numbers that change "
            "with their count; shard with torch.distributed.fsdp.fully_shard instead"
        )
    # Without a state of their own. By name: neither library need be installed.
    if not {"AcceleratedOptimizer", "_FabricOptimizer"}.isdisjoint(kind.__name__ for kind in type(optimizer).__mro__):
        return bare_optimizer(optimizer.optimizer)  # type: ignore[attr-defined]
    refuse_lost_state(optimizer, "run.resumable")
    return optimizer
