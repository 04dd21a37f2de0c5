"""Small collectives over the default process group, in the few shapes that training needs, and their time limits.

Every rank calls each of these equally often and in the same order: a rank that stays away blocks all others until the
group's timeout.

The time limits are shorter once training has begun. Before the first step ranks import, compile and look for kernels,
each at its own pace. After it, a rank that waits long in a collective waits for a rank that hangs. The watchdog's
limits (toolkit/hang.py) are below these, since it can name the rank that hangs. Without a supervisor only these limits
notice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from toolkit.devices.kinds import is_of_devices
from toolkit.ranks import older_torch


def sum_across_ranks(tensor: Tensor) -> Tensor:
    """Replace ``tensor`` in place by its sum over all ranks, and return it. No host sync on a GPU."""
    if dist.get_world_size() > 1:  # a collective of one rank would wake gloo's threads, for a millisecond
        dist.all_reduce(tensor)
    return tensor


def sum_by_name(values: Mapping[str, float | Tensor], device: torch.device) -> dict[str, float]:
    """Return the sum of each value over all ranks, in float64, by equal names. One collective, one host sync."""
    return dict(zip(values, sum_across_ranks(_row(values, device)).tolist(), strict=True))


def gather_by_name(values: Mapping[str, float | Tensor], device: torch.device) -> dict[str, Tensor]:
    """Return each value of every rank, float64 (ranks,) on the host, by equal names. One collective, one host sync."""
    return dict(zip(values, gather_rows(_row(values, device)).cpu().unbind(1), strict=True))


def _row(values: Mapping[str, float | Tensor], device: torch.device) -> Tensor:
    # Plain numbers go to the device in one copy; tensors are then put in their places there.
    plain = [value if isinstance(value, float) else 0.0 for value in values.values()]
    numbers = torch.tensor(plain, dtype=torch.float64, device=device)
    for index, value in enumerate(values.values()):
        if isinstance(value, Tensor):
            numbers[index] = value
    return numbers


def start_sum(tensor: Tensor) -> dist.Work:
    """Begin :func:`sum_across_ranks`. Leave ``tensor`` alone until ``.wait()`` of the result has returned."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None  # None is for ranks outside the group; all of ours are in the default one
    return work


def gather_rows(row: Tensor) -> Tensor:
    """Return the ``row`` (...) of every rank as (ranks, ...). Shape and dtype must be equal on all."""
    rows = row.new_empty((dist.get_world_size(), *row.shape))
    for part, place in zip(_pieces(row.view(1, -1)), _pieces(rows.view(len(rows), -1)), strict=True):
        received = _room_for(place)
        dist.all_gather_into_tensor(received.view(-1), part.view(-1))  # gloo takes no more dimensions
        if received is not place:
            place.copy_(received)
    return rows


def exchange_rows(rows: Tensor) -> Tensor:
    """Send row i of ``rows`` (ranks, ...) to rank i. Return what all ranks sent here, in their order: (ranks, ...)."""
    result = torch.empty_like(rows)
    for part, place in zip(_pieces(rows.view(len(rows), -1)), _pieces(result.view(len(rows), -1)), strict=True):
        received = _room_for(place)
        dist.all_to_all_single(received, part.contiguous())
        if received is not place:
            place.copy_(received)
    return result


def _room_for(place: Tensor) -> Tensor:
    """Return contiguous memory for a message to ``place``: ``place`` itself if it is contiguous."""
    return place if place.is_contiguous() else torch.empty_like(place, memory_format=torch.contiguous_format)


def broadcast_object(source: int, value: Any) -> Any:
    """Return on every rank the ``value`` of rank ``source``. It is pickled, and goes only between this run's ranks."""
    values = [value]
    dist.broadcast_object_list(values, source)
    return values[0]


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return on every rank of ``group`` what each gives, in order. Values are pickled, between this run's ranks."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


#: gloo sends a message of some MB as a whole before it reads what comes. Only with small messages both directions of a
#: link are in use at once (100 Mbit/s, 12.5 MB each way: 2.1 s in one message, 1.05 s in small ones).
_MESSAGE_BYTES = 1 << 18


def _pieces(rows: Tensor) -> Sequence[Tensor]:
    """Split ``rows`` (n, m) into views of (n, some). One row of a piece is one message. NCCL gets one piece."""
    if is_of_devices(dist.get_backend()):
        return (rows,)
    return torch.split(rows, max(1, _MESSAGE_BYTES // rows.element_size()), dim=1)


def sum_in_order(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of a small ``tensor`` (...) over ``group``, added rank by rank.

    So equal values give equal bits in every group: an all-reduce may add in an order that depends on a group's links,
    and copies of a model would drift apart. NCCL serves no tensors in host memory: such tensors go through the GPU.
    """
    sent = tensor.to(_served(group, tensor.device))
    rows = sent.new_empty((dist.get_world_size(group), *tensor.shape))
    dist.all_gather_into_tensor(rows.view(-1), sent.reshape(-1), group)
    return rows.sum(0).to(tensor.device)


def _served(group: dist.ProcessGroup, wanted: torch.device) -> torch.device:
    """Return ``wanted`` if ``group`` serves such devices. Else return the current device of a kind that it serves."""
    kinds = [device.type for device in group._device_types]
    return wanted if wanted.type in kinds else torch.device(kinds[0])


#: Size of one message: large enough that a link's speed counts and not its latency, small enough to be copied for it.
BUCKET_BYTES = 1 << 25


def broadcast_tensors(tensors: Iterable[Tensor], source: int, group: dist.ProcessGroup | None = None) -> None:
    """Overwrite ``tensors`` in place by those of rank ``source``, in flat buckets of one dtype and device."""
    for bucket in _buckets(tensors):
        flat = _packed(bucket)
        dist.broadcast(flat, source, group)
        _unpack(flat, bucket)


def sum_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup | None = None, part: Tensor | float = 1.0) -> int:
    """Sum ``tensors``, each times this rank's ``part``, over ``group`` in place. Return the bytes sent.

    If the ranks' parts add up to 1, the result is a mean. The tensors travel in flat buckets, divided by their order
    and sizes alone: the bits are the same in every run. A bucket is packed while the one before it travels.
    """
    sent = 0
    before: tuple[dist.Work, Tensor, list[Tensor]] | None = None
    for bucket in _buckets(tensors):
        flat = _packed(bucket).mul_(part)
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None, "this rank is in the group"
        if before is not None:
            _receive(*before)
        before = work, flat, bucket
        sent += flat.nbytes
    if before is not None:
        _receive(*before)
    return sent


def _receive(work: dist.Work, flat: Tensor, tensors: list[Tensor]) -> None:
    work.wait()
    _unpack(flat, tensors)


def _packed(tensors: list[Tensor]) -> Tensor:
    """Return the tensors as one flat tensor. A single contiguous tensor is not copied: the result is a view of it."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return tensors[0].detach().view(-1)
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _unpack(flat: Tensor, tensors: list[Tensor]) -> None:
    if flat.data_ptr() == tensors[0].data_ptr():
        return
    values = torch.split(flat, [tensor.numel() for tensor in tensors])
    with torch.no_grad():
        places = [tensor.detach() for tensor in tensors]
        torch._foreach_copy_(places, [value.view_as(place) for value, place in zip(values, places, strict=True)])


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        bucket, size = list[Tensor](), 0
        for tensor in same:
            if bucket and size + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        if bucket:
            yield bucket


#: Share of ``dist.timeout_s``; above the watchdog's share.
STEP_SHARE = 0.7


def set_timeouts(groups: Iterable[dist.ProcessGroup], timeout: timedelta) -> None:
    """Give ``groups`` the session's limit; torch has opened them with its own (a mesh's groups)."""
    for group in groups:
        if any(_timeout(group, device) is not None for device in _devices(group)):
            older_torch.set_timeout(timeout, group)


def tighten_timeouts(timeout: timedelta) -> None:
    """Give every group that was opened with ``timeout`` the limit for steps. Groups with another limit keep theirs."""
    for group in list(distributed_c10d._world.pg_map):
        if any(_timeout(group, device) == timeout for device in _devices(group)):
            older_torch.set_timeout(timeout * STEP_SHARE, group)


def _devices(group: Any) -> Iterable[torch.device]:
    devices: Iterable[torch.device] = group._device_types
    return devices


def _timeout(group: Any, device: torch.device) -> timedelta | None:
    """Return the group's limit on ``device``; None if the backend has none, as over MPI."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)
