"""A rank's part of a global batch, and which part that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from toolkit.base.errors import JobCodeError
from toolkit.ranks import nested


@dataclass(frozen=True)
class Share:
    """Part ``index`` of ``count`` parts of every global batch. With ``count`` 0 this rank gets no data.

    Ranks that work on the same samples (those of one tensor-parallel group, say) hold equal shares::

        >>> toolkit.Share(index=1, count=3).bounds(10)
        (3, 6)
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if self.count < 0 or not 0 <= self.index < max(self.count, 1):
            raise ValueError(f"share {self.index} of {self.count}: the index must be within 0..count-1")

    def bounds(self, size: int) -> tuple[int, int]:
        """Return its ``(start, stop)`` in ``range(size)``. Parts tile it, with lengths that differ by at most one."""
        if self.count == 0:
            return 0, 0
        return self.index * size // self.count, (self.index + 1) * size // self.count


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be loaded. ``index`` is its index in the data set; another stands at ``position``."""

    index: int
    position: int
    error: str

    def __str__(self) -> str:
        return f"sample {self.index} of the data set (position {self.position} of the run)"


@dataclass(frozen=True)
class Batch:
    """Samples of one global batch that one rank works on.

    ``data`` is what the samples were collated to: nested as a sample is, with a row for each in every tensor, on one
    device. ``batch[key]`` and unpacking go to ``data``; ``len(batch)`` is the number of samples. ``positions`` (n,)
    int64, always on the CPU, says where each sample stands in the order of the whole run (in evaluation: its index in
    the eval set). ``global_count`` is the number of samples that all shares together hold in this step: the divisor of
    the loss. ``bad`` names the samples that should have been here and were replaced; ``stream_state``, in JSON, is
    where the stream stands after them, if they come from one. Parts of a batch have neither. ``is_stacked`` is false
    if a collate function of the job's own made ``data``::

        >>> data = {"image": torch.zeros(2, 8, 8), "label": torch.tensor([3, 5])}
        >>> batch = toolkit.Batch(data, positions=torch.tensor([6, 7]), global_count=4)
        >>> len(batch), batch["label"]
        (2, tensor([3, 5]))
    """

    data: Any
    positions: Tensor
    global_count: int
    bad: tuple[BadSample, ...] = ()
    stream_state: str | None = None
    is_stacked: bool = True

    def __len__(self) -> int:
        return self.positions.shape[0]

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    @property
    def inputs(self) -> Any:
        """Return the first of a pair (inputs, targets). Raises JobCodeError if the samples are no pairs."""
        return self._pair()[0]

    @property
    def targets(self) -> Any:
        """Return the second of a pair (inputs, targets). Raises JobCodeError if the samples are no pairs."""
        return self._pair()[1]

    def _pair(self) -> Any:
        if isinstance(self.data, (tuple, list)) and len(self.data) == 2:
            return self.data
        raise JobCodeError(
            f"data: a batch has inputs and targets where a sample is a pair, and here it is a "
            f"{type(self.data).__name__}: use batch.data, or batch[...]"
        )

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with ``function`` of each tensor in its data."""
        return replace(self, data=nested.map_tensors(function, self.data))

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch with its tensors on ``device``. From pinned memory the host does not wait for the copy."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked host memory. torch's DataLoader calls this by name."""
        return self.map(Tensor.pin_memory)

    def split(self, parts: int) -> list[Batch]:
        """Return ``parts`` micro-batches in order, with sizes that differ by at most one.

        If there are fewer samples than parts, some are empty. Each keeps ``global_count``, so losses divided by it add
        up to the loss of the whole. Raises JobCodeError for data that cannot be split.
        """
        return [self.part(*Share(index, parts).bounds(len(self))) for index in range(parts)]

    def part(self, start: int, stop: int) -> Batch:
        """Return samples ``start`` to ``stop`` of these. Raises JobCodeError for data that cannot be split."""
        part = slice(start, stop)
        try:
            data = nested.slice_samples(self.data, len(self), part, is_stacked=self.is_stacked)
        except nested.NestingError as error:
            raise JobCodeError(
                f"data: a batch cannot be cut into parts (train.accumulate, pipeline): {error}; give every tensor of "
                "it a row for each sample, or do without parts"
            ) from None
        return Batch(data, self.positions[part], self.global_count, is_stacked=self.is_stacked)
