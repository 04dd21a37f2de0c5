"""Means of a training's losses over the steps between two logging steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from toolkit.strategies.protocol import StepOutput


class LossWindow:
    """Means of the global losses over the steps since the last :meth:`take`. They stay on the device until then.

    ``by_rank`` is :meth:`Strategy.by_rank`.
    """

    def __init__(
        self, rank: int, world_size: int, by_rank: Callable[[Mapping[str, float | Tensor]], Mapping[str, Tensor]]
    ) -> None:
        self._rank, self._world_size, self._by_rank = rank, world_size, by_rank
        self._sums: dict[str, Tensor] = {}
        #: The sums after each step since the last :meth:`take`, and before it.
        self._after_each: list[Tensor] = []
        self.taken: list[Tensor] = []
        self._steps = 0
        self._before: dict[str, float] = {}  # sums of a restored window, until the first step gives type and device

    def add(self, output: StepOutput) -> None:
        """Add one step's losses: their sum as ``loss``, and each named one."""
        counted = output.counted()
        for name, loss in counted.items():
            # Not in place, and nothing else is kept: the loss may be memory of the job's own that its next step reuses.
            self._sums[name] = loss + self._sums.get(name, self._before.get(name, 0.0))
        self._after_each.append(self._sums["loss"])
        self._steps += 1

    def leave_out(self, steps: int) -> None:
        """Leave ``steps`` steps out of the means. Their losses were added as 0 because the steps were left out."""
        self._steps -= steps

    def state(self) -> dict[str, Any]:
        """Return the window for a checkpoint, equal on every rank.

        A collective and a host sync unless the window is empty.
        """
        # Before the first step there is what was restored.
        window: dict[str, float | Tensor] = {**self._before, **self._sums}
        if not window:
            return {"steps": 0, "sums": {}}
        sums = self._by_rank(window)
        return {"steps": self._steps, "sums": {name: sums[name].tolist() for name in window}}

    def restore(self, saved: Any) -> None:
        """Go on from a :meth:`state`. If it is of another number of ranks, rank 0 gets the sum of all."""
        saved = saved or {"steps": 0, "sums": {}}
        self._steps = saved["steps"]
        # Only totals over the ranks are logged, so after a change of their number one rank may hold them all.
        for name, sums in saved["sums"].items():
            is_same = len(sums) == self._world_size
            self._before[name] = sums[self._rank] if is_same else float(self._rank == 0) * sum(sums)

    def take(self, figure: float) -> tuple[dict[str, float], list[float]]:
        """Return the means by name and the ``figure`` of each rank, and empty the window.

        Both are equal on every rank. One collective and one host sync. There are no means if every step was left out.
        """
        assert self._sums, "a step comes before each logging step"
        sums = self._by_rank({**self._sums, "": figure})  # no loss has that name
        means: dict[str, float] = {}
        if self._steps:
            means = {name: sums[name].sum().item() / self._steps for name in self._sums}
        self.taken, self._after_each = self._after_each, []
        self._sums, self._steps, self._before = {}, 0, {}
        return means, sums[""].tolist()
