"""Evaluation that counts each sample once, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from toolkit.dist.batch import Batch
from toolkit.errors import ConfigError, RankLostError, ToolkitError
from toolkit.strategies.objective import WEIGHT, Measure, Sums
from toolkit.strategies.protocol import Strategy


def evaluate(
    strategy: Strategy,
    batches: Iterable[Batch | None],
    size: int,
    measure: Measure,
    is_cut: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """The mean of each figure of ``measure``, over all ``size`` samples or its own weight; equal on every rank.

    All ranks must call it. Of :class:`~toolkit.strategies.objective.Rows` it gives those of all samples, in order.

    ``is_cut`` is asked after each batch: when it says so, on whichever rank, the evaluation ends early and is worth
    nothing: None, on every rank. All still enter the final sum, or those that were not cut would wait for ever.

    ``batches`` is this rank's part of the eval set, unpadded; every rank's has the same number of batches, the
    last ones None where it is done. Sums and counts are added in float64, in which counts are exact up to 2**53.
    Raises ToolkitError when the ranks together did not see exactly ``size`` samples; on every rank RankLostError when
    that is because one of them has died, whose part is the others' next time.
    """
    if size < strategy.share.count:
        raise ConfigError(
            f"the eval set has {size} samples, fewer than the {strategy.share.count} ranks; use fewer ranks"
        )
    lost = strategy.lost
    strategy.settle()
    sums: dict[str, Tensor] = {}
    count = 0
    rows: list[Sums] = []
    cut = strategy.lost != lost  # known before the first batch, to every rank: then none need be looked at
    for batch in () if cut else batches:
        found = strategy.evaluate(batch, measure)
        count += found.count
        if found.rows:
            rows.append(found)
        for name, value in found.values.items():
            sums[name] = sums[name] + value.double() if name in sums else value.double()
        cut = is_cut()
        if strategy.evaluates_together:  # who ended alone would leave the others waiting in their next batch
            cut = bool(strategy.sum({_CUT: float(cut)})[_CUT])
        if cut:
            break
    totals = strategy.sum({**sums, _COUNT: float(count), _CUT: float(cut), _ROWS: float(bool(rows))})
    if strategy.lost != lost:
        raise RankLostError(f"ranks have died: {sorted(strategy.lost - lost)}; their part was not evaluated")
    has_rows = totals.pop(_ROWS) > 0
    means = _means(totals, size)
    return means if means is None or not has_rows else {**means, **_gathered(strategy, rows)}


#: Names that no measure has.
_COUNT, _CUT, _ROWS = "\0count", "\0cut", "\0rows"


def _gathered(strategy: Strategy, found: Sequence[Sums]) -> dict[str, Tensor]:
    """The rows of all ranks by name, in the order of the eval set; a collective."""
    names = [*found[0].rows] if found else []
    positions = [sums.positions for sums in found if sums.positions is not None]
    own = {name: torch.cat([sums.rows[name].cpu() for sums in found]) for name in names}
    every = [part for part in strategy.gather((torch.cat(positions), own) if found else None) if part is not None]
    order = torch.cat([places for places, _ in every]).argsort()
    return {name: torch.cat([part[name] for _, part in every])[order] for name in every[0][1]}


def _means(totals: dict[str, float], size: int) -> dict[str, float] | None:
    counted, cuts = totals.pop(_COUNT), totals.pop(_CUT)
    if cuts:
        return None
    if counted != size:
        raise ToolkitError(
            f"evaluation looked at {counted:.0f} samples, the eval set has {size}: the figures would be wrong; "
            "the ranks' parts must tile the set without padding"
        )
    weights = {name: totals.get(name + WEIGHT, size) for name in totals if not name.endswith(WEIGHT)}
    return {name: totals[name] / weight if weight else 0.0 for name, weight in weights.items()}
