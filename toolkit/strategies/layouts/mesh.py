"""The ranks as a grid, one dimension for each kind of parallelism: `strategy.mesh`, as torch's DeviceMesh.

Ranks that follow each other stand side by side in the last dimension. A launcher numbers those of one node in a row, so
``tensor``, whose ranks talk several times in each layer, stays within a node; then come the shards of a copy, then the
copies, which talk once in a step.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from toolkit import logs
from toolkit.config import MeshConfig
from toolkit.dist.batch import Share
from toolkit.dist.session import Session
from toolkit.dist.timeouts import adopt

#: From the outermost to the innermost.
ORDER = ("replicas", "shards", "tensor")

log = logs.get(__name__)


def device_mesh(session: Session, sizes: MeshConfig, always: Iterable[str]) -> DeviceMesh:
    """The dimensions of more than one rank, and those that must be there ``always``; every rank calls it.

    Dimensions of one rank are left out where they can be: each costs a process group.
    """
    if session.is_main and _size(sizes, "tensor") > int(os.environ.get("LOCAL_WORLD_SIZE", session.world_size)):
        log.warning("strategy.mesh.tensor: groups of %d ranks go beyond a node, which is slow", _size(sizes, "tensor"))
    kept = [name for name in ORDER if _size(sizes, name) > 1 or name in always]
    return open_mesh(session, {name: _size(sizes, name) for name in kept})


def open_mesh(session: Session, sizes: Mapping[str, int]) -> DeviceMesh:
    """A mesh with these dimensions, whose groups have the session's time limit; every rank calls it.

    torch gives them 30 minutes, 10 over NCCL, so that a hang in one of them would last that long.
    """
    mesh = init_device_mesh(session.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    adopt((mesh.get_group(name) for name in sizes), session.timeout)
    return mesh


def part_of(mesh: DeviceMesh, *names: str) -> DeviceMesh | None:
    """This rank's part of the mesh along those of ``names`` that it has, None if it has none of them."""
    found = tuple(name for name in names if name in (mesh.mesh_dim_names or ()))
    return mesh[found] if found else None


def share_of(session: Session, sizes: MeshConfig) -> Share:
    """Ranks of one tensor group work on the same samples."""
    together = _size(sizes, "tensor")
    return Share(session.rank // together, session.world_size // together)


def is_first(session: Session, sizes: MeshConfig) -> bool:
    """Whether this rank speaks for its tensor group where something must count once."""
    return session.rank % _size(sizes, "tensor") == 0


def describe(sizes: MeshConfig) -> str:
    """``2 replicas x 4 shards``, for the log."""
    return " x ".join(f"{size} {name}" for name in ORDER if (size := _size(sizes, name)) > 1) or "1 rank"


def _size(sizes: MeshConfig, name: str) -> int:
    size: int | None = getattr(sizes, name)
    assert size is not None, "config.mesh_of() leaves no dimension open"
    return size
