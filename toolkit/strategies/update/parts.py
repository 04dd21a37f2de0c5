"""Sums over a model of which each rank holds parts. Every element counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from toolkit.ranks.collectives import sum_in_order

#: Sums a small tensor over the ranks that hold other parts of the model.
Total: TypeAlias = Callable[[Tensor], Tensor]
_Groups: TypeAlias = tuple[dist.ProcessGroup, ...]


class ShardedParameters:
    """The parameters of a model, of which this rank may hold parts.

    A DTensor knows over which dimensions of its mesh it is cut. Sums run over those, and not over the others, along
    which it lies whole on each rank. ``total`` is for what a plain tensor does not know: that other ranks hold other
    parameters (the stages of a pipeline, the shards of servers). None: they hold the same ones.
    """

    def __init__(self, parameters: Iterable[Tensor], total: Total | None = None) -> None:
        self._cut = {parameter: _cut_over(parameter) for parameter in parameters}
        self._kinds = list(dict.fromkeys(self._cut.values()))  # same order on all ranks: each is a collective
        self._total = total

    def sum(self, values: Mapping[Tensor, Tensor], like: Tensor) -> Tensor:
        """Return the sum of ``values`` over all parts of all parameters.

        Each value is for this rank's part of a parameter and has the shape of ``like``, which is not changed. Every
        rank calls it.
        """
        whole = torch.zeros_like(like)
        # One collective for each way of cutting; a rank without such parameters adds zeros.
        for kind in self._kinds:
            found = [value for parameter, value in values.items() if self._cut[parameter] == kind]
            part = torch.stack(found).sum(0) if found else torch.zeros_like(like)
            for group in kind:
                part = sum_in_order(part, group)
            whole += part
        return whole if self._total is None else self._total(whole)

    def norm(self, gradients: Mapping[Tensor, Tensor], device: torch.device) -> Tensor:
        """Return the 2-norm of all ranks' ``gradients`` as one vector, float64.

        ``gradients`` are this rank's parts. The norm is that of ``torch.nn.utils.get_total_norm``, but squares are
        added in double precision, in which they do not overflow.
        """
        norms = torch._foreach_norm(list(gradients.values())) if gradients else [torch.zeros((), device=device)]
        squares = torch.stack([*norms]).double().square()
        if self._kinds in ([], [()]) and self._total is None:  # replicas, the common case
            return squares.sum().sqrt()
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return self.sum(dict(zip(gradients, squares, strict=False)), zero).sqrt()


def _cut_over(parameter: Tensor) -> _Groups:
    """Return the process groups whose ranks hold different parts of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    cut = (dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return tuple(mesh.get_group(dim) for dim in cut if mesh.size(dim) > 1)
