"""Whether gradients wait for an optimizer's step. A checkpoint does not hold them, so a loop is not saved meanwhile."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

#: After so many steps of the loop without one of an optimizer it is saved all the same: it may not train any more.
LONGEST = 128


class Accumulation:
    """Notes gradients and the optimizers' steps, by their hooks."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self._has_gradients = False  #: since an optimizer's last step
        self._has_stepped = False  #: in this step of the loop
        self._waited = 0  #: steps of the loop since then
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note_step)
            trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            # A hook on each parameter would cost a large model some milliseconds a step.
            for parameter in {*trained[:1], *trained[-1:]}:
                parameter.register_post_accumulate_grad_hook(self._note_gradient)

    def is_open(self) -> bool:
        """True if gradients wait for a later step. To be called once after each step of the loop."""
        self._waited = 0 if self._has_stepped else self._waited + 1
        is_open = self._has_gradients and not self._has_stepped and self._waited < LONGEST
        self._has_stepped = False
        return is_open

    def _note_gradient(self, parameter: Tensor) -> None:
        self._has_gradients = True

    def _note_step(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self._has_gradients, self._has_stepped = False, True
