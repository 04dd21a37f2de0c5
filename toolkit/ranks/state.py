"""The three kinds of training state that a strategy declares and a checkpoint stores.

The kind of a value decides who writes it and who reads it, so that needs no agreement between ranks:

* `Replicated`: equal on every rank; rank 0 writes it, every rank reads it.
* `Sharded`: every rank holds one or several rectangular parts of one global tensor. Where several ranks hold the same
  part, equal on all of them, exactly one of them writes it.
* `PerRank`: every rank has its own, and the name holds the rank (`residual/rank3`), so names never collide.

A value is a live tensor, which a load fills in place, or JSON, which a load hands back to `Strategy.on_loaded`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

#: What survives a round trip through JSON (sequences come back as lists). Beside tensors nothing else is stored.
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"


@dataclass(frozen=True, eq=False)
class Replicated:
    """A value that is equal on every rank."""

    value: torch.Tensor | Json


@dataclass(frozen=True, eq=False)
class PerRank:
    """A value of this rank alone. The name under which it is declared must hold the rank, as `.../rank3/...`.

    Another number of ranks cannot resume from it, unless `averages` is true: then only its mean over the ranks counts,
    and each new rank starts from the mean of the tensors that all ranks had under this name.
    """

    value: torch.Tensor | Json
    averages: bool = False


@dataclass(frozen=True, eq=False)
class Sharded:
    """The rectangular part of a global tensor that this rank holds.

    `value` has shape `(s0, s1, ...)` and stands at `[o0:o0+s0, o1:o1+s1, ...]` of the global tensor.
    `is_copy` says that another rank holds the same part and writes it. `fused` is `(parts, ranks)`, for a tensor whose
    rows are those of several tensors one after the other. `value` then stands in a reordered copy of the global tensor,
    in which the rows of each rank follow each other, some of each of the `parts`. See :meth:`pieces`.
    """

    value: torch.Tensor
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    is_copy: bool = False
    fused: tuple[int, int] = (1, 1)

    def pieces(self) -> Iterator[tuple[torch.Tensor, tuple[int, ...]]]:
        """Yield the rectangles of the global tensor that this rank holds, with their offsets. They are live."""
        parts, ranks = self.fused
        if parts == 1 or not self.value.numel():
            yield self.value, self.offsets
            return
        # The copy orders its runs of rows by rank, then part; the global tensor by part, then rank.
        run = self.global_shape[0] // (parts * ranks)
        begin = self.offsets[0]
        end = begin + self.value.shape[0]
        next_run = begin - begin % run + run
        for start, stop in pairwise([begin, *range(next_run, end, run), end]):
            number, inside = divmod(start, run)
            rank, part = divmod(number, parts)
            rows = (part * ranks + rank) * run + inside
            yield self.value[start - begin : stop - begin], (rows, *self.offsets[1:])

    def __post_init__(self) -> None:
        shape = tuple(self.value.shape)
        if not len(shape) == len(self.global_shape) == len(self.offsets):
            raise ValueError(f"part {shape} at {self.offsets} of {self.global_shape}: the numbers of dimensions differ")
        spans = zip(self.offsets, shape, self.global_shape, strict=True)
        if any(start < 0 or start + size > whole for start, size, whole in spans):
            raise ValueError(f"part {shape} at {self.offsets} stands outside the global tensor {self.global_shape}")


#: Prefixes of the names of state that training can do without. What a checkpoint lacks of it keeps its initial value,
#: and what only the checkpoint has is ignored. So these may be switched on and off at a resume, and those of one rank
#: alone keep no other number of ranks from resuming. State that only one of the strategies with `same_state` keeps is
#: named `update/...`.
OPTIONAL = ("ema/", "mask/", "update/")

Entry: TypeAlias = Replicated | PerRank | Sharded
State: TypeAlias = Mapping[str, Entry]


def is_written_by(entry: Entry, rank: int) -> bool:
    """True if `rank`, which declares `entry`, is the one that writes it into a checkpoint."""
    if isinstance(entry, Replicated):
        return rank == 0
    return not (isinstance(entry, Sharded) and entry.is_copy)


def pieces_of(entry: Entry) -> list[tuple[torch.Tensor, tuple[int, ...]]]:
    """Return the rectangles of the global tensor that `entry` holds, live, each with its offsets."""
    if isinstance(entry, Sharded):
        return [*entry.pieces()]
    assert isinstance(entry.value, torch.Tensor)
    return [(entry.value, (0,) * entry.value.dim())]


def local(tensor: Tensor) -> Tensor:
    """Return the part of ``tensor`` that lies on this rank, live and detached."""
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain


def entry(tensor: Tensor) -> Replicated | Sharded:
    """Return the live ``tensor`` as a checkpoint stores it."""
    if not isinstance(tensor, DTensor):
        return Replicated(tensor)
    if all(placement.is_replicate() for placement in tensor.placements):
        return Replicated(local(tensor))
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # DCP's: where our part is
    # Another rank's part may count as the original of ours. Rows of ranks may be equal: a mesh covers one row, and
    # the others have meshes of their own. The original is in the row with rank 0, and there the first along each
    # dimension of copies.
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    assert place is not None, "this rank holds a part of the tensor"
    copies = [index for index, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate()]
    return Sharded(local(tensor), tuple(tensor.shape), tuple(chunk.offsets), any(copies) or 0 not in mesh.mesh)
