"""channels_last: in memory the channel is the innermost dimension of images and convolutions' weights.

Most convolutions for GPUs with tensor cores, and oneDNN's for CPUs, want this layout and would convert each time.
Shapes, names and results (to rounding) stay. A checkpoint does not depend on it: tensors are written in the order of
their dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from toolkit.base import logs

log = logs.get(__name__)


def use_channels_last(model: nn.Module) -> None:
    """Lay out ``model``'s parameters of four dimensions channels-last, and each such input when it arrives."""
    model.to(memory_format=torch.channels_last)
    if not any(parameter.ndim == 4 for parameter in model.parameters()):
        log.warning("train.channels_last changes nothing: this model has no weights of four dimensions")
        return

    def lay_out(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        laid_out = []
        for value in inputs:
            is_image = isinstance(value, Tensor) and value.ndim == 4
            laid_out.append(value.contiguous(memory_format=torch.channels_last) if is_image else value)
        return tuple(laid_out)

    model.register_forward_pre_hook(lay_out)
