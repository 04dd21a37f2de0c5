"""The state of a model whose tensors each lie whole on some ranks only. A checkpoint stores it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.ranks.collectives import gather_objects
from toolkit.ranks.state import Entry, Replicated, Sharded


@dataclass(frozen=True)
class _Description:
    """A rank's description of a value. It holds a small value itself, and of others the shape and the type."""

    value: Any
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None


def on_every_rank(own: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return the entries that every rank declares, for values that only some have. A collective over all ranks.

    What all ranks have is `Replicated` as before. A tensor that some have is `Sharded` and whole on the first of them,
    which writes it. The others declare an empty part, also those that have the same tensor: after a load the first one
    must send it to these. All ranks hold a copy of a value that is no tensor or has no dimensions.
    """
    whole = {name: entry for name, entry in own.items() if isinstance(entry, Replicated)}
    every = gather_objects({name: _describe(entry.value) for name, entry in whole.items()})
    names = dict.fromkeys(name for of_rank in every for name in of_rank)
    shared: dict[str, Entry] = {}
    for name in names:
        by_rank = [of_rank.get(name) for of_rank in every]
        shared[name] = _entry(whole.get(name), by_rank)
    return {name: entry for name, entry in own.items() if name not in whole} | shared


def _describe(value: Any) -> _Description:
    if not isinstance(value, Tensor):
        return _Description(value, None, None)
    return _Description(None if value.ndim else value.detach().cpu(), tuple(value.shape), value.dtype)


def _entry(own: Replicated | None, descriptions: list[_Description | None]) -> Entry:
    first = next(rank for rank, description in enumerate(descriptions) if description is not None)
    known = descriptions[first]
    assert known is not None
    # All ranks have it, or this rank has it and it is small.
    if own is not None and (None not in descriptions or not known.shape):
        return own
    # Small: every rank holds a copy.
    if not known.shape:
        return Replicated(known.value)
    # The first rank that has the tensor writes it; the others declare an empty part.
    if own is not None and first == dist.get_rank():
        assert isinstance(own.value, Tensor)
        part = own.value.detach()
    else:
        part = torch.empty((0, *known.shape[1:]), dtype=known.dtype)
    return Sharded(part, known.shape, (0,) * len(known.shape))
