"""An exponential moving average of the weights (Polyak & Juditsky 1992).

It mostly generalizes better than the last weights. It lies on the ranks as the weights do. Floating-point buffers
(BatchNorm's statistics) are averaged as well, since averaged weights with the last step's statistics would be a model
that never existed.

After t steps the next one counts with at least 9 / (10 + t). With a decay of 0.9999 alone a short run would end with
little but its first weights. Averages of bf16 and fp16 are kept in fp32, in which a step of 1 - decay does not vanish.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from toolkit.ranks.state import Entry, Json, Replicated, entry, local

_DECAY, _STEPS = "ema/decay", "ema/steps"


class Average:
    """``ema/<name>`` of all parameters and buffers but integers. They can be swapped with the model's values."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        # A tied weight has several names, and a reader of a checkpoint may want any of them.
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        self._live = {name: tensor for name, tensor in named if tensor.is_floating_point() or tensor.is_complex()}
        self._buffers: dict[str, tuple[nn.Module, str]] = {}  #: the places of those that are averaged
        for name, _ in model.named_buffers():
            if name in self._live:
                path, _, leaf = name.rpartition(".")
                self._buffers[name] = model.get_submodule(path), leaf
        copies = {tensor: _wide(local(tensor)).clone() for tensor in self._live.values()}
        self.of = copies  #: this rank's part of the average of each tensor of the model
        self._steps: int | Tensor = 0  #: averaged so far; a tensor if only the device knows
        self._is_shown = False
        self._own: dict[Tensor, Tensor] = {}  #: of tensors that cannot hold their average, while shown; by average

    @torch.no_grad()
    def follow(self, made: Tensor | None) -> None:
        """Move the averages after a step.

        ``made`` is 0 on the device if the step was skipped, and then nothing moves. None: no step is ever skipped.
        """
        self._find_replaced()
        averages, live = [*self.of.values()], [_wide(local(tensor)) for tensor in self.of]
        if made is None:
            assert not isinstance(self._steps, Tensor)
            kept = (1 + self._steps) / (10 + self._steps)
            torch._foreach_lerp_(averages, live, 1 - min(self._decay, kept))
            self._steps += 1
        else:
            # On the device also at the first step after a load: a Python number would be rounded otherwise.
            steps = torch.zeros_like(made) + self._steps
            weight = made * (1 - ((1 + steps) / (10 + steps)).clamp(max=self._decay))
            torch._foreach_lerp_(averages, live, [weight.to(average.dtype) for average in averages])
            self._steps = steps + made

    def show(self) -> None:
        """Give the model the averages until :meth:`hide`. A second call changes nothing."""
        if not self._is_shown:
            self._swap()

    def hide(self) -> None:
        """Give the model its own weights again."""
        if self._is_shown:
            self._swap()

    def state(self) -> dict[str, Entry]:
        entries: dict[str, Entry] = {_DECAY: Replicated(self._decay), _STEPS: Replicated(int(self._steps))}
        for name, tensor in self._live.items():  # an average lies on the ranks as its tensor does
            entries[f"ema/{name}"] = dataclasses.replace(entry(tensor), value=self.of[tensor])
        return entries

    def of_buffers(self) -> list[Tensor]:
        """Return the averages of buffers, in the same order on all ranks."""
        return [self.of[self._live[name]] for name in self._buffers]

    def live(self) -> dict[str, Tensor]:
        averages = {}
        for name, tensor in self._live.items():
            kind = "buffers" if name in self._buffers else "optimizer"
            averages[f"{kind}/ema/{name}"] = self.of[tensor]
        return averages

    @torch.no_grad()
    def loaded(self, values: Mapping[str, Json]) -> None:
        """Start from the weights that were loaded if the checkpoint has no average.

        A checkpoint that does not say how many steps its average has seen was made before the first steps counted more.
        """
        self._steps = int(cast(int, values.get(_STEPS, values.get("step", 0) if _DECAY in values else 0)))
        if _DECAY not in values:
            for tensor, average in self.of.items():
                average.copy_(local(tensor))

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap in place, one tensor at a time. Others (a data-parallel wrapper, a sharded gather) hold the tensors."""
        self._find_replaced()
        for tensor, average in self.of.items():
            live = local(tensor)
            if live.dtype == average.dtype:
                kept = average.clone()
                average.copy_(live)
                live.copy_(kept)
            # A half-precision weight cannot hold its fp32 average: its own value is put aside meanwhile.
            elif self._is_shown:
                live.copy_(self._own.pop(average))
            else:
                self._own[average] = live.clone()
                live.copy_(average)
        self._is_shown = not self._is_shown

    def _find_replaced(self) -> None:
        """Let the averages follow buffers that a pass has replaced by other tensors of the same shape."""
        for name, (module, leaf) in self._buffers.items():
            now, before = module._buffers[leaf], self._live[name]
            if now is before or now is None or now.shape != before.shape or _wide(now).dtype != self.of[before].dtype:
                continue
            self.of[now] = self.of.pop(before)
            self._live[name] = now


def _wide(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in fp32 if its own type has fewer digits than an average needs."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor
