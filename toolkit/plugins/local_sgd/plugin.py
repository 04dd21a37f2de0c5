"""The strategy local_sgd: each rank steps by itself, and every few steps the ranks average."""

from toolkit.registry import Plugin, StrategyTraits

PLUGIN = Plugin(
    "local_sgd",
    strategies={"local_sgd": "toolkit.plugins.local_sgd.strategy:build"},
    sections={"strategy.local_sgd": "toolkit.plugins.local_sgd.config:LocalSgdConfig"},
    traits={"local_sgd": StrategyTraits(same_state=True)},
    checks={"local_sgd": "toolkit.plugins.local_sgd.checks:LocalSgdChecks"},
)
