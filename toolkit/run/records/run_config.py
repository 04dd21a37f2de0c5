"""The config of a run that is there already, as far as its file can be read."""

from __future__ import annotations

from toolkit import config as configs
from toolkit.base.errors import ConfigError
from toolkit.config import JobConfig
from toolkit.files.rundir import RunDir


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
