"""Measures, judges and clips the gradients of a step before the optimizer gets them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from toolkit.config import TrainConfig
from toolkit.ranks.state import Entry
from toolkit.strategies.layouts import local
from toolkit.strategies.update.parts import ShardedParameters, Total
from toolkit.strategies.update.verdict import Judge, LossScale


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

    @staticmethod
    def are_looked_at(train: TrainConfig) -> bool:
        """True if there is anything to do."""
        return train.clip_norm is not None or train.skip_bad_steps or train.precision == "fp16"

    @torch.no_grad()
    def prepare(self) -> Tensor | None:
        """Prepare the gradients in ``.grad`` for the optimizer. Return whether to skip the step, see verdict.py."""
        gradients = {p: local(p.grad) for p in self._parameters if p.grad is not None}
        self.norm = self._parts.norm(gradients, self._device)
        # The gradients still have the loss scale in them; one multiplication takes it out and clips.
        if self.scale is not None:
            self.norm = self.norm / self.scale.value
        why = None if self._judge is None else self._judge.verdict(self.norm)
        factor = self._factor(self.norm)
        if factor is not None:
            torch._foreach_mul_(list(gradients.values()), factor)
        # Only now: the factor above must be that of the old scale.
        if self.scale is not None and why is not None:
            why = self.scale.explained(why)
            self.scale.update(why)
        return why

    def _factor(self, norm: Tensor) -> Tensor | None:
        """Return the factor for the gradients, or None if there is none."""
        factor = None
        if self._clip_norm is not None:
            factor = (self._clip_norm / (norm + self._LEAST_NORM)).clamp(max=1.0)
        if self.scale is not None:
            factor = 1 / self.scale.value if factor is None else factor / self.scale.value
        return None if factor is None else factor.float()

    def state(self) -> dict[str, Entry]:
        parts = [part.state() for part in (self._judge, self.scale) if part is not None]
        return {name: value for part in parts for name, value in part.items()}

    def figures(self) -> dict[str, float]:
        """Return ``train/grad_norm`` of the last step, before clipping, and fp16's ``train/loss_scale``."""
        found = {} if self.norm is None else {"train/grad_norm": float(self.norm)}
        return found if self.scale is None else {**found, "train/loss_scale": float(self.scale.value)}
