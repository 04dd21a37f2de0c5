"""What the methods refuse in a config."""

from __future__ import annotations

from dataclasses import replace

from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig, MeshConfig, StrategyConfig, TrainConfig
from toolkit.config.strategy import LocalSgdConfig, ParameterServerConfig
from toolkit.config.validation import StrategyChecks, step_options


class AutoChecks(StrategyChecks):
    def config(self, config: JobConfig) -> None:
        if config.strategy.mesh != MeshConfig():
            raise ConfigError(
                "strategy.mesh: auto lays out the ranks itself; leave the mesh at null, or name a strategy"
            )


class LocalSgdChecks(StrategyChecks):
    def config(self, config: JobConfig) -> None:
        local: LocalSgdConfig = config.strategy.local_sgd
        every = config.checkpoint.every_steps
        is_between = not isinstance(every, int) or every % local.round_steps or config.checkpoint.every_min is not None
        if config.retry.allow_fewer_nodes and is_between:
            raise ConfigError(
                "retry.allow_fewer_nodes: with local_sgd fewer ranks continue from the end of a round only, and "
                "checkpoints would be made inside of rounds, too; set checkpoint.every_steps to a multiple of "
                f"{local.round_steps} (strategy.local_sgd.round_steps) and checkpoint.every_min to null"
            )

    def step(self, train: TrainConfig, strategy: StrategyConfig) -> None:
        # Each rank's gradient can be clipped by its own norm.
        super().step(replace(train, clip_norm=None), strategy)


class ParameterServerChecks(StrategyChecks):
    def config(self, config: JobConfig) -> None:
        servers: int = config.strategy.parameter_server.servers
        if config.optim.name == "muon" and servers > 1:
            raise ConfigError(
                "optim.name: muon needs each matrix as a whole, and with strategy.parameter_server.servers "
                f"{servers} a server has some of its rows; set that to 1, or use adamw"
            )

    def step(self, train: TrainConfig, strategy: StrategyConfig) -> None:
        """Allow what a single server can do by itself: it does not concern the workers."""
        served: ParameterServerConfig = strategy.parameter_server
        for key in step_options(train):
            # Clipping and pruning need the gradients and weights alone, which a single server has.
            if key not in ("clip_norm", "pruning"):
                why = "workers, who evaluate and keep the buffers, hear nothing of it; leave it out, or use ddp"
            elif key == "pruning" and served.mode != "sync":
                why = f"it goes by steps, and in mode {served.mode} an update is less than one; use mode sync"
            elif served.servers > 1:
                why = "a server sees its own part of the gradient only; set strategy.parameter_server.servers to 1"
            else:
                continue
            raise ConfigError(f"train.{key}: does not go with strategy.name parameter_server so: {why}")

    def idle(self, config: JobConfig, ranks: int) -> int:
        servers: int = config.strategy.parameter_server.servers
        if servers >= ranks:
            raise ConfigError(
                f"strategy.parameter_server.servers: {servers} of {ranks} ranks leave no worker; use fewer, "
                "or more ranks (cluster.nodes x cluster.tasks_per_node)"
            )
        return servers
