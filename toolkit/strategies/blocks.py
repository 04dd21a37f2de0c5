"""The blocks of a model: the parts that it repeats. Examples are the layers of a transformer or a residual network."""

from __future__ import annotations

from collections import Counter
from functools import partial

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

from toolkit.base.errors import ConfigError
from toolkit.config import StrategyConfig

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of ``model``, in order.

    A block is an outermost module of which a list or sequence holds several of one class. A single layer (Linear) is
    not a block, however often it occurs.
    """
    found: list[nn.Module] = []
    kinds = Counter(type(child) for child in model.children()) if isinstance(model, _CONTAINERS) else Counter()
    for child in model.children():
        # Repeated in a container, with children and parameters of its own.
        is_block = (
            kinds[type(child)] > 1 and any(True for _ in child.children()) and any(True for _ in child.parameters())
        )
        found += [child] if is_block else blocks(child)
    return found


def recomputed(config: StrategyConfig) -> int:
    """Return n if one of n blocks is to compute its activations again. 0: no block is."""
    return config.activation_checkpointing_every if config.activation_checkpointing else 0


def checkpoint_activations(model: nn.Module, every: int = 1) -> None:
    """Let blocks keep only their inputs for the backward pass, which computes the rest again. Names stay.

    Of ``every`` blocks in a row the last one does so. Raises ConfigError if there is no block, or if a second pass
    would change more than it computes.
    """
    parts = blocks(model)
    if not parts:
        raise ConfigError(
            "strategy.activation_checkpointing: this model repeats no block (several modules of one class in a "
            "ModuleList or Sequential) whose activations could be computed again; set it to false"
        )
    # A recomputed forward pass updates running statistics a second time.
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            raise ConfigError(
                f"strategy.activation_checkpointing: {name} would count each batch twice in its running statistics; "
                "set it to false, or use a model without BatchNorm"
            )
    if every > len(parts):
        raise ConfigError(
            f"strategy.activation_checkpointing_every: this model has {len(parts)} blocks, fewer than {every}; use a "
            "smaller number, or set strategy.activation_checkpointing to false"
        )
    for part in parts[every - 1 :: every]:
        part.forward = partial(checkpoint, part.forward, use_reentrant=False)
