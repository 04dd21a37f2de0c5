"""From gradients to new weights: what every strategy does once the gradients of a step are complete."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from toolkit.dist.state import Entry, Json
from toolkit.strategies.optimizer_state import OptimizerState


class Update:
    """Owns the optimizer of the part of the model that lies on this rank, and what else changes with a step."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._slots = OptimizerState(model, optimizer)

    def apply(self, lr: float) -> None:
        """One optimizer step along the gradients in ``.grad``, which are gone after it."""
        self._slots.forget_unfilled()
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()

    def drop(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad()

    def state(self) -> dict[str, Entry]:
        """Everything here that a resume needs, under the names of the unparallelised model, live; see protocol.py."""
        return dict(self._slots.entries())

    def live(self) -> dict[str, Tensor]:
        """The tensors of :meth:`state` that there are now, as this rank has them, and nothing is sent for it."""
        return self._slots.live()

    def loaded(self, values: Mapping[str, Json]) -> None:
        """The tensors of :meth:`state` hold a checkpoint's; ``values`` are those of its entries that are no tensors."""
        self._slots.filled(values)
