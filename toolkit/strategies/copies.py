"""Refuses models whose ``state_dict()`` has copies of the weights. A load fills those, and not the model."""

from __future__ import annotations

from torch import Tensor, nn

from toolkit.errors import ConfigError
from toolkit.strategies.layouts import local


def refuse_copies(where: str, module: nn.Module) -> None:
    """Raise ConfigError, beginning with ``where``, if the ``state_dict`` has copies of weights or lacks some."""
    if type(module).__name__ == "FullyShardedDataParallel":
        raise ConfigError(
            f"{where} is sharded by FullyShardedDataParallel, whose state_dict() has copies; shard with "
            "torch.distributed.fsdp.fully_shard instead"
        )
    stored = {_memory_of(value) for value in module.state_dict().values() if isinstance(value, Tensor)}
    for key, parameter in module.named_parameters():
        # Frozen ones come from elsewhere: quantized weights, for example, are stored in a form of their own.
        if parameter.requires_grad and parameter.numel() and _memory_of(parameter) not in stored:
            raise ConfigError(
                f"{where}: its state_dict() has a copy of {key}, or lacks it, and filling that from a checkpoint would "
                "change nothing; have state_dict() return the tensor itself"
            )


def _memory_of(tensor: Tensor) -> int:
    try:
        return local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a kind of tensor that is made of others
        return 0
