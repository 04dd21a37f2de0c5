"""The strategies: how the ranks share one optimizer step. :func:`build_strategy` picks one by the config's name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from toolkit import registry
from toolkit.base.errors import ConfigError
from toolkit.config import StrategyConfig, TrainConfig, check_section, check_step, mesh_of
from toolkit.constraints import OneOf
from toolkit.devices import accelerator
from toolkit.ranks.session import Session
from toolkit.strategies.custom import Custom
from toolkit.strategies.layouts import Layout, Replicas, Shards, data_parallel
from toolkit.strategies.models import recompute_interval
from toolkit.strategies.objective import Criterion, Loss, Measure, Objective, Sums, criterion_objective
from toolkit.strategies.protocol import ModelFactory, OptimizerFactory, StepOutput, Strategy
from toolkit.strategies.spmd import Spmd

__all__ = [
    "Criterion",
    "Custom",
    "Loss",
    "Measure",
    "ModelFactory",
    "Objective",
    "OptimizerFactory",
    "StepOutput",
    "Strategy",
    "Sums",
    "build_layout",
    "build_strategy",
    "criterion_objective",
    "layout_options",
    "refuse_gloo_on_gpus",
]


def build_strategy(config: StrategyConfig, session: Session, train: TrainConfig | None = None) -> Strategy:
    """Return the strategy that ``config.name`` names; its model is not built yet.

    Its ``share`` is known already. ``train`` says how a step is computed: precision, accumulation, compiling. Raises
    ConfigError for an unknown name, for a mesh that does not match the number of ranks, and where ``train`` or the
    process group's backend does not go with this strategy.
    """
    OneOf(kind="strategies").check("strategy.name", config.name)
    train = train or TrainConfig()
    check_section(train, "train.")
    check_step(train, config)
    if config.name == "custom":
        raise ConfigError(
            "strategy.name: custom is for a job with a `train_step`, see jobs/custom.py; this one has none: use ddp"
        )
    # Of ddp, fsdp, zero and dp it is build_spmd, below.
    build = registry.load_part("strategies", config.name, registry.strategy(config.name).build)
    return build(config, session, train)  # type: ignore[no-any-return]


def build_spmd(config: StrategyConfig, session: Session, train: TrainConfig) -> Strategy:
    """Return a strategy whose ranks all make the same steps on a layout of the model."""
    return Spmd(session, build_layout(config.name, config, session, train), train)


def refuse_gloo_on_gpus(name: str, session: Session) -> None:
    """Raise ConfigError for a strategy that sends tensors of GPUs by itself, where gloo would carry them.

    gloo would hand the kernel an address of the GPU's memory: the rank dies, and the others wait for it.
    """
    if session.device.type != "cpu" and session.world_size > 1 and dist.get_backend() == "gloo":
        backend = accelerator.built_for().backend
        raise ConfigError(f"dist.backend: gloo cannot carry what {name} sends between GPUs; use {backend}")


def layout_options(config: StrategyConfig, train: TrainConfig) -> dict[str, Any]:
    """Return what every layout needs to know of a step: its precision, compiling, and what is computed again."""
    return {"precision": train.precision, "compile": train.compile, "recompute": recompute_interval(config)}


def build_layout(name: str, config: StrategyConfig, session: Session, train: TrainConfig) -> Layout:
    """Return how the ranks hold a model under the strategy ``name``. Raises ConfigError where it has no layout."""
    sizes = mesh_of(replace(config, name=name), session.world_size)
    how = layout_options(config, train)
    match name:
        case "ddp" if config.compression == "none":
            return Replicas(session, channels_last=train.channels_last, find_unused=config.find_unused, **how)
        case "ddp":
            from toolkit.plugins.methods.compressed import build

            return build(config, session, train, how)
        case "dp":  # one process with all GPUs of a node
            return data_parallel(session, **how)
        case "fsdp" | "zero":
            # These differ only in whether a block's gathered weights are freed after its forward pass.
            how |= {"reshard_after_forward": name == "fsdp", "cpu_offload": config.cpu_offload}
            how["prefetch_blocks"] = config.prefetch_blocks
            return Shards(session, sizes, compression=config.compression, **how)
    raise ConfigError(f"strategy.name: {name} has no layout")
