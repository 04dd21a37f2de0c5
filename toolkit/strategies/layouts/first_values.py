"""Gives a model that lies in parts rank 0's first weights.

They are bit for bit those of the same model on one process. Only rank 0 makes the model, in host memory. The others
make it without memory (torch's ``meta`` device) and receive their parts, one tensor at a time. If each rank drew its
own part, it would have to know in which order any model draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.base import logs
from toolkit.base.errors import listing
from toolkit.ranks.state import Entry, Sharded
from toolkit.strategies.layouts import entry, local
from toolkit.strategies.protocol import ModelFactory

log = logs.get(__name__)


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
