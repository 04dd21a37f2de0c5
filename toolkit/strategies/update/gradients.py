"""Measures, judges and clips the gradients of a step before the optimizer gets them.

The device decides which steps are skipped, and the host waits for nothing. All ranks decide alike without asking each
other, because they decide by the norm of the whole gradient: a NaN in one rank's loss is a NaN in every rank's gradient
once it is summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from toolkit.config import TrainConfig
from toolkit.ranks.collectives import sum_in_order
from toolkit.ranks.state import Entry, Replicated, local

#: Sums a small tensor over the ranks that hold other parts of the model.
Total: TypeAlias = Callable[[Tensor], Tensor]
_Groups: TypeAlias = tuple[dist.ProcessGroup, ...]


class ShardedParameters:
    """The parameters of a model, of which this rank may hold parts.

    A DTensor knows over which dimensions of its mesh it is cut. Sums run over those, and not over the others, along
    which it lies whole on each rank. ``total`` is for what a plain tensor does not know: that other ranks hold other
    parameters (the stages of a pipeline, the shards of servers). None: they hold the same ones.
    """

    def __init__(self, parameters: Iterable[Tensor], total: Total | None = None) -> None:
        self._cut = {parameter: _cut_over(parameter) for parameter in parameters}
        self._kinds = list(dict.fromkeys(self._cut.values()))  # same order on all ranks: each is a collective
        self._total = total

    def sum(self, values: Mapping[Tensor, Tensor], like: Tensor) -> Tensor:
        """Return the sum of ``values``, by this rank's parts of parameters, over all parts. Every rank calls it.

        Each value has the shape of ``like``.
        """
        whole = torch.zeros_like(like)
        # One collective for each way of cutting; a rank without such parameters adds zeros.
        for kind in self._kinds:
            found = [value for parameter, value in values.items() if self._cut[parameter] == kind]
            part = torch.stack(found).sum(0) if found else torch.zeros_like(like)
            for group in kind:
                part = sum_in_order(part, group)
            whole += part
        return whole if self._total is None else self._total(whole)

    def norm(self, gradients: Mapping[Tensor, Tensor], device: torch.device) -> Tensor:
        """Return the 2-norm of all ranks' ``gradients`` as one vector, float64.

        It is that of ``torch.nn.utils.get_total_norm``, but squares are added in double precision: they cannot
        overflow.
        """
        norms = torch._foreach_norm(list(gradients.values())) if gradients else [torch.zeros((), device=device)]
        squares = torch.stack([*norms]).double().square()
        if self._kinds in ([], [()]) and self._total is None:  # replicas, the common case
            return squares.sum().sqrt()
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return self.sum(dict(zip(gradients, squares, strict=False)), zero).sqrt()


def _cut_over(parameter: Tensor) -> _Groups:
    """Return the process groups whose ranks hold different parts of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    cut = (dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return tuple(mesh.get_group(dim) for dim in cut if mesh.size(dim) > 1)


MADE, NOT_FINITE, SPIKE, OVERFLOW = 0, 1, 2, 3
#: Why a step was skipped.
WHY = {
    NOT_FINITE: "its gradient is not finite",
    SPIKE: "its gradient is far larger than those before it (train.spike_factor)",
    OVERFLOW: "fp16 overflowed, the loss scale is halved",
}
#: The factor by which older norms lose weight with each step that is made. Their average looks back about 100 steps.
DECAY = 0.99
#: The number of steps made before one can be a spike. The first norms of a training are unlike the later ones.
WARM_UP = 20
_ENOUGH = (1 - DECAY ** (WARM_UP - 0.5)) / (1 - DECAY)


class Judge:
    """Decides whether to skip a step. ``factor`` is ``train.spike_factor``; None: skip only what is not finite."""

    def __init__(self, factor: float | None, device: torch.device) -> None:
        self._factor = factor
        #: The sum of the norms of the steps made, and of their weights; older steps weigh less.
        self._norms = torch.zeros(2, dtype=torch.float64, device=device)

    def verdict(self, norm: Tensor) -> Tensor:
        """Return MADE, NOT_FINITE or SPIKE for a gradient with this ``norm``. It is a uint8 scalar on the device."""
        why = torch.where(norm.isfinite(), MADE, NOT_FINITE)
        if self._factor is not None:
            # A spike: the norm is more than ``factor`` times the mean of the norms so far, total / weight.
            total, weight = self._norms
            is_spike = (weight > _ENOUGH) & (norm * weight > self._factor * total)
            why = torch.where((why == MADE) & is_spike, SPIKE, why)
            # Only steps that are made enter the mean.
            grown = self._norms * DECAY + torch.stack([norm, torch.ones_like(norm)])
            self._norms.copy_(torch.where(why == MADE, grown, self._norms))
        return why.to(torch.uint8)

    def state(self) -> dict[str, Entry]:
        return {} if self._factor is None else {"update/norms": Replicated(self._norms)}


class LossScale:
    """fp16's loss scale. It does what torch.amp.GradScaler does, with its kernel and its constants."""

    FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), self.FIRST, device=device)
        self._clean_steps = torch.zeros((), dtype=torch.int32, device=device)

    def explained(self, why: Tensor) -> Tensor:
        """Return ``why``, with OVERFLOW for NOT_FINITE while the scale is above 1. It may be the cause then."""
        return torch.where((why == NOT_FINITE) & (self.value > 1), OVERFLOW, why).to(torch.uint8)

    def update(self, why: Tensor) -> None:
        """Halve the scale after an overflow, double it after ``INTERVAL`` steps without one. A spike is no overflow."""
        overflow = ((why == NOT_FINITE) | (why == OVERFLOW)).float()
        torch._amp_update_scale_(self.value, self._clean_steps, overflow, self.GROWTH, self.BACKOFF, self.INTERVAL)

    def state(self) -> dict[str, Entry]:
        return {"update/loss_scale": Replicated(self.value), "update/clean_steps": Replicated(self._clean_steps)}


class Gradients:
    """The gradients of all ``parameters``, or of this rank's parts of them. Nothing in it makes the host wait."""

    #: The same as in torch.nn.utils.clip_grad_norm_.
    _LEAST_NORM = 1e-6

    def __init__(self, parameters: Iterable[Tensor], train: TrainConfig, total: Total | None) -> None:
        self._parameters = list(parameters)
        self._device = local(self._parameters[0]).device if self._parameters else torch.device("cpu")
        self._parts = ShardedParameters(self._parameters, total)
        self._clip_norm = train.clip_norm
        self.scale = LossScale(self._device) if train.precision == "fp16" else None
        judges = train.skip_bad_steps or self.scale is not None
        self._judge = Judge(train.spike_factor, self._device) if judges else None
        #: The norm of the last step's gradient, before clipping.
        self.norm: Tensor | None = None

    @torch.no_grad()
    def prepare(self) -> Tensor | None:
        """Prepare the gradients in ``.grad`` for the optimizer. Return whether to skip the step, see :class:`Judge`."""
        gradients = {p: local(p.grad) for p in self._parameters if p.grad is not None}
        self.norm = self._parts.norm(gradients, self._device)
        # The gradients still have the loss scale in them; one multiplication takes it out and clips.
        if self.scale is not None:
            self.norm = self.norm / self.scale.value
        why = None if self._judge is None else self._judge.verdict(self.norm)
        factor = None
        if self._clip_norm is not None:
            factor = (self._clip_norm / (self.norm + self._LEAST_NORM)).clamp(max=1.0)
        if self.scale is not None:
            factor = 1 / self.scale.value if factor is None else factor / self.scale.value
        if factor is not None:
            torch._foreach_mul_(list(gradients.values()), factor.float())
        # Only now: the factor above must be that of the old scale.
        if self.scale is not None and why is not None:
            why = self.scale.explained(why)
            self.scale.update(why)
        return why

    def state(self) -> dict[str, Entry]:
        parts = [part.state() for part in (self._judge, self.scale) if part is not None]
        return {name: value for part in parts for name, value in part.items()}

    def figures(self) -> dict[str, float]:
        """Return ``train/grad_norm`` of the last step, before clipping, and fp16's ``train/loss_scale``."""
        found = {} if self.norm is None else {"train/grad_norm": float(self.norm)}
        return found if self.scale is None else {**found, "train/loss_scale": float(self.scale.value)}
