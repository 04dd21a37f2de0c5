"""How a model lies on the ranks: the one thing in which ddp, fsdp, zero and tensor differ."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.dist.batch import Share
from toolkit.dist.state import Entry, Replicated, Sharded
from toolkit.strategies.objective import TrialPass
from toolkit.strategies.protocol import ModelFactory


class Layout(Protocol):
    """Puts the model in its place; what a pass through it then sends is its own business.

    What a layout that inherits it does not say is that there is nothing: see the methods with a body.
    """

    #: The part of each global batch that this rank works on; known before the model is.
    share: Share

    #: Every forward pass waits for the other ranks, so that all must make equally many of them.
    passes_are_joint: bool

    #: Whether what this rank finds counts in sums over all ranks: of those that work on one share together, one does.
    counts: bool

    def place(self, make: ModelFactory, trial: TrialPass) -> nn.Module:
        """The model on the device, laid out, with rank 0's weights; names are those of ``make()``. Every rank calls.

        ``trial`` passes a few samples through a model.
        """

    def compare(self) -> None:
        """Raise ConfigError, on all ranks, where the model does something else than the whole one would. All call it,
        once buffers are equal."""
        return

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A pass whose backward pass sums the gradients over the ranks and divides by their number."""

    def without_sync(self) -> AbstractContextManager[object]:
        """Passes in it only add to the gradients of this rank, for one outside of it that follows."""

    def average(self) -> None:
        """After the last backward pass of a step: average the gradients, as far as the pass has not."""
        return

    def state(self) -> dict[str, Entry]:
        """What a resume needs beside weights, buffers and the optimizer's state."""
        return {}

    def uncut(self, entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
        """What :func:`entry` gives, named as in a checkpoint, where the parts' places follow from the layers' cut."""
        return entries

    def figures(self) -> Mapping[str, float]:
        """See ``Strategy.figures``; asked once more after priming, whose figures are nobody's."""
        return {}

    def precision(self) -> AbstractContextManager[object]:
        """What passes and the losses are computed in."""

    def rest(self) -> None:
        """After passes without a backward pass: the model's parameters are again those that the optimizer has."""
        return


_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Passes that compute as ``train.precision`` says, with weights in fp32."""
    half = _HALVES.get(precision)
    return nullcontext() if half is None else torch.autocast(device.type, half)


def local(tensor: Tensor) -> Tensor:
    """The part of ``tensor`` that lies on this rank, live and without a gradient's history."""
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain


def entry(tensor: Tensor) -> Replicated | Sharded:
    """The live ``tensor`` as a checkpoint stores it."""
    if not isinstance(tensor, DTensor):
        return Replicated(tensor)
    if all(placement.is_replicate() for placement in tensor.placements):
        return Replicated(local(tensor))
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]  # DCP's: where our part stands
    return Sharded(local(tensor), tuple(tensor.shape), tuple(chunk.offsets), _is_copy(tensor))


def _is_copy(tensor: DTensor) -> bool:
    """Whether another rank's part counts as the original of ours.

    Of equal rows of ranks (a mesh covers one of them, and the others have meshes of their own) it is the one with rank
    0; in it, along each dimension of copies, the first.
    """
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    assert place is not None, "this rank holds a part of the tensor"
    copies = [index for index, placement in zip(place, tensor.placements, strict=True) if placement.is_replicate()]
    return any(copies) or 0 not in mesh.mesh
