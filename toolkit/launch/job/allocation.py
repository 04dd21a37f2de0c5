"""The nodes of a Slurm allocation with the tasks planned on each, or this machine."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from toolkit import hostlist
from toolkit.config import ClusterConfig
from toolkit.errors import RequestError
from toolkit.slurm.variables import whole_number


@dataclass(frozen=True)
class Allocation:
    """Nodes, tasks on each node, and the job they belong to.

    ``job_id`` is None without Slurm. For an array element it is ``A_T``: a requeue or cancel by the bare id would
    affect the whole array.
    """

    hosts: tuple[str, ...]
    tasks: tuple[int, ...]
    cpus_per_task: int
    gpus_per_node: int = 0
    job_id: str | None = None
    restart_count: int = 0
    cluster: str = "local"

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return sum(self.tasks)

    @property
    def rank_hosts(self) -> list[str]:
        """Return the node of each rank: ranks fill one node after the other."""
        return [host for host, count in zip(self.hosts, self.tasks, strict=True) for _ in range(count)]

    @property
    def ranks_of(self) -> dict[str, range]:
        """Return the ranks of each node, by its name."""
        ends = itertools.accumulate(self.tasks)
        return {h: range(end - n, end) for h, n, end in zip(self.hosts, self.tasks, ends, strict=True)}

    def on(self, hosts: Sequence[str]) -> Allocation:
        """Return the part of the allocation on these of its nodes."""
        tasks = dict(zip(self.hosts, self.tasks, strict=True))
        return replace(self, hosts=tuple(hosts), tasks=tuple(tasks[host] for host in hosts))

    def without(self, spare: int) -> Allocation:
        """Return what is left without ``spare`` nodes as replacements. Raises RequestError where that is nothing."""
        if spare >= len(self.hosts):
            raise RequestError(
                f"cluster.spare_nodes: {spare} of the job's {len(self.hosts)} nodes leave none to run on; "
                "ask Slurm for cluster.nodes + cluster.spare_nodes nodes (in an sbatch script: #SBATCH --nodes)"
            )
        if spare and len(set(self.tasks)) > 1:
            raise RequestError(
                "cluster.spare_nodes: a spare can stand in for any node only where all have the same number of tasks, "
                f"and this job has {','.join(map(str, self.tasks))}; use #SBATCH --ntasks-per-node"
            )
        return self.on(self.hosts[: len(self.hosts) - spare])

    @property
    def job_key(self) -> str | None:
        """Return one word for (cluster, job id, array task). Job ids alone start again with a new cluster."""
        if self.job_id is None:
            return None
        return f"{self.cluster}-{self.job_id}"

    @staticmethod
    def local(config: ClusterConfig) -> Allocation:
        """Return this machine, with the tasks that the config asks for. Raises RequestError for more than one node."""
        if config.nodes != 1:
            raise RequestError(
                f"cluster.nodes: {config.nodes} nodes need Slurm, and this is to run on this machine alone; "
                "use cluster.nodes=1 with a larger cluster.tasks_per_node, or submit where sbatch answers"
            )
        return Allocation((socket.gethostname(),), (config.tasks_per_node,), config.cpus_per_task, config.gpus_per_node)

    @staticmethod
    def slurm(environ: Mapping[str, str]) -> Allocation:
        """Return the allocation of this batch script or ``salloc`` shell, from its variables.

        Raises RequestError where there is none.
        """
        if "SLURM_JOB_ID" not in environ or "SLURM_JOB_NODELIST" not in environ:
            raise RequestError(
                "`toolkit supervise` runs inside an allocation (SLURM_JOB_ID and SLURM_JOB_NODELIST are not set); "
                "use sbatch or salloc, or `toolkit submit` from a login node"
            )
        if whole_number(environ, "SLURM_HET_SIZE", 1) > 1:
            raise RequestError(
                f"this is a heterogeneous job of {environ['SLURM_HET_SIZE']} components, of which `toolkit supervise` "
                "would use the first alone; submit a job of one component, or start the ranks with "
                "`srun --het-group=0,1 toolkit run CONFIG`"
            )
        hosts = tuple(hostlist.expand(environ["SLURM_JOB_NODELIST"]))
        tasks = _tasks(environ, len(hosts))
        # The CPUs asked for, else an even share on the node with the scarcest.
        cpus_per_task = whole_number(environ, "SLURM_CPUS_PER_TASK", 0)
        if not cpus_per_task:
            cpus = hostlist.expand_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", "1"))
            cpus_per_task = max(1, min((c // t for c, t in zip(cpus, tasks, strict=False) if t), default=1))
        array_job, array_task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        return Allocation(
            hosts=hosts,
            tasks=tasks,
            cpus_per_task=cpus_per_task,
            gpus_per_node=whole_number(environ, "SLURM_GPUS_ON_NODE", 0),
            job_id=f"{array_job}_{array_task}" if array_job and array_task else environ["SLURM_JOB_ID"],
            restart_count=whole_number(environ, "SLURM_RESTART_COUNT", 0),
            cluster=environ.get("SLURM_CLUSTER_NAME", "slurm"),
        )


def _tasks(environ: Mapping[str, str], nodes: int) -> tuple[int, ...]:
    if not {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"} & environ.keys():
        return (1,) * nodes  # the number was not given; on an exclusive node Slurm then names its CPUs as tasks
    text = environ.get("SLURM_TASKS_PER_NODE", "1")
    tasks = tuple(hostlist.expand_counts(text))
    if len(tasks) != nodes:
        raise RequestError(
            f"SLURM_TASKS_PER_NODE={text} speaks of {len(tasks)} nodes and SLURM_JOB_NODELIST="
            f"{environ['SLURM_JOB_NODELIST']} of {nodes}; was one of them changed by hand?"
        )
    return tasks
