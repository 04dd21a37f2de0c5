"""Whether gradients may wait for an optimizer's step. No checkpoint holds them, so a loop is not saved meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

#: After so many steps of the loop without one of an optimizer it is saved all the same: it may not train any more.
LONGEST = 64


class Accumulation:
    """Counts a loop's steps since an optimizer's, which its hook tells.

    Gradients are not looked at: where a rank has none for a layer, the ranks would not agree on where to stop.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._waited = 1 if optimizers else LONGEST
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._note_step)

    def is_open(self) -> bool:
        """True if the next step of an optimizer is to be waited for. To be called once after each step of the loop."""
        waited, self._waited = self._waited, self._waited + 1
        return 0 < waited < LONGEST

    def _note_step(self, *_: object) -> None:
        self._waited = 0
