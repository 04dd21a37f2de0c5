"""How the parameters of a model are cut into the parts that servers keep, and how tensors lie in one message."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

#: Where a tensor may begin in a message: torch wants a multiple of the element's size.
_ALIGN_BYTES = 16


@dataclass(frozen=True)
class Cut:
    """Server j keeps rows ``bounds[j]`` to ``bounds[j + 1]`` of a parameter of ``shape``."""

    shape: tuple[int, ...]
    bounds: tuple[int, ...]

    def rows(self, server: int | None) -> tuple[int, int]:
        """``(start, stop)``; None stands for a rank that keeps none."""
        return (0, 0) if server is None else (self.bounds[server], self.bounds[server + 1])

    def part_shape(self, server: int | None) -> tuple[int, ...]:
        start, stop = self.rows(server)
        return (stop - start, *self.shape[1:])

    def offsets(self, server: int | None) -> tuple[int, ...]:
        return (self.rows(server)[0], *[0] * (len(self.shape) - 1))


def is_cut(parameter: Tensor) -> bool:
    """Every rank keeps what has no dimension, and what is frozen, whole."""
    return parameter.ndim > 0 and parameter.requires_grad


def cut(model: nn.Module, servers: int) -> dict[str, Cut]:
    """A cut for each parameter that has one, by name: one after the other they are ``servers`` runs of whole rows, as
    equal in bytes as rows allow."""
    named = {name: parameter for name, parameter in model.named_parameters() if is_cut(parameter)}
    total = sum(parameter.nbytes for parameter in named.values())
    cuts, start = {}, 0
    for name, parameter in named.items():
        rows = parameter.shape[0]
        row_bytes = max(parameter.nbytes // max(rows, 1), 1)
        ends = ((total * j // servers - start + row_bytes // 2) // row_bytes for j in range(1, servers))
        cuts[name] = Cut(tuple(parameter.shape), (0, *(min(max(end, 0), rows) for end in ends), rows))
        start += parameter.nbytes
    return cuts


def shadow(model: nn.Module, cuts: Mapping[str, Cut], server: int | None) -> nn.Module:
    """A copy of ``model`` that has the parts of ``server`` for parameters, and shares what is not cut.

    An optimizer over it is the optimizer of that part: it knows all parameters by their names, also those of no rows.
    """
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for name, parameter in model.named_parameters():
        memo[id(parameter)] = parameter
        if name in cuts:
            start, stop = cuts[name].rows(server)
            memo[id(parameter)] = nn.Parameter(parameter.detach()[start:stop].clone())
    return copy.deepcopy(model, memo)


class Flat:
    """Where tensors like those of ``like`` lie in one message: (``nbytes``,) uint8."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._places: list[tuple[int, int, torch.dtype, torch.Size]] = []
        self.nbytes = 0
        for tensor in like:
            self._places.append((self.nbytes, self.nbytes + tensor.nbytes, tensor.dtype, tensor.shape))
            self.nbytes += math.ceil(tensor.nbytes / _ALIGN_BYTES) * _ALIGN_BYTES

    def views(self, message: Tensor | None) -> list[Tensor]:
        """The tensors in ``message``, which for no bytes at all is None."""
        if message is None:
            message = torch.empty(0, dtype=torch.uint8)
        return [message[start:stop].view(dtype).view(shape) for start, stop, dtype, shape in self._places]

    def pack(self, tensors: Sequence[Tensor], message: Tensor | None = None) -> Tensor:
        """The tensors as a message, in the memory of an older one if it is given."""
        if message is None:
            message = torch.zeros(self.nbytes, dtype=torch.uint8)
        if tensors:
            torch._foreach_copy_(self.views(message), list(tensors))
        return message
