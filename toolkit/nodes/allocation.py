"""The nodes of a Slurm allocation with the tasks planned on each, or this machine."""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from toolkit.base import hostlist, logs, outages
from toolkit.base.errors import RequestError, SlurmError
from toolkit.config import ClusterConfig
from toolkit.slurm import cluster_name
from toolkit.slurm.commands import SlurmCommands
from toolkit.slurm.environment import component_environments, whole_number
from toolkit.slurm.jobs import JobGpus

log = logs.get(__name__)

#: The tasks, the CPUs of each task and the GPUs of a node.
Shape: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True)
class Allocation:
    """Nodes, tasks on each, and their job, if there is one. For an array element it is ``A_T``: ``A`` is the array."""

    hosts: tuple[str, ...]
    tasks: tuple[int, ...]
    cpus_per_task: int  #: on the nodes with the fewest
    gpus: tuple[int, ...] = ()  #: of each node; empty without GPUs
    other_gres: tuple[str, ...] = ()  #: what else each component has on each of its nodes, such as ``scratch:10``
    gpu_types: Mapping[str, str] = field(default_factory=dict)  #: by node, as in `JobGpus.types_of_host`
    asks_for_gpus: bool = True  #: False: it has whatever its nodes have
    tasks_per_gpu: int = 1  #: ranks that share a GPU
    job_id: str | None = None
    restart_count: int = 0
    cluster: str = ""  #: its name, which is empty without Slurm
    task_cpus: tuple[int, ...] = ()  #: CPUs of each task, by node; empty: ``cpus_per_task`` on all
    #: by node, the component of a heterogeneous job that it belongs to; empty in other jobs
    components: tuple[int, ...] = ()
    partitions: tuple[str, ...] = ()  #: of each component

    @property
    def world_size(self) -> int:
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
    def cpus_of(self) -> dict[str, int]:
        """Return the number of CPUs of each node's tasks, by its name."""
        return dict(zip(self.hosts, self.task_cpus or [self.cpus_per_task] * len(self.hosts), strict=True))

    @property
    def gpus_per_node(self) -> int:
        return max(self.gpus, default=0)

    @property
    def is_uneven(self) -> bool:
        return len({*self.gpus}) > 1

    @property
    def shapes(self) -> dict[str, Shape]:
        """Return the shape of each node. A spare can stand in for a node of the same shape."""
        each = zip(self.tasks, self.cpus_of.values(), self.gpus_of.values(), strict=True)
        return dict(zip(self.hosts, each, strict=True))

    def gres(self, hosts: Collection[str]) -> str | None:
        """Return srun's ``--gres`` for a step on these nodes: as many GPUs as each of them has.

        Return None without GPUs or shares of them. A step without the option inherits the job's request. One that is
        not by node (``--gpus``, ``--gpus-per-task``) Slurm divides among the tasks, so that they see a part of a node's
        GPUs, or refuses; of ``--exclusive`` a step gets no GPU at all.
        """
        others = self.other_gres_on(hosts)
        if not self.gpus_per_node:
            return others or None
        gpus = min(self.gpus_of[host] for host in hosts)
        types = {self.gpu_types.get(host, "") for host in hosts}
        asked = types.pop() if len(types) == 1 else ""
        return ",".join(filter(None, [(asked or f"gpu:{gpus}") if gpus else "", others])) or "none"

    def other_gres_on(self, hosts: Collection[str]) -> str:
        """Return what else a step has on these nodes, which are of one component."""
        return dict(enumerate(self.other_gres)).get(self._component_of.get(next(iter(hosts)), 0), "")

    def step_groups(self, hosts: Collection[str]) -> list[list[str]]:
        """Return the nodes in groups of which one step can be made: of one component, with the same GPUs on each."""
        groups: dict[tuple[int | None, int, str], list[str]] = {}
        component_of, gpus_of = self._component_of, self.gpus_of
        for host in hosts:
            key = (component_of.get(host), gpus_of[host], self.gpu_types.get(host, ""))
            groups.setdefault(key, []).append(host)
        return list(groups.values())

    @property
    def by_component(self) -> list[list[str]]:
        groups: dict[int, list[str]] = {}
        for host, component in zip(self.hosts, self.components or [0] * len(self.hosts), strict=True):
            groups.setdefault(component, []).append(host)
        return list(groups.values())

    def step_options(self, hosts: Collection[str]) -> list[str]:
        """Return srun's options for the component of these nodes. Without them it takes the first."""
        component = self._component_of.get(next(iter(hosts)))
        return [] if component is None else [f"--het-group={component}"]

    @property
    def _component_of(self) -> dict[str, int]:
        return dict(zip(self.hosts, self.components, strict=bool(self.components)))

    def on(self, hosts: Sequence[str]) -> Allocation:
        """Return the part of the allocation on these of its nodes."""
        place_of = {host: place for place, host in enumerate(self.hosts)}

        def part(values: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(values[place_of[host]] for host in hosts) if values else ()

        return replace(
            self,
            hosts=tuple(hosts),
            tasks=part(self.tasks),
            gpus=part(self.gpus),
            task_cpus=part(self.task_cpus),
            components=part(self.components),
        )

    def in_order(self, slurm: SlurmCommands) -> Allocation:
        """Return it with near nodes next to each other in each component, where Slurm tells how they are connected.

        The last ones are the spares: the first spare is then the nearest to each node that it can replace.
        """
        component_of = self._component_of
        return self.on(sorted(node_order(self.hosts, slurm), key=lambda host: component_of.get(host, 0)))

    def as_asked(self, asked: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return ``cluster.components`` of a job of this size. What else was ``asked`` for stays."""
        first_of = dict(zip(reversed(self.components), reversed(self.hosts), strict=bool(self.components)))
        found = []
        for component, host in sorted(first_of.items()):
            tasks, cpus, gpus = self.shapes[host]
            own = {"partition": self.partitions[component], **(asked[component] if component < len(asked) else {})}
            size = {"nodes": self.components.count(component), "tasks_per_node": tasks, "cpus_per_task": cpus}
            found.append({**own, **size, **({"gpus_per_node": gpus} if self.asks_for_gpus else {})})
        return found

    def without_spares(self, spare: int) -> Allocation:
        """Return what is left without ``spare`` nodes: the last of the commonest shape. Raises RequestError."""
        if spare >= len(self.hosts):
            raise RequestError(
                f"cluster.spare_nodes: {spare} of the job's {len(self.hosts)} nodes leave none to run on; "
                "ask Slurm for cluster.nodes + cluster.spare_nodes nodes (in an sbatch script: #SBATCH --nodes)"
            )
        shapes = self.shapes
        ((common, count),) = Counter(shapes.values()).most_common(1)
        alike = [host for host in self.hosts if shapes[host] == common]
        if spare >= count:
            raise RequestError(
                f"cluster.spare_nodes: {spare} of this job's nodes, with {','.join(map(str, self.tasks))} tasks, could "
                "stand in for no other: that needs the same number of tasks, CPUs and GPUs; use #SBATCH "
                "--ntasks-per-node, or ask for more nodes of one kind"
            )
        spares = {*alike[count - spare :]}
        return self.on([host for host in self.hosts if host not in spares])

    @property
    def job_key(self) -> str | None:
        """Return one word for (cluster, job id, array task). Job ids alone start again with a new cluster."""
        if self.job_id is None:
            return None
        return f"{self.cluster or 'slurm'}-{self.job_id}"

    @staticmethod
    def local(config: ClusterConfig) -> Allocation:
        """Return this machine, with the tasks that the config asks for. Raises RequestError for more than one node."""
        if config.components:
            raise RequestError(
                "cluster.components: the components of a heterogeneous job need Slurm, and this is to run on this "
                "machine alone; use cluster.components=[], or submit where sbatch answers"
            )
        if config.nodes != 1:
            raise RequestError(
                f"cluster.nodes: {config.nodes} nodes need Slurm, and this is to run on this machine alone; "
                "use cluster.nodes=1 with a larger cluster.tasks_per_node, or submit where sbatch answers"
            )
        gpus = (config.gpus_per_node,) if config.gpus_per_node else ()
        return Allocation(
            hosts=(socket.gethostname(),),
            tasks=(config.tasks_per_node,),
            cpus_per_task=config.cpus_per_task,
            gpus=gpus,
            tasks_per_gpu=config.tasks_per_gpu,
        )

    @staticmethod
    def slurm(environ: Mapping[str, str], slurm: SlurmCommands | None = None) -> Allocation:
        """Return the allocation of this batch script or ``salloc`` shell. Raises RequestError where there is none.

        Its variables give the GPUs of this node alone. ``slurm`` is asked for those of the others, if there are GPUs.
        """
        if "SLURM_JOB_ID" not in environ or "SLURM_JOB_NODELIST" not in environ:
            raise RequestError(
                "`toolkit supervise` runs inside an allocation (SLURM_JOB_ID and SLURM_JOB_NODELIST are not set); "
                "use sbatch or salloc, or `toolkit submit` from a login node"
            )
        # Ranks fill one component after the other, as with srun.
        parts = component_environments(environ)
        nodes = [hostlist.expand(part["SLURM_JOB_NODELIST"]) for part in parts]
        hosts = tuple(itertools.chain(*nodes))
        gpus = _gpus(environ, hosts, slurm)
        tasks, task_cpus = list[int](), list[int]()
        for part, names in zip(parts, nodes, strict=True):
            counts = _tasks(part, [gpus.of_host[host] for host in names])
            tasks += counts
            task_cpus += [_cpus_per_task(part, counts)] * len(names)
        array_job, array_task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
        components = tuple(number for number, names in enumerate(nodes) for _ in names)
        return Allocation(
            hosts=hosts,
            tasks=tuple(tasks),
            cpus_per_task=min(task_cpus),
            gpus=tuple(gpus.of_host[host] for host in hosts) if any(gpus.of_host.values()) else (),
            other_gres=gpus.other_gres,
            gpu_types=gpus.types_of_host,
            asks_for_gpus=gpus.are_asked,
            job_id=f"{array_job}_{array_task}" if array_job and array_task else environ["SLURM_JOB_ID"],
            restart_count=whole_number(environ, "SLURM_RESTART_COUNT", 0),
            cluster=cluster_name.name_in_job(environ),
            task_cpus=tuple(task_cpus) if len({*task_cpus}) > 1 else (),
            components=components if len(parts) > 1 else (),
            partitions=tuple(part.get("SLURM_JOB_PARTITION", "") for part in parts) if len(parts) > 1 else (),
        )


def _gpus(environ: Mapping[str, str], hosts: Sequence[str], slurm: SlurmCommands | None) -> JobGpus:
    """Return the GPUs of each node; those of this node for all where Slurm is not asked, or does not answer."""
    if slurm is not None and any(
        name.startswith(("SLURM_GPUS", "SLURM_JOB_GPUS", "SLURM_HET_SIZE")) for name in environ
    ):
        ask = partial(slurm.gpus_of, environ["SLURM_JOB_ID"])
        answer = outages.retry_slurm(ask, "Slurm does not report the nodes' GPUs: assuming as many as here", wait_s=0.0)
        if answer is not None and answer.of_host.keys() >= {*hosts}:
            return answer
    return JobGpus(dict.fromkeys(hosts, whole_number(environ, "SLURM_GPUS_ON_NODE", 0)))


def _tasks(environ: Mapping[str, str], gpus: Sequence[int]) -> list[int]:
    """Return the tasks on each node of a component; ``gpus`` are those of its nodes."""
    if not {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"} & environ.keys():
        return [1] * len(gpus)  # the number was not given; on an exclusive node Slurm then names its CPUs as tasks
    text = environ.get("SLURM_TASKS_PER_NODE", "1")
    tasks = hostlist.expand_counts(text)
    if len(tasks) != len(gpus):
        raise RequestError(
            f"SLURM_TASKS_PER_NODE={text} names {len(tasks)} nodes, and SLURM_JOB_NODELIST="
            f"{environ['SLURM_JOB_NODELIST']} of {len(gpus)}; a step of srun "
            "names its own tasks: leave srun out; else one of them was changed by hand"
        )
    # 22.05 distributes these tasks by CPUs: seven to a node with four GPUs, and one to the next.
    of_gpus = [whole_number(environ, "SLURM_NTASKS_PER_GPU", 0) * count for count in gpus]
    return of_gpus if sum(of_gpus) == sum(tasks) else tasks


def _cpus_per_task(environ: Mapping[str, str], tasks: Sequence[int]) -> int:
    """Return the CPUs asked for, else an even share on the node with the scarcest."""
    asked = whole_number(environ, "SLURM_CPUS_PER_TASK", 0)
    if asked:
        return asked
    cpus = hostlist.expand_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", "1"))
    return max(1, min((c // t for c, t in zip(cpus, tasks, strict=False) if t), default=1))


_UNIT = re.compile(r"^(?:SwitchName|BlockName|AggregatedBlock)=(\S+).*?\bNodes=(\S+)", re.MULTILINE)


def node_order(hosts: Sequence[str], slurm: SlurmCommands | None) -> Sequence[str]:
    """Return the job's nodes such that near ones follow each other; as they are where Slurm does not tell.

    Without a topology plugin, when a node's address has the pattern ``node``, Slurm is not asked.
    """
    # sbatch(1), SLURM_TOPOLOGY_ADDR_PATTERN: switch.switch.node, or block.node.
    if slurm is None or len(hosts) < 2 or "." not in os.environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", ""):
        return hosts
    try:
        ordered = in_order(hosts, units_of(slurm.topology()))
    except (SlurmError, RequestError, ValueError) as error:  # a list of nodes may be cut off: SLURM_TOPO_LEN
        log.warning("ranks are not placed by the network: %s", error)
        return hosts
    if ordered != [*hosts]:
        log.info("ranks are placed by the network: %s", ",".join(ordered))
    return ordered


def units_of(text: str) -> dict[str, list[str]]:
    """Return the nodes of each switch or block, by its name, from the output of ``scontrol show topology``."""
    return {name: hostlist.expand(nodes) for name, nodes in _UNIT.findall(text)}


def in_order(hosts: Sequence[str], units: Mapping[str, Sequence[str]]) -> list[str]:
    """Return ``hosts`` such that those of each unit follow each other. One inside another has fewer nodes.

    A unit comes where the first of its nodes would. So the first node, which is the batch host, stays the first.
    """
    places = {host: place for place, host in enumerate(hosts)}
    keys: dict[str, list[int]] = {host: [] for host in hosts}
    for members in sorted(units.values(), key=len, reverse=True):
        of_job = [host for host in members if host in places]
        first = min((places[host] for host in of_job), default=0)
        for host in of_job:
            keys[host].append(first)
    return sorted(hosts, key=lambda host: [*keys[host], places[host]])
