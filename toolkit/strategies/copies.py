"""Refuses models whose ``state_dict()`` has copies of weights or buffers. A load fills those, and not the model."""

from __future__ import annotations

from torch import Tensor, nn

from toolkit.base.errors import ConfigError
from toolkit.strategies.layouts import local


def refuse_copies(where: str, module: nn.Module) -> None:
    """Raise ConfigError, beginning with ``where``, if the ``state_dict`` has copies of weights or buffers."""
    if type(module).__name__ == "FullyShardedDataParallel":
        raise ConfigError(
            f"{where} is sharded by FullyShardedDataParallel, whose state_dict() has copies; shard with "
            "torch.distributed.fsdp.fully_shard instead"
        )
    state = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
    stored = {_memory_of(value) for value in state.values()}
    # Frozen weights come from elsewhere: quantized ones, for example, are stored in a form of their own.
    trained = {key: parameter for key, parameter in module.named_parameters() if parameter.requires_grad}
    saved = {key: buffer for key, buffer in module.named_buffers() if key in state}
    for key, tensor in (trained | saved).items():
        if tensor.numel() and _memory_of(tensor) not in stored:
            raise ConfigError(
                f"{where}: its state_dict() has a copy of {key}, or lacks it, and filling that from a checkpoint would "
                "change nothing; have state_dict() return the tensor itself"
            )


def _memory_of(tensor: Tensor) -> int:
    try:
        return local(tensor).untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a kind of tensor that is made of others
        return 0
