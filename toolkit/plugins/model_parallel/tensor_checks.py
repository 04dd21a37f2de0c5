"""What the strategy tensor refuses in a config."""

from __future__ import annotations

from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig, mesh_of
from toolkit.config.validation import StrategyChecks


class TensorChecks(StrategyChecks):
    """Those of ``strategy.name: tensor``."""

    def batch(self, config: JobConfig, ranks: int) -> None:
        super().batch(config, ranks)
        size, parts = config.data.global_batch_size, config.train.accumulate
        together = mesh_of(config.strategy, ranks).tensor or 1
        groups = ranks // together
        who = f"{ranks} ranks" if together == 1 else f"{groups} groups of {together} ranks"
        if config.train.compile and size // groups // parts < 2:
            raise ConfigError(
                "train.compile: with torch 2.15 compiled layers that are cut fail, or train to wrong weights, where a "
                f"part of a batch is a single sample (data.global_batch_size {size} on {who} in train.accumulate "
                f"{parts} parts); use more samples, fewer parts, or set it to false"
            )
