"""How a model lies on the ranks. ddp, fsdp and zero differ only in that, and so does tensor."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from toolkit.config import choose
from toolkit.ranks.batch import Share
from toolkit.ranks.state import Entry
from toolkit.strategies.objective import TrialPass
from toolkit.strategies.protocol import ModelFactory


class Layout(Protocol):
    """Puts the model on the ranks and decides what a pass through it sends.

    A layout inherits this class. The methods with a body are the defaults: there is nothing to do.
    """

    #: The part of each global batch that this rank works on. It is known before the model is.
    share: Share

    #: True if every forward pass waits for the other ranks, so that all must make equally many of them.
    passes_are_joint: bool

    #: True if this rank's values count in sums over all ranks. Of the ranks that work on one share together, one
    #: counts.
    counts: bool

    def place(self, make: ModelFactory, trial: TrialPass) -> nn.Module:
        """Return the model on the device, laid out, with rank 0's weights. Every rank calls it.

        Names are those of ``make()``. ``trial`` passes a few samples through a model.
        """

    def compare(self) -> None:
        """Raise ConfigError if the model computes something else than the whole one would.

        All ranks call it, once buffers are equal, and all raise it.
        """
        return

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Make a pass whose backward pass averages the gradients over the ranks."""

    def without_sync(self) -> AbstractContextManager[object]:
        """Let passes inside it only add to this rank's gradients. A pass outside of it follows."""

    def average(self) -> None:
        """Average the gradients after a step's last backward pass, unless that pass has."""
        return

    def state(self) -> dict[str, Entry]:
        """Return what a resume needs besides weights, buffers and the optimizer's state."""
        return {}

    def uncut(self, entries: Mapping[str, Entry]) -> Mapping[str, Entry]:
        """Return ``entries`` with the places of their parts, where these follow from the layers' cut.

        ``entries`` are made by `toolkit.ranks.state.entry` and named as in a checkpoint.
        """
        return entries

    def figures(self) -> Mapping[str, float]:
        """Return the figures, see ``Strategy.figures``. Called once more after priming, whose figures are dropped."""
        return {}

    def precision(self) -> AbstractContextManager[object]:
        """Set the precision in which passes and the losses are computed."""

    def rest(self) -> None:
        """Give the model the parameters that the optimizer has, after passes without a backward pass."""
        return


_HALVES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Compute passes inside it as ``train.precision`` says, with weights in fp32."""
    half = choose("train.precision", precision, _HALVES)
    return nullcontext() if half is None else torch.autocast(device.type, half)
