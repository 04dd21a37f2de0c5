"""A logging step: what one rank gives and makes of everybody's losses and times."""

from collections.abc import Mapping

import torch

from tests.scale import Curve
from toolkit.train.loss_windows import LossWindow


def log(ranks: int) -> Mapping[str, float]:
    """One step's losses of two names, and the rank's own time."""
    given: list[int] = []

    def by_rank(values: Mapping[str, float | torch.Tensor]) -> dict[str, torch.Tensor]:
        given.append(len(values))
        return {name: torch.full((ranks,), float(value), dtype=torch.float64) for name, value in values.items()}

    window = LossWindow(0, ranks, by_rank, lambda own: [own], are_parts=True)
    window.add({"train/loss": torch.tensor(2.0), "train/kl": torch.tensor(1.0)})
    _, own_s = window.take(0.5)
    return {"values given": sum(given), "times heard": len(own_s)}


CURVES = [Curve("logging step", "ranks", (64, 8192, 80000), log)]
