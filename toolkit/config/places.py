"""Checks that a config's programs, folders and secrets exist.

Only the login node is asked: the compute nodes may see other files.
"""

from __future__ import annotations

import shutil
import tempfile

from toolkit import fsio, secret_values
from toolkit.config.schema import JobConfig
from toolkit.errors import ConfigError
from toolkit.slurm import container


def check_places(config: JobConfig) -> None:
    """Refuse a missing program, secret or folder, and one that cannot be written. Raises ConfigError."""
    secret_values.check_sources(config.secrets)
    if config.cluster.container is not None:
        container.refuse_missing(config.cluster.container)
    for folder in config.cluster.container_mounts:
        if not fsio.expand(folder).is_dir():
            raise ConfigError(f"cluster.container_mounts: there is no folder {folder}")
    if config.notify and shutil.which(config.notify[0]) is None:
        raise ConfigError(
            f"notify: there is no program {config.notify[0]!r}; give its path, or [sh, -c, 'LINE'] for a shell's"
        )
    if config.checkpoint.copy_to is not None:
        copy_to = fsio.expand(config.checkpoint.copy_to)
        there = next(path for path in (copy_to, *copy_to.parents) if path.exists())
        # Create a folder there: permissions do not show that a disk is read-only, full or /proc.
        try:
            with tempfile.TemporaryDirectory(prefix=".toolkit-", dir=there):
                pass
        except OSError as error:
            raise ConfigError(f"checkpoint.copy_to: {copy_to} cannot be written: {there}: {error.strerror}") from None
