"""Evaluation that counts each sample once, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from toolkit.dist.batch import Batch
from toolkit.dist.collectives import sum_across_ranks
from toolkit.errors import ConfigError, ToolkitError
from toolkit.strategies.protocol import Measure, Strategy


def evaluate(strategy: Strategy, batches: Iterable[Batch | None], size: int, measure: Measure) -> dict[str, float]:
    """The mean over all ``size`` samples of each thing ``measure`` adds up; equal on every rank, which all must call.

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
    for batch in batches:
        found = strategy.evaluate(batch, measure)
        count += found.count
        for name, value in found.values.items():
            sums[name] = sums[name] + value.double() if name in sums else value.double()
    return _means(sums, count, size)


def _means(sums: dict[str, Tensor], count: int, size: int) -> dict[str, float]:
    first = next(iter(sums.values()))
    total = torch.stack([*sums.values(), torch.tensor(count, dtype=torch.float64, device=first.device)])
    *values, counted = sum_across_ranks(total).tolist()
    if counted != size:
        raise ToolkitError(
            f"evaluation looked at {counted:.0f} samples, the eval set has {size}: the figures would be wrong; "
            "the ranks' parts must tile the set without padding"
        )
    return {name: value / size for name, value in zip(sums, values, strict=True)}
