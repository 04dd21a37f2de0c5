"""The strategy pipeline: each rank has some of the model's layers."""

from toolkit.registry import Plugin, StrategyTraits

PLUGIN = Plugin(
    "pipeline",
    strategies={"pipeline": "toolkit.plugins.pipeline.strategy:build"},
    sections={"strategy.pipeline": "toolkit.plugins.pipeline.config:PipelineConfig"},
    traits={"pipeline": StrategyTraits(same_state=True, whole_update=True, mesh=("stages", "replicas"))},
    checks={"pipeline": "toolkit.plugins.pipeline.checks:PipelineChecks"},
)
