"""What auto refuses in a config."""

from __future__ import annotations

from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig, MeshConfig
from toolkit.config.validation import StrategyChecks


class AutoChecks(StrategyChecks):
    """See :class:`toolkit.config.validation.StrategyChecks`."""

    def config(self, config: JobConfig) -> None:
        if config.strategy.mesh != MeshConfig():
            raise ConfigError(
                "strategy.mesh: auto lays out the ranks itself; leave the mesh at null, or name a strategy"
            )
