"""The strategy tensor: ranks of a group compute each layer together."""

from toolkit.registry import Plugin, StrategyTraits

PLUGIN = Plugin(
    "tensor",
    strategies={"tensor": "toolkit.plugins.tensor.layout:build"},
    traits={
        "tensor": StrategyTraits(
            same_state=True, whole_update=True, sharded=True, mesh=("tensor", "replicas", "shards")
        )
    },
    checks={"tensor": "toolkit.plugins.tensor.checks:TensorChecks"},
)
