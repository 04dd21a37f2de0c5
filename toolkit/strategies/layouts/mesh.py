"""`strategy.mesh`: the ranks as a grid with one dimension for each kind of parallelism, and the first weights on it.

Consecutive ranks, which are mostly those of one node, are neighbors in the last dimension. So ``tensor``, whose ranks
communicate several times in each layer, stays within a node. Then come the shards of a copy, then the copies, which
communicate once in a step.

The first weights of a model that lies in parts are bit for bit those of the same model on one process. Only rank 0
makes the model, in host memory. The others make it without memory (torch's ``meta`` device) and receive their parts,
one tensor at a time. If each rank drew its own part, it would have to know in which order any model draws.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from toolkit.base import logs
from toolkit.base.errors import listing
from toolkit.config import MeshConfig
from toolkit.ranks.batch import Share
from toolkit.ranks.collectives import adopt_limits
from toolkit.ranks.session import Session
from toolkit.ranks.state import Entry, Sharded, entry, local
from toolkit.strategies.protocol import ModelFactory

#: From the outermost to the innermost.
ORDER = ("replicas", "shards", "tensor")

log = logs.get(__name__)


def device_mesh(session: Session, sizes: MeshConfig, always: Iterable[str]) -> DeviceMesh:
    """Return a mesh of the dimensions in ``always`` and of those with several ranks. Every rank calls it.

    Other dimensions of one rank are left out, since each costs a process group.
    """
    if session.is_main and _size(sizes, "tensor") > int(os.environ.get("LOCAL_WORLD_SIZE", session.world_size)):
        log.warning("strategy.mesh.tensor: groups of %d ranks go beyond a node, which is slow", _size(sizes, "tensor"))
    kept = [name for name in ORDER if _size(sizes, name) > 1 or name in always]
    return open_mesh(session, {name: _size(sizes, name) for name in kept})


def open_mesh(session: Session, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return a mesh of these dimensions, whose groups have the session's time limit. Every rank calls it.

    torch's own limit is 30 minutes, 10 over NCCL, and a hang in a group would last that long.
    """
    mesh = init_device_mesh(session.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    adopt_limits((mesh.get_group(name) for name in sizes), session.timeout)
    return mesh


def part_of(mesh: DeviceMesh, *names: str) -> DeviceMesh | None:
    """Return this rank's part of the mesh along those of ``names`` that it has; None if it has none."""
    found = tuple(name for name in names if name in (mesh.mesh_dim_names or ()))
    return mesh[found] if found else None


def share_of(session: Session, sizes: MeshConfig) -> Share:
    """Return the rank's share. Consecutive ranks form a tensor group, and work on the same samples."""
    together = _size(sizes, "tensor")
    return Share(session.rank // together, session.world_size // together)


def is_first(session: Session, sizes: MeshConfig) -> bool:
    """True if this rank counts for its tensor group where something must count once."""
    return session.rank % _size(sizes, "tensor") == 0


def describe(sizes: MeshConfig) -> str:
    """Return ``2 replicas x 4 shards``, for the log."""
    return " x ".join(f"{size} {name}" for name in ORDER if (size := _size(sizes, name)) > 1) or "1 rank"


def _size(sizes: MeshConfig, name: str) -> int:
    size: int | None = getattr(sizes, name)
    assert size is not None, "config.mesh_of() leaves no dimension open"
    return size


def make_on_rank_0(make: ModelFactory) -> nn.Module:
    """Return ``make()`` on rank 0; elsewhere the model without memory, if that is possible."""
    return make() if dist.get_rank() == 0 else without_memory(make)


def without_memory(make: ModelFactory) -> nn.Module:
    """Return ``make()`` on the meta device. If its constructor needs the values of tensors, it is made for real."""
    try:
        with torch.device("meta"):
            model = make()
        # A tensor that is a plain attribute gets no values later: only parameters and buffers do.
        attributes = [item for module in model.modules() for item in vars(module).items()]
        stray = [name for name, value in attributes if isinstance(value, Tensor) and value.is_meta]
        if not stray:
            return model
        reason = f"{listing(stray, 3)}: tensors that are neither parameters nor buffers"
    except Exception as error:  # any constructor may fail in its own way on tensors without values
        reason = f"{type(error).__name__}: {error}"
    log.warning("each rank makes the whole model in host memory first, for it cannot be made without (%s)", reason)
    return make()


@torch.no_grad()
def hand_out(
    whole: Mapping[str, Tensor],
    model: nn.Module,
    device: torch.device,
    uncut: Callable[[Mapping[str, Entry]], Mapping[str, Entry]] = lambda entries: entries,
) -> None:
    """Fill the parameters of ``model``, parts or copies, from rank 0's ``whole`` ones.

    They are sent one after the other, each whole. So a rank that has room for the largest one has room for this,
    however the parts are cut. On the other ranks only the names in ``whole`` count. ``uncut``: see ``Layout.uncut``.
    """
    for name, parameter in model.named_parameters():
        sent = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        if dist.get_rank() == 0:
            sent.copy_(whole[name])
        dist.broadcast(sent, 0)
        # A fused parameter lies in several pieces; each is copied from its place in the whole one.
        mine = uncut({f"model/{name}": entry(parameter)})[f"model/{name}"]
        pieces = mine.pieces() if isinstance(mine, Sharded) else [(local(parameter), (0,) * sent.ndim)]
        for value, offsets in pieces:
            place = tuple(slice(start, start + size) for start, size in zip(offsets, value.shape, strict=True))
            value.copy_(sent[place])
