"""Evaluation that counts each sample once, on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from toolkit.dist.batch import Batch
from toolkit.errors import ConfigError, RankLostError, ToolkitError
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
    cut = strategy.lost != lost  # known before the first batch, to every rank: then none need be looked at
    for batch in () if cut else batches:
        found = strategy.evaluate(batch, measure)
        count += found.count
        for name, value in found.values.items():
            sums[name] = sums[name] + value.double() if name in sums else value.double()
        cut = is_cut()
        if strategy.evaluates_together:  # who ended alone would leave the others waiting in their next batch
            cut = bool(strategy.sum({_CUT: float(cut)})[_CUT])
        if cut:
            break
    totals = strategy.sum({**sums, _COUNT: float(count), _CUT: float(cut)})
    if strategy.lost != lost:
        raise RankLostError(f"ranks have died: {sorted(strategy.lost - lost)}; their part was not evaluated")
    return _means(totals, size)


#: Names that no measure has.
_COUNT, _CUT = "\0count", "\0cut"


def _means(totals: dict[str, float], size: int) -> dict[str, float] | None:
    counted, cuts = totals.pop(_COUNT), totals.pop(_CUT)
    if cuts:
        return None
    if counted != size:
        raise ToolkitError(
            f"evaluation looked at {counted:.0f} samples, the eval set has {size}: the figures would be wrong; "
            "the ranks' parts must tile the set without padding"
        )
    return {name: total / size for name, total in totals.items()}
