"""An exponential moving average of the weights (Polyak & Juditsky 1992), which mostly generalises better than the last.

It lies on the ranks as the weights do. Floating-point buffers (BatchNorm's statistics) are averaged with them: averaged
weights beside the last step's statistics would be a model that never was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from toolkit.dist.state import Entry, Json, Replicated
from toolkit.strategies.layouts import entry, local

_DECAY = "ema/decay"


class Average:
    """``ema/<name>`` of every parameter and floating-point buffer; the model and it may change places."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
        self._buffers = list(buffers)
        # A tied weight has several names, of which a checkpoint's reader may want any.
        self._live = {**dict(model.named_parameters(remove_duplicate=False)), **buffers}
        copies = {tensor: local(tensor).clone() for tensor in self._live.values()}
        self.of = copies  #: this rank's part of the average of each tensor of the model
        self._is_shown = False

    @torch.no_grad()
    def follow(self, made: Tensor | None) -> None:
        """After a step; ``made`` is 0 on the device where it was left out, and then nothing moves. None: all are."""
        live = [local(tensor) for tensor in self.of]
        if made is None:
            torch._foreach_lerp_([*self.of.values()], live, 1 - self._decay)
        else:
            weight = (made * (1 - self._decay)).to(live[0].dtype)
            torch._foreach_lerp_([*self.of.values()], live, [weight] * len(live))

    def show(self) -> None:
        """The model has the averages until :meth:`hide`; calling it twice is calling it once."""
        if not self._is_shown:
            self._swap()

    def hide(self) -> None:
        """The model has its own weights again."""
        if self._is_shown:
            self._swap()

    def state(self) -> dict[str, Entry]:
        averages = {
            f"ema/{name}": dataclasses.replace(entry(tensor), value=self.of[tensor])
            for name, tensor in self._live.items()
        }
        return {_DECAY: Replicated(self._decay), **averages}

    def live(self) -> dict[str, Tensor]:
        kinds = {name: "buffers" if name in self._buffers else "optimizer" for name in self._live}
        return {f"{kinds[name]}/ema/{name}": self.of[tensor] for name, tensor in self._live.items()}

    @torch.no_grad()
    def loaded(self, values: Mapping[str, Json]) -> None:
        """Start from the weights that were loaded where the checkpoint has no average."""
        if _DECAY not in values:
            for tensor, average in self.of.items():
                average.copy_(local(tensor))

    @torch.no_grad()
    def _swap(self) -> None:
        """In place, one tensor at a time: others (a data-parallel wrapper, a sharded gather) hold on to them."""
        for tensor, average in self.of.items():
            kept = average.clone()
            average.copy_(local(tensor))
            local(tensor).copy_(kept)
        self._is_shown = not self._is_shown
