"""Small collectives over the default process group, in the few shapes that training needs.

Every rank calls each of these equally often and in the same order: a rank that stays away blocks all others until the
group's timeout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

_BUCKET_BYTES = 1 << 25


def sum_across_ranks(tensor: Tensor) -> Tensor:
    """Replace ``tensor`` by its sum over all ranks, in place, and return it; no host sync on a GPU."""
    dist.all_reduce(tensor)
    return tensor


def start_sum(tensor: Tensor) -> dist.Work:
    """Begin :func:`sum_across_ranks`; ``tensor`` must be left alone until ``.wait()`` of the result has returned."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None  # None is for ranks outside the group; all of ours are in the default one
    return work


def broadcast_tensors(tensors: Iterable[Tensor], source: int, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite ``tensors`` in place by those of rank ``source``, a message for some 32 MiB of each dtype."""
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        dist.broadcast(flat, source, group)
        _unpack(flat, bucket)


def sum_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Replace each of ``tensors`` by its sum over the ranks of ``group``, in place, a message for some 32 MiB of them.

    The messages depend on the order and shapes of ``tensors`` only, so that the same values give the same bits.
    """
    for bucket in _buckets(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        dist.all_reduce(flat, group=group)
        _unpack(flat, bucket)


def _unpack(flat: Tensor, tensors: list[Tensor]) -> None:
    for tensor, values in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        tensor.detach().copy_(values.view_as(tensor))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    for same in _by_dtype(tensors):
        bucket: list[Tensor] = []
        for tensor in same:
            bucket.append(tensor)
            if sum(each.nbytes for each in bucket) >= _BUCKET_BYTES:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


def _by_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return list(groups.values())
