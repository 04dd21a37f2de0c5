"""The config of a run that is there already, as far as its file can be read."""

from __future__ import annotations

from toolkit import config as configs
from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig
from toolkit.config.schema import set_values
from toolkit.files.rundir import RunDir
from toolkit.run.records import changes


def read(run: RunDir) -> JobConfig | None:
    """Return the config, or None for a damaged file."""
    try:
        return configs.load_config(run.config, site=False)
    except ConfigError:
        return None


def is_script(run: RunDir) -> bool:
    """True for a run of `toolkit exec`: it prints for its reader, and has checkpoints of its own."""
    config = read(run)
    return config is not None and config.job == configs.FOREIGN_JOB


def in_force(run: RunDir) -> JobConfig:
    """Return the config with the values that `toolkit set` has given the run since. Raises ConfigError."""
    config = configs.load_config(run.config, site=False)
    set_values(config, changes.latest(changes.in_force(changes.read(run))))
    return config
