"""What parameter servers refuse in a config."""

from __future__ import annotations

from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig, StrategyConfig, TrainConfig
from toolkit.config.strategy import ParameterServerConfig
from toolkit.config.validation import StrategyChecks, step_options


class ParameterServerChecks(StrategyChecks):
    """See :class:`toolkit.config.validation.StrategyChecks`."""

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
