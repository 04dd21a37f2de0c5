"""Cuts a model's parameters into the servers' parts, and packs tensors into messages."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from toolkit.base.errors import ConfigError
from toolkit.ranks.state import Entry, Json, Replicated, Sharded

#: The alignment of tensors in a message: torch wants a multiple of the element's size.
_ALIGN_BYTES = 16


@dataclass(frozen=True)
class Cut:
    """The cut of a parameter of ``shape``. Server j keeps its rows ``bounds[j]`` to ``bounds[j + 1]``."""

    shape: tuple[int, ...]
    bounds: tuple[int, ...]

    def rows(self, server: int | None) -> tuple[int, int]:
        """Return ``(start, stop)``; None stands for a rank that keeps no rows."""
        return (0, 0) if server is None else (self.bounds[server], self.bounds[server + 1])

    def part_shape(self, server: int | None) -> tuple[int, ...]:
        start, stop = self.rows(server)
        return (stop - start, *self.shape[1:])

    def offsets(self, server: int | None) -> tuple[int, ...]:
        return (self.rows(server)[0], *[0] * (len(self.shape) - 1))


def is_cut(parameter: Tensor) -> bool:
    """True if servers keep parts of it. Every rank keeps scalars and frozen parameters whole."""
    return parameter.ndim > 0 and parameter.requires_grad


def cut(model: nn.Module, servers: int) -> dict[str, Cut]:
    """Return a cut for each parameter that has one, by name.

    The parameters, one after the other, are cut into ``servers`` runs of whole rows, as equal in bytes as rows allow.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if is_cut(parameter)}
    total = sum(parameter.nbytes for parameter in named.values())
    cuts, start = {}, 0
    for name, parameter in named.items():
        rows = parameter.shape[0]
        row_bytes = max(parameter.nbytes // max(rows, 1), 1)
        bounds = [0]
        for server in range(1, servers):
            # The row of this parameter that is nearest to the server's boundary in bytes; may lie outside of it.
            boundary = total * server // servers - start
            nearest = (boundary + row_bytes // 2) // row_bytes
            bounds.append(min(max(nearest, 0), rows))
        cuts[name] = Cut(tuple(parameter.shape), (*bounds, rows))
        start += parameter.nbytes
    return cuts


def shadow(model: nn.Module, cuts: Mapping[str, Cut], server: int | None) -> nn.Module:
    """Return a copy of ``model`` whose parameters are the parts of ``server``. What is not cut is shared.

    An optimizer over it is the optimizer of that part: it knows all parameters by their names, also those of no rows.
    """
    # deepcopy takes the objects in ``memo`` for copied: buffers and uncut parameters are shared.
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for name, parameter in model.named_parameters():
        memo[id(parameter)] = parameter
        if name in cuts:
            start, stop = cuts[name].rows(server)
            memo[id(parameter)] = nn.Parameter(parameter.detach()[start:stop].clone())
    return copy.deepcopy(model, memo)


def declared(name: str, value: Tensor | Json, cut: Cut | None, server: int | None) -> Entry:
    """Return the checkpoint's entry for ``server``'s part of a value cut like a parameter.

    Scalars and what is not cut are declared as equal on every rank. Raises ConfigError for a tensor of another shape.
    """
    if cut is None or not isinstance(value, Tensor) or not value.ndim:
        return Replicated(value.detach() if isinstance(value, Tensor) else value)
    if tuple(value.shape) != cut.part_shape(server):
        raise ConfigError(
            f"optim.name: {name} has another shape than its parameter, and so cannot be cut like it for the servers; "
            "use another optimizer, or ddp"
        )
    return Sharded(value.detach(), cut.shape, cut.offsets(server))


class Flat:
    """The places of tensors like those of ``like`` in one message.

    The message is (``nbytes``,) uint8, in host memory. Tensors on a GPU are packed there. The message is page-locked
    then, and one copy takes it across.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._places: list[tuple[int, int, torch.dtype, torch.Size]] = []
        self.nbytes = 0
        for tensor in like:
            end = self.nbytes + tensor.nbytes
            self._places.append((self.nbytes, end, tensor.dtype, tensor.shape))
            self.nbytes = math.ceil(end / _ALIGN_BYTES) * _ALIGN_BYTES
        self._device = like[0].device if like else torch.device("cpu")

    def views(self, message: Tensor | None) -> list[Tensor]:
        """Return the tensors in ``message``, which is None if it has no bytes.

        On the CPU they are views of it. For tensors on a GPU the message is first copied there as a whole.
        """
        message = torch.empty(0, dtype=torch.uint8) if message is None else message
        return self._cut(message.to(self._device))

    def _cut(self, message: Tensor) -> list[Tensor]:
        views = []
        for start, stop, dtype, shape in self._places:
            values = message[start:stop].view(dtype)
            views.append(values.view(shape))
        return views

    @torch.no_grad()
    def unpack(self, message: Tensor | None, tensors: Sequence[Tensor]) -> None:
        """Fill ``tensors`` from ``message``."""
        if message is not None and tensors:
            torch._foreach_copy_(list(tensors), self.views(message))

    @torch.no_grad()
    def pack(self, tensors: Sequence[Tensor], message: Tensor | None = None) -> Tensor:
        """Return the tensors as a message. It takes the memory of an older ``message`` if that is given."""
        if message is None:
            message = torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=self._device.type != "cpu")
        if not tensors:
            return message
        there = message if message.device == self._device else torch.empty_like(message, device=self._device)
        torch._foreach_copy_(self._cut(there), list(tensors))
        if there is not message:
            message.copy_(there)  # waits: the message is sent from the host
        return message
