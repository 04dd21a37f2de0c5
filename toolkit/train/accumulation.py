"""Whether gradients may wait for an optimizer's step. A loop is not saved while those of all its optimizers may."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

#: After so many steps of the loop without one of an optimizer it is saved all the same: it may not train any more.
LONGEST = 64


class Accumulation:
    """Counts a loop's steps since those of each optimizer, which its hook tells.

    Gradients do not decide whether a loop is saved: where a rank has none for a layer, the ranks would not agree.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._since = dict.fromkeys(optimizers, 0)  #: steps of the loop that have ended since the optimizer's last
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note_step)

    def end_step(self) -> None:
        """Note the end of a step of the loop."""
        for optimizer in self._since:
            self._since[optimizer] += 1

    @property
    def is_open(self) -> bool:
        """True if the next step of an optimizer is to be waited for."""
        return 0 < min(self._since.values(), default=0) < LONGEST

    def may_hold_gradients(self, optimizer: Optimizer) -> bool:
        """True if ``optimizer`` made no step in the loop's last one: its gradients may be those of several batches."""
        return self._since[optimizer] > 0

    def _note_step(self, optimizer: Optimizer, *_: object) -> None:
        self._since[optimizer] = -1  # the step of the loop has not ended yet
