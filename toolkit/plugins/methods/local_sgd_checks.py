"""What local_sgd refuses in a config."""

from __future__ import annotations

from dataclasses import replace

from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig, StrategyConfig, TrainConfig
from toolkit.config.strategy import LocalSgdConfig
from toolkit.config.validation import StrategyChecks


class LocalSgdChecks(StrategyChecks):
    """See :class:`toolkit.config.validation.StrategyChecks`."""

    def config(self, config: JobConfig) -> None:
        local: LocalSgdConfig = config.strategy.local_sgd
        every = config.checkpoint.every_steps
        is_between = not isinstance(every, int) or every % local.round_steps or config.checkpoint.every_min is not None
        if config.retry.allow_fewer_nodes and is_between:
            raise ConfigError(
                "retry.allow_fewer_nodes: with local_sgd fewer ranks go on from the end of a round only, and "
                "checkpoints would be made inside of rounds, too; set checkpoint.every_steps to a multiple of "
                f"{local.round_steps} (strategy.local_sgd.round_steps) and checkpoint.every_min to null"
            )

    def step(self, train: TrainConfig, strategy: StrategyConfig) -> None:
        # Each rank's gradient can be clipped by its own norm.
        super().step(replace(train, clip_norm=None), strategy)
