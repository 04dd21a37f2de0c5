"""The files a box configures Slurm with, as text. Every value that differs from Slurm's default has its reason here."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SUBNET = "10.77.0"  # a box's network has no way out and no name on the host: every box may use the same one
LOGIN = "login"
#: Files that stand for GPUs. Slurm wants a device for each, and counts it.
GPU_TYPE = "fake"
_GPU_FILES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True)
class Spec:
    """What kind of cluster a box is."""

    name: str
    nodes: int
    cpus: int
    strict: bool
    slurm: str
    grace_s: int = 30
    slurmd_timeout_s: int = 30
    gpus: Sequence[int] = ()  #: of each node; none by default, and two on strict nodes
    gpu_types: Sequence[str] = (GPU_TYPE,)  #: in turn, of a node's GPUs
    gpu_shares: Mapping[str, int] = field(default_factory=dict)  #: ``shard`` and ``mps``: how many of each GPU
    topology: str = ""  #: the text of topology.conf, of switches or blocks

    @property
    def gpus_of(self) -> dict[str, int]:
        """Return the number of each node's GPUs, by its name."""
        return dict(zip(self.node_names, self.gpus or [2 * self.strict] * self.nodes, strict=True))

    def gres_of(self, node: str) -> dict[str, int]:
        """Return the numbers of the node's generic resources, by their names with the types."""
        gpus = self.gpus_of[node]
        types = Counter(self.gpu_types[index % len(self.gpu_types)] for index in range(gpus))
        shares = {name: gpus * count for name, count in self.gpu_shares.items() if gpus}
        return {f"gpu:{kind}": count for kind, count in types.items()} | shares

    @property
    def node_names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    @property
    def addresses(self) -> dict[str, str]:
        """Host name -> address, the login side included."""
        nodes = {name: f"{SUBNET}.{10 + number}" for number, name in enumerate(self.node_names, start=1)}
        return {LOGIN: f"{SUBNET}.1", **nodes}

    @property
    def memory_mb(self) -> int:
        """Return each node's share of the machine's memory. CR_Core_Memory needs a limit that exists."""
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
        return max(1000, total // self.nodes)


def config_files(spec: Spec) -> dict[str, str]:
    """Name -> text of everything in the box's /etc/slurm but the munge key."""
    files = {
        "slurm.conf": slurm_conf(spec),
        "slurmdbd.conf": _SLURMDBD,
        "cgroup.conf": _cgroup_conf(spec),
        "mpi.conf": "PMIxCliTmpDirBase=/run/pmix\n",
    }
    # File, not Count alone (that makes the node INVAL); with it Slurm sets CUDA_VISIBLE_DEVICES
    files["gres.conf"] = "".join(
        f"NodeName={node} Name=gpu Type={spec.gpu_types[index % len(spec.gpu_types)]} File={file}\n"
        for node, gpus in spec.gpus_of.items()
        for index, file in enumerate(_GPU_FILES[:gpus])
    ) + "".join(
        f"NodeName={node} Name={name} Count={count * gpus}\n"
        for node, gpus in spec.gpus_of.items()
        for name, count in spec.gpu_shares.items()
        if gpus
    )
    if spec.topology:
        files["topology.conf"] = spec.topology
    return files


def hosts(spec: Spec) -> str:
    return "".join(f"{address} {name}\n" for name, address in {"localhost": "127.0.0.1", **spec.addresses}.items())


def slurm_conf(spec: Spec) -> str:
    nodes = f"node[1-{spec.nodes}]"
    size = f"CPUs={spec.cpus} RealMemory={spec.memory_mb} State=UNKNOWN"
    gres = {node: ",".join(f"{name}:{count}" for name, count in spec.gres_of(node).items()) for node in spec.node_names}
    each = "\n".join(
        f"NodeName={node} NodeAddr={spec.addresses[node]} {size}{f' Gres={gres[node]}' if gres[node] else ''}"
        for node in spec.node_names
    )
    return f"""\
ClusterName={spec.name}
SlurmctldHost={LOGIN}({spec.addresses[LOGIN]})
SlurmUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/%n.slurmd.log
MailProg=/bin/true
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={LOGIN}
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
# a requeued job may start again after cred_expire + 1 s: 121 s by default
AuthInfo=cred_expire=5
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=2
PriorityType=priority/basic
# nodes may have more CPUs than the machine, and a node that comes back serves at once
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={spec.slurmd_timeout_s}
JobRequeue=1
# Slurm drains the node of a step that has not ended so long after it was killed, by default a minute: on a busy machine
# one takes longer, and Slurm's own process of a step whose node was taken out of its job was seen to hang
UnkillableStepTimeout=3600
PropagateResourceLimits=NONE
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes={",".join(["gpu", *spec.gpu_shares])}
{_topology(spec)}{_STRICT if spec.strict else _PLAIN}{_memory_limit(spec)}
{each}
PartitionName=DEFAULT Nodes={nodes} MaxTime=INFINITE State=UP
PartitionName=main Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={spec.grace_s}
PartitionName=high PriorityTier=10 PreemptMode=OFF
PartitionName=cancel PriorityTier=1 PreemptMode=CANCEL GraceTime=0
"""


_PLAIN = """\
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
KillWait=5
"""

# As sites are: ranks are bound, memory is counted, only the job's own processes are signalled, 30 s from TERM to KILL
_STRICT = """\
ProctrackType=proctrack/cgroup
TaskPlugin=task/affinity,task/cgroup
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
KillWait=30
"""

_SLURMDBD = f"""\
AuthType=auth/munge
DbdHost={LOGIN}
SlurmUser=root
PidFile=/run/slurmdbd.pid
LogFile=/var/log/slurm/slurmdbd.log
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
"""


def _topology(spec: Spec) -> str:
    plugin = "block" if "BlockName" in spec.topology else "tree"
    return f"TopologyPlugin=topology/{plugin}\n" if spec.topology else ""


def _memory_limit(spec: Spec) -> str:
    return f"DefMemPerCPU={spec.memory_mb // spec.cpus}\n" if spec.strict else ""


def _cgroup_conf(spec: Spec) -> str:
    if spec.strict:
        return "CgroupPlugin=cgroup/v1\nConstrainCores=yes\nConstrainRAMSpace=yes\n"
    # never used, but without a name slurmd 22.05 looks for one and refuses to start on some machines
    return "CgroupPlugin=cgroup/v1\n" if spec.slurm < "23.11" else "CgroupPlugin=disabled\n"
