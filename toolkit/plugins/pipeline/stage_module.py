"""One stage of a pipeline as a module, in the form that torch's pipelining wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class RowShape:
    """The shape of a tensor, without the number of samples in its first dimension."""

    row: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, samples: int, device: torch.device) -> Tensor:
        return torch.empty((samples, *self.row), dtype=self.dtype, device=device)


class LayerChain(nn.ModuleList):
    """Layers that are called one after the other; some are also given the model's input."""

    def __init__(self, layers: Sequence[nn.Module], take_input: Sequence[bool]) -> None:
        super().__init__(layers)
        self._take_input = tuple(take_input)

    def forward(self, hidden: Tensor, given: Tensor | None) -> Tensor:
        """Return the last layer's output; ``given`` is the model's input."""
        for layer, takes_input in zip(self, self._take_input, strict=True):
            hidden = layer(hidden, given) if takes_input else layer(hidden)
        return hidden


class StageModule(nn.Module):
    """One stage: its layers in a row. The first pass sets ``takes`` and ``gives``."""

    takes: RowShape
    gives: RowShape

    def __init__(
        self,
        number: int,
        chain: LayerChain,
        precision: Callable[[], AbstractContextManager[object]],
        device: torch.device,
    ) -> None:
        """Make a stage of ``chain``.

        ``number`` sets its random numbers apart from those of other stages; stages are as many numbers apart as there
        are micro-batches.
        """
        super().__init__()
        self.chain = chain
        self._number, self._precision, self._device = number, precision, device
        self._seed = 0

    def begin(self, seed: int) -> None:
        """Begin a step; its micro-batches follow in the order of their numbers."""
        self._seed = seed + self._number

    def forward(self, inputs: Tensor, given: Tensor | None = None) -> Tensor:
        # A stage passes micro-batches in the order of their numbers, so a counter gives each its seed.
        if self.training:
            torch.default_generator.manual_seed(self._seed)
            if self._device.type == "cuda":
                torch.cuda.manual_seed(self._seed)
            self._seed += 1
        with self._precision():
            outputs: Tensor = self.chain(inputs, given)
        self.takes = RowShape(tuple(inputs.shape[1:]), inputs.dtype)
        self.gives = RowShape(tuple(outputs.shape[1:]), outputs.dtype)
        return outputs
