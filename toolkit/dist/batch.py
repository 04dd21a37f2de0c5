"""A rank's part of a global batch, and which part that is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Share:
    """Part ``index`` of ``count`` parts of every global batch; with ``count`` 0 this rank gets no data at all.

    Ranks that work on the same samples (of one tensor-parallel group, say) hold equal shares.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 0 or not 0 <= self.index < max(self.count, 1):
            raise ValueError(f"share {self.index} of {self.count}: the index must be within 0..count-1")

    def bounds(self, size: int) -> tuple[int, int]:
        """``(start, stop)`` of this share in ``range(size)``; the parts tile it and differ in length by at most one."""
        if self.count == 0:
            return 0, 0
        return self.index * size // self.count, (self.index + 1) * size // self.count


@dataclass(frozen=True)
class BadSample:
    """Sample ``index`` of the data set could not be loaded: another one stands at ``position`` in its place."""

    index: int
    position: int
    error: str

    def __str__(self) -> str:
        return f"sample {self.index} of the data set (position {self.position} of the run)"


@dataclass(frozen=True)
class Batch:
    """Samples of one global batch that one rank works on.

    ``inputs`` (n, ...) and ``targets`` (n, ...) lie on one device. ``positions`` (n,) int64, always on the CPU, says
    where each sample stands in the order of the whole run (in evaluation: its index in the eval set).
    ``global_count`` is the number of samples that all shares together hold in this step: the divisor of the loss.
    ``bad`` names the samples that should have been here and were replaced; ``stream_state``, in JSON, is where the
    stream stands after them, if they come from one. Parts of a batch repeat neither.
    """

    inputs: Tensor
    targets: Tensor
    positions: Tensor
    global_count: int
    bad: tuple[BadSample, ...] = ()
    stream_state: str | None = None

    def __len__(self) -> int:
        return self.positions.shape[0]

    def to(self, device: torch.device | str) -> Batch:
        """The batch with inputs and targets on ``device``; from pinned memory the host does not wait for the copy."""
        inputs = self.inputs.to(device, non_blocking=True)
        targets = self.targets.to(device, non_blocking=True)
        return replace(self, inputs=inputs, targets=targets)

    def pin_memory(self) -> Batch:
        """The batch in page-locked host memory; torch's DataLoader calls this by name."""
        return replace(self, inputs=self.inputs.pin_memory(), targets=self.targets.pin_memory())

    def split(self, parts: int) -> list[Batch]:
        """``parts`` micro-batches in order, of sizes that differ by at most one (0 where there are fewer samples).

        Each keeps ``global_count``, so losses divided by it add up to the loss of the whole.
        """
        return [self._part(*Share(index, parts).bounds(len(self))) for index in range(parts)]

    def _part(self, start: int, stop: int) -> Batch:
        part = slice(start, stop)
        return Batch(self.inputs[part], self.targets[part], self.positions[part], self.global_count)
