"""Evaluation that counts each sample once, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from toolkit.dist.batch import Batch
from toolkit.dist.collectives import sum_across_ranks
from toolkit.errors import ConfigError, ToolkitError
from toolkit.strategies.protocol import Measure, Strategy


def evaluate(
    strategy: Strategy,
    batches: Iterable[Batch | None],
    size: int,
    measure: Measure,
    is_cut: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """The mean over all ``size`` samples of each thing ``measure`` adds up; equal on every rank, which all must call.

    ``is_cut`` is asked after each batch: when it says so, on whichever rank, the evaluation ends early and is worth
    nothing: None, on every rank. All still enter the final sum, or those that were not cut would wait for ever.

    ``batches`` is this rank's part of the eval set, unpadded; every rank's has the same number of batches, the
    last ones None where it is done. Sums and counts are added in float64, in which counts are exact up to 2**53.
    Raises ToolkitError when the ranks together did not see exactly ``size`` samples.
    """
    if size < strategy.share.count:
        raise ConfigError(
            f"the eval set has {size} samples, fewer than the {strategy.share.count} ranks; use fewer ranks"
        )
    sums: dict[str, Tensor] = {}
    count = 0
    cut = False
    for batch in batches:
        found = strategy.evaluate(batch, measure)
        count += found.count
        for name, value in found.values.items():
            sums[name] = sums[name] + value.double() if name in sums else value.double()
        cut = is_cut()
        if strategy.evaluates_together:  # who ended alone would leave the others waiting in their next batch
            cut = bool(sum_across_ranks(torch.tensor(float(cut), device=_device(sums))).item())
        if cut:
            break
    return _means(sums, count, size, cut)


def _means(sums: dict[str, Tensor], count: int, size: int, cut: bool) -> dict[str, float] | None:
    total = torch.cat(
        [torch.stack([*sums.values()]), torch.tensor([count, cut], dtype=torch.float64, device=_device(sums))]
    )
    *values, counted, cuts = sum_across_ranks(total).tolist()
    if cuts:
        return None
    if counted != size:
        raise ToolkitError(
            f"evaluation looked at {counted:.0f} samples, the eval set has {size}: the figures would be wrong; "
            "the ranks' parts must tile the set without padding"
        )
    return {name: value / size for name, value in zip(sums, values, strict=True)}


def _device(sums: dict[str, Tensor]) -> torch.device:
    """Each rank has samples in its first batch, so there is a sum."""
    return next(iter(sums.values())).device
