"""The nodes of a Slurm allocation with the tasks planned on each, or this machine."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from toolkit.base import hostlist, outages
from toolkit.base.errors import RequestError
from toolkit.config import ClusterConfig
from toolkit.slurm import cluster_name
from toolkit.slurm.commands import SlurmCommands
from toolkit.slurm.jobs import JobGpus
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
    gpus: tuple[int, ...] = ()  #: of each node; empty without GPUs
    other_gres: tuple[str, ...] = ()  #: what else the job has on each node, such as ``scratch:10``
    asks_for_gpus: bool = True  #: False: it has whatever its nodes have
    job_id: str | None = None
    restart_count: int = 0
    cluster: str = ""  #: its name, which is empty without Slurm

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

    @property
    def gpus_of(self) -> dict[str, int]:
        """Return the number of each node's GPUs, by its name."""
        return dict(zip(self.hosts, self.gpus or [0] * len(self.hosts), strict=True))

    @property
    def gpus_per_node(self) -> int:
        """Return the number of GPUs of the node that has the most."""
        return max(self.gpus, default=0)

    @property
    def is_uneven(self) -> bool:
        """True if nodes have different numbers of GPUs."""
        return len({*self.gpus}) > 1

    def gres(self, hosts: Collection[str]) -> str | None:
        """Return srun's ``--gres`` for a step on these nodes: as many GPUs as each of them has.

        Return None without GPUs. A step without the option inherits the job's request. One that is not by node
        (``--gpus``, ``--gpus-per-task``) Slurm divides among the tasks, so that they see a part of a node's GPUs, or
        refuses; of ``--exclusive`` a step gets no GPU at all.
        """
        if not self.gpus_per_node:
            return None
        gpus = min(self.gpus_of[host] for host in hosts)
        return ",".join([*([f"gpu:{gpus}"] if gpus else []), *self.other_gres]) or "none"

    def by_gpus(self, hosts: Collection[str]) -> list[list[str]]:
        """Return the nodes in groups that have the same number of GPUs."""
        groups: dict[int, list[str]] = {}
        for host in hosts:
            groups.setdefault(self.gpus_of[host], []).append(host)
        return list(groups.values())

    def on(self, hosts: Sequence[str]) -> Allocation:
        """Return the part of the allocation on these of its nodes."""
        tasks, gpus = dict(zip(self.hosts, self.tasks, strict=True)), self.gpus_of
        return replace(
            self,
            hosts=tuple(hosts),
            tasks=tuple(tasks[host] for host in hosts),
            gpus=tuple(gpus[host] for host in hosts) if self.gpus else (),
        )

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
        return f"{self.cluster or 'slurm'}-{self.job_id}"

    @staticmethod
    def local(config: ClusterConfig) -> Allocation:
        """Return this machine, with the tasks that the config asks for. Raises RequestError for more than one node."""
        if config.nodes != 1:
            raise RequestError(
                f"cluster.nodes: {config.nodes} nodes need Slurm, and this is to run on this machine alone; "
                "use cluster.nodes=1 with a larger cluster.tasks_per_node, or submit where sbatch answers"
            )
        gpus = (config.gpus_per_node,) if config.gpus_per_node else ()
        return Allocation((socket.gethostname(),), (config.tasks_per_node,), config.cpus_per_task, gpus)

    @staticmethod
    def slurm(environ: Mapping[str, str], slurm: SlurmCommands | None = None) -> Allocation:
        """Return the allocation of this batch script or ``salloc`` shell, from its variables.

        They tell the GPUs of this node alone. ``slurm`` is asked for those of the others, if there are GPUs. Raises
        RequestError where there is no allocation.
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
        gpus = _gpus(environ, hosts, slurm)
        tasks = _tasks(environ, len(hosts))
        # 22.05 distributes these tasks by CPUs: seven to a node with four GPUs, and one to the next.
        of_gpus = [whole_number(environ, "SLURM_NTASKS_PER_GPU", 0) * gpus.of_host[host] for host in hosts]
        if sum(of_gpus) == sum(tasks):
            tasks = tuple(of_gpus)
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
            gpus=tuple(gpus.of_host[host] for host in hosts) if any(gpus.of_host.values()) else (),
            other_gres=gpus.other_gres,
            asks_for_gpus=gpus.are_asked,
            job_id=f"{array_job}_{array_task}" if array_job and array_task else environ["SLURM_JOB_ID"],
            restart_count=whole_number(environ, "SLURM_RESTART_COUNT", 0),
            cluster=cluster_name.in_job(environ),
        )


def _gpus(environ: Mapping[str, str], hosts: Sequence[str], slurm: SlurmCommands | None) -> JobGpus:
    """Return the GPUs of each node; those of this node for all where Slurm is not asked, or does not answer."""
    if slurm is not None and any(name.startswith(("SLURM_GPUS", "SLURM_JOB_GPUS")) for name in environ):
        ask = partial(slurm.gpus_of, environ["SLURM_JOB_ID"])
        answer = outages.ask(ask, "Slurm does not say how many GPUs each node has: taken as on this one", wait_s=0.0)
        if answer is not None and answer.of_host.keys() >= {*hosts}:
            return answer
    return JobGpus(dict.fromkeys(hosts, whole_number(environ, "SLURM_GPUS_ON_NODE", 0)))


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
