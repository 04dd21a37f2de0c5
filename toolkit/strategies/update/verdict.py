"""Which steps are skipped. The device decides, equally on all ranks, and the host waits for nothing.

All ranks decide alike without asking each other, because they decide by the norm of the whole gradient: a NaN in one
rank's loss is a NaN in every rank's gradient once it is summed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.ranks.state import Entry, Replicated

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
