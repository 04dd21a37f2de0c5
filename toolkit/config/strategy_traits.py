"""The values of ``strategy.name``, and what the checks of a config must know of each."""

from __future__ import annotations

from typing import NamedTuple


class StrategyTraits(NamedTuple):
    """What holds of a strategy. No trait has a default: a new strategy must state all of them."""

    same_state: bool
    """Its state has the same names and values as that of the others with this trait (local_sgd: at the end of a round,
    with the mean). Another of them may continue a run, to rounding."""
    whole_update: bool
    """It does everything that ``train:`` asks for between gradients and weights."""
    sync_batch_norm: bool
    """BatchNorm may use all ranks' samples."""
    sharded: bool
    """A rank holds a part of each weight, or of many."""
    own_time: bool
    """Its ranks compute a step up to its backward pass before they wait for each other."""


# fmt: off
TRAITS = {
    # same_state, whole_update, sync_batch_norm, sharded, own_time
    "ddp":              StrategyTraits(True,  True,  True,  False, True),
    "fsdp":             StrategyTraits(True,  True,  True,  True,  False),
    "zero":             StrategyTraits(True,  True,  True,  True,  False),
    "tensor":           StrategyTraits(True,  True,  False, True,  False),
    "pipeline":         StrategyTraits(True,  True,  False, False, False),
    "parameter_server": StrategyTraits(True,  False, False, False, False),
    "local_sgd":        StrategyTraits(True,  False, False, False, False),
    "dp":               StrategyTraits(True,  True,  False, False, False),
    "auto":             StrategyTraits(True,  True,  True,  False, False),
    "custom":           StrategyTraits(False, False, False, False, False),
}
# fmt: on
STRATEGIES = tuple(TRAITS)
SAME_STATE, WHOLE_UPDATE, SYNC_BATCH_NORM, SHARDED, OWN_TIME = (
    tuple(name for name, has in zip(TRAITS, column, strict=True) if has)
    for column in zip(*TRAITS.values(), strict=True)
)
