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


class StageModule(nn.Module):
    """One stage: its layers in a row. The first pass sets ``takes`` and ``gives``."""

    takes: RowShape
    gives: RowShape

    def __init__(
        self,
        number: int,
        chain: Sequence[nn.Module],
        precision: Callable[[], AbstractContextManager[object]],
        device: torch.device,
    ) -> None:
        """Make a stage of the layers ``chain``.

        ``number`` sets its random numbers apart from those of other stages; stages are as many numbers apart as there
        are micro-batches.
        """
        super().__init__()
        self.chain = nn.Sequential(*chain)
        self._number, self._precision, self._device = number, precision, device
        self._seed = 0

    def begin(self, seed: int) -> None:
        """Begin a step; its micro-batches follow in the order of their numbers."""
        self._seed = seed + self._number

    def forward(self, inputs: Tensor) -> Tensor:
        # A stage passes micro-batches in the order of their numbers, so a counter gives each its seed.
        if self.training:
            torch.default_generator.manual_seed(self._seed)
            if self._device.type == "cuda":
                torch.cuda.manual_seed(self._seed)
            self._seed += 1
        with self._precision():
            outputs: Tensor = self.chain(inputs)
        self.takes = RowShape(tuple(inputs.shape[1:]), inputs.dtype)
        self.gives = RowShape(tuple(outputs.shape[1:]), outputs.dtype)
        return outputs
