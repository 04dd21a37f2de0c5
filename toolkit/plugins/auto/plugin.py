"""The strategy auto: ddp, zero or fsdp, by what the device has room for."""

from toolkit.registry import Plugin, StrategyTraits

PLUGIN = Plugin(
    "auto",
    strategies={"auto": "toolkit.plugins.auto.strategy:build"},
    traits={"auto": StrategyTraits(same_state=True, whole_update=True, sync_batch_norm=True)},
    checks={"auto": "toolkit.plugins.auto.checks:AutoChecks"},
)
