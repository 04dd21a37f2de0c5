"""Small collectives over the default process group, in the few shapes that training needs.

Every rank calls each of these equally often and in the same order: a rank that stays away blocks all others until the
group's timeout.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor


def sum_across_ranks(tensor: Tensor) -> Tensor:
    """Replace ``tensor`` by its sum over all ranks, in place, and return it; no host sync on a GPU.

    A process without a process group is alone, and its sum is what it has: `toolkit evaluate` is one.
    """
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor


def start_sum(tensor: Tensor) -> dist.Work:
    """Begin :func:`sum_across_ranks`; ``tensor`` must be left alone until ``.wait()`` of the result has returned."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None  # None is for ranks outside the group; all of ours are in the default one
    return work


def broadcast_tensors(tensors: Iterable[Tensor], source: int) -> None:
    """Overwrite ``tensors`` in place by those of rank ``source``, in one message for each dtype."""
    for same in _by_dtype(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in same])
        dist.broadcast(flat, source)
        for tensor, received in zip(same, torch.split(flat, [tensor.numel() for tensor in same]), strict=True):
            tensor.detach().copy_(received.view_as(tensor))


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
