"""What a config may ask Slurm for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields

from toolkit.cluster import container
from toolkit.config.schema import JobConfig
from toolkit.errors import ConfigError


def check_cluster(config: JobConfig) -> None:
    """Values that end up in ``#SBATCH`` lines: a line break would start a shell line of its own."""
    cluster = config.cluster
    texts = {f.name: getattr(cluster, f.name) for f in fields(cluster)}
    texts.update({f"extra.{key}": value for key, value in cluster.extra.items()})
    for name, value in texts.items():
        if isinstance(value, str) and not (value.isprintable() and value):
            raise ConfigError(f"cluster.{name}: {value!r} is empty or holds a line break or another control character")
    for key, value in cluster.extra.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]*", str(key).replace("_", "-")):
            raise ConfigError(f"cluster.extra: {key!r} is not the long name of an sbatch flag, such as 'nodelist'")
        if not isinstance(value, (str, int, float, bool)):
            raise ConfigError(f"cluster.extra.{key}: {value!r} must be a text, a number or true")
        flag = str(key).replace("-", "_")
        if flag in _OWN_FLAGS:
            raise ConfigError(f"cluster.extra.{key}: use {_OWN_FLAGS[flag]} for this")
    if 0 < cluster.gpus_per_node < cluster.tasks_per_node:
        raise ConfigError(
            f"cluster.tasks_per_node: {cluster.tasks_per_node} ranks cannot share {cluster.gpus_per_node} GPUs of a "
            "node; each rank needs one of its own: set both keys to the same number"
        )
    if cluster.container is not None:
        container.parse(cluster.container)
        container.outermost(cluster.container_mounts)
    for line in cluster.setup:
        if "\n" in line or "\r" in line:
            raise ConfigError(f"cluster.setup: {line!r}: one list entry for each shell line")


#: sbatch flags with a key of their own, or that the toolkit itself must set.
_OWN_FLAGS: Mapping[str, str] = {
    "nodes": "cluster.nodes",
    "ntasks": "cluster.nodes and cluster.tasks_per_node",
    "ntasks_per_node": "cluster.tasks_per_node",
    "cpus_per_task": "cluster.cpus_per_task",
    "gpus_per_node": "cluster.gpus_per_node",
    "gpus_per_task": "cluster.gpus_per_node (per task hides the peers' devices from NCCL)",
    "mem": "cluster.mem_gb",
    "time": "cluster.time_min",
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "constraint": "cluster.constraint",
    "exclude": "cluster.exclude",
    "exclusive": "cluster.exclusive",
    "signal": "cluster.signal_delay_s",
    "job_name": "name",
    "output": "`toolkit logs` (the run folder holds every log)",
    "error": "`toolkit logs` (the run folder holds every log)",
    "no_kill": "cluster.spare_nodes or retry.allow_fewer_nodes (without them nobody would requeue the job)",
    "open_mode": "nothing: logs are always appended to",
    "array": "one submit for each run",
    "wrap": "`job`",
    "export": "nothing: the ranks need the environment",
}
