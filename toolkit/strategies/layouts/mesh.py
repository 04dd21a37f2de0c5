"""`strategy.mesh`: the ranks as a grid with one dimension for each kind of parallelism.

It is made as torch's DeviceMesh. Consecutive ranks are neighbors in the last dimension. A launcher numbers the ranks of
one node consecutively. So ``tensor``, whose ranks communicate several times in each layer, stays within a node. Then
come the shards of a copy, then the copies, which communicate once in a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from toolkit.base import logs
from toolkit.config import MeshConfig
from toolkit.ranks.batch import Share
from toolkit.ranks.collectives import adopt_limits
from toolkit.ranks.session import Session

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
    """Return this rank's part of the mesh along ``names``.

    Names that the mesh lacks are left out; None if it lacks all of them.
    """
    found = tuple(name for name in names if name in (mesh.mesh_dim_names or ()))
    return mesh[found] if found else None


def share_of(session: Session, sizes: MeshConfig) -> Share:
    """Return the rank's share. Ranks of one tensor group work on the same samples."""
    # Consecutive ranks form a tensor group.
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
