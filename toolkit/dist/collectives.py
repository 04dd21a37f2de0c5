"""Small collectives over the default process group, in the few shapes that training needs.

Every rank calls each of these equally often and in the same order: a rank that stays away blocks all others until the
group's timeout.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

#: Large enough for the speed of the link to count and not its latency.
BUCKET_BYTES = 2**25


def sum_across_ranks(tensor: Tensor) -> Tensor:
    """Replace ``tensor`` by its sum over all ranks, in place, and return it; no host sync on a GPU."""
    dist.all_reduce(tensor)
    return tensor


def start_sum(tensor: Tensor) -> dist.Work:
    """Begin :func:`sum_across_ranks`; ``tensor`` must be left alone until ``.wait()`` of the result has returned."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None  # None is for ranks outside the group; all of ours are in the default one
    return work


def sum_tensors(tensors: Iterable[Tensor], part: Tensor | float = 1.0) -> int:
    """Replace ``tensors`` in place by the sums over all ranks of ``part`` of each; returns the bytes of the messages.

    Where the ranks' parts add up to 1 it is a mean. Made in few messages, and in the same order on every rank.
    """
    sent = 0
    for same in _by_dtype(tensors):
        for bucket in _buckets(same):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket]).mul_(part)
            sum_across_ranks(flat)
            for tensor, summed in zip(bucket, torch.split(flat, [tensor.numel() for tensor in bucket]), strict=True):
                tensor.detach().copy_(summed.view_as(tensor))
            sent += flat.numel() * flat.element_size()
    return sent


def _buckets(tensors: list[Tensor]) -> list[list[Tensor]]:
    """In order, each of ``BUCKET_BYTES`` at most or of a single tensor: so much memory does a message take."""
    buckets: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size > room or not buckets:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(tensor)
        room -= size
    return buckets


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
