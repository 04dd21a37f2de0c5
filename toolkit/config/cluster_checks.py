"""What a config may ask Slurm for."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

from toolkit.config.sbatch_flags import check_extra, check_hosts
from toolkit.config.schema import JobConfig
from toolkit.errors import ConfigError
from toolkit.slurm import container


def check_cluster(config: JobConfig) -> None:
    """Refuse what sbatch would not accept, or would take for something else. Raises ConfigError."""
    cluster = config.cluster
    check_extra(cluster)
    if cluster.exclude is not None:
        check_hosts("cluster.exclude", cluster.exclude)
    if 0 < cluster.gpus_per_node < cluster.tasks_per_node:
        raise ConfigError(
            f"cluster.tasks_per_node: {cluster.tasks_per_node} ranks cannot share {cluster.gpus_per_node} GPUs of a "
            "node; each rank needs one of its own: set both keys to the same number"
        )
    if cluster.container is not None:
        container.parse(cluster.container)
        container.outermost(cluster.container_mounts)
    if cluster.gpu_type is not None and not re.fullmatch(r"[\w.+-]+", cluster.gpu_type):
        raise ConfigError(f"cluster.gpu_type: {cluster.gpu_type!r} is no type of a GPU, such as a100")
    if cluster.setup:
        for line in cluster.setup:
            if line.startswith(("#SBATCH", "#PBS", "#BSUB")):
                raise ConfigError(f"cluster.setup: {line!r} is an option of sbatch; use cluster.extra")
        if re.search(r"(?<!\\)(?:\\\\)*\\$", cluster.setup[-1]):
            raise ConfigError(
                f"cluster.setup: {cluster.setup[-1]!r} ends with a backslash, which would take the next line along"
            )
        # bash -n reads the lines without running them.
        if bash := shutil.which("bash"):
            # In the C locale: bash warns of a locale that this machine lacks, and what it prints counts as an error.
            checked = subprocess.run(
                [bash, "-n"],
                input="\n".join(cluster.setup) + "\n",
                capture_output=True,
                text=True,
                errors="backslashreplace",
                env={**os.environ, "LC_ALL": "C"},
            )
            if checked.stderr:
                raise ConfigError(f"cluster.setup: these are no lines of bash: {checked.stderr.strip()}")
