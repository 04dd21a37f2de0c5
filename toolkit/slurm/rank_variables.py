"""What each launcher tells its ranks: a table of variables, and one reader.

Sources: srun(1) OUTPUT ENVIRONMENT VARIABLES and ``_exec_task`` of slurmstepd (het steps number nodes and tasks
globally); torch's ``LocalElasticAgent``; PRRTE's and Open MPI's ``OMPI_COMM_WORLD_*``; ``pmixp_info_set`` and
``p_mpi_hook_slurmstepd_task`` of Slurm's PMI plugins, which name a step's own launch ``slurm.pmix.<job>.<step>`` and
``<job>.<step>``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from toolkit.base import hostlist
from toolkit.base.errors import RequestError
from toolkit.slurm.variables import Environ, Number, number, refusal, required


@dataclass(frozen=True)
class Launch:
    """One launcher's variables. Where a number has several names, the first that is set counts."""

    launcher: str  #: as in `toolkit.slurm.placement.Placement`
    advice: str  #: what to do where the variables contradict each other
    rank: str
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_world_size: tuple[str, ...]  #: srun's are lists, with an entry for each node
    node_rank: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    proof: tuple[str, ...] = ()  #: variables that prove the launch; without any, its rank does
    key: tuple[str, ...] = ()  #: variables that together name one launch


#: Also the supervisor's local ranks, and any launcher that sets torch's own variables.
TORCHRUN = Launch(
    launcher="torchrun",
    advice=(
        "set LOCAL_RANK and LOCAL_WORLD_SIZE as well (0 and 1 where each rank has a machine to itself), or start the "
        "ranks with torchrun, `toolkit exec` or srun, which set them all, or unset RANK and WORLD_SIZE"
    ),
    rank="RANK",
    world_size=("WORLD_SIZE",),
    local_rank=("LOCAL_RANK",),
    local_world_size=("LOCAL_WORLD_SIZE",),
    node_rank=("GROUP_RANK", "NODE_RANK"),
    nodes=("GROUP_WORLD_SIZE", "NNODES"),
    key=("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TOOLKIT_ATTEMPT"),
)
MPI_ADVICE = "start the ranks with one launcher only: `mpirun ...` (Open MPI, MPICH, Intel MPI) or `srun ...`"
OPEN_MPI = Launch(
    launcher="mpi",
    advice=MPI_ADVICE,
    rank="OMPI_COMM_WORLD_RANK",
    world_size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
MVAPICH = Launch(
    launcher="mpi",
    advice=MPI_ADVICE,
    rank="MV2_COMM_WORLD_RANK",
    world_size=("MV2_COMM_WORLD_SIZE",),
    local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
    local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
)
#: Also Intel MPI.
MPICH = Launch(
    launcher="mpi",
    advice=MPI_ADVICE,
    rank="PMI_RANK",
    world_size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
)
SRUN = Launch(
    launcher="srun",
    advice="start the ranks with `srun`, without exporting SLURM_* variables by hand",
    rank="SLURM_PROCID",
    # SLURM_NTASKS only where the step's own number is missing: in the batch script it is the job's.
    world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    local_rank=("SLURM_LOCALID",),
    local_world_size=("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    node_rank=("SLURM_NODEID",),
    nodes=("SLURM_STEP_NUM_NODES", "SLURM_NNODES"),
    proof=("SLURM_STEP_ID", "SLURM_STEPID"),
    key=("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT", "SLURM_LAUNCH_NODE_IPADDR"),
)
#: Variables with an id that an MPI gives each of its launches.
MPI_KEYS = ("OMPI_MCA_ess_base_jobid", "I_MPI_HYDRA_UUID", "PALS_APID")

#: A MASTER_ADDR that no other machine could reach: all ranks are on this one.
_LOOPBACK = re.compile(r"localhost|ip6-localhost|127\.[0-9.]+|::1")


class _Others(NamedTuple):
    """The numbers of a rank beside its rank and the world size."""

    local_rank: Number
    local_world_size: Number
    node_rank: Number
    nodes: Number


@dataclass(frozen=True)
class Numbers:
    """The six numbers of a placement, each with its source."""

    rank: Number
    world_size: Number
    local_rank: Number
    local_world_size: Number
    node_rank: Number
    nodes: Number

    def check(self, advice: str) -> None:
        """Raise PlacementError where two numbers contradict each other."""
        for index, size in (
            (self.rank, self.world_size),
            (self.local_rank, self.local_world_size),
            (self.node_rank, self.nodes),
        ):
            if index.value >= size.value:
                raise refusal(f"{index} does not fit {size} (the first is counted from 0)", advice)
        if self.local_world_size.value > self.world_size.value:
            raise refusal(f"{self.local_world_size} is more than {self.world_size}", advice)


def _only_rank(source: str) -> _Others:
    zero, one = Number(0, source), Number(1, source)
    return _Others(zero, one, zero, one)


#: The numbers of a process that no launcher started.
ALONE = Numbers(Number(0, "alone"), Number(1, "alone"), *_only_rank("alone"))


def read(launch: Launch, environ: Environ) -> Numbers:
    """Return the numbers that a launcher gave this rank, or that follow from them.

    Raises PlacementError where one is missing, or two contradict each other.
    """
    proof = number(environ, *launch.proof, launch.rank)
    assert proof is not None, "the caller has seen that this launch is there"
    rank = required(environ, launch.rank, because=proof, advice=launch.advice)
    world_size = required(environ, *launch.world_size, because=proof, advice=launch.advice)
    if launch is TORCHRUN:
        others = _torchrun_others(environ, rank, world_size)
    elif launch is SRUN:
        others = _srun_others(environ, proof)
    else:
        others = _mpi_others(launch, environ, rank, world_size)
    numbers = Numbers(rank, world_size, *others)
    numbers.check(launch.advice)
    return numbers


# ------------------------------------------------------------------------- torchrun and the supervisor's local ranks


def _torchrun_others(environ: Environ, rank: Number, world_size: Number) -> _Others:
    """Return what torchrun says. ``init_process_group`` needs less, and some launchers set no more than that."""
    local_rank = number(environ, *TORCHRUN.local_rank)
    # A single rank needs no other variable.
    if world_size.value == 1:
        only = _only_rank(world_size.source)
        return only if local_rank is None else only._replace(local_rank=local_rank)
    local_size = number(environ, *TORCHRUN.local_world_size) or _implied_local_size(environ, rank, world_size)
    # Without LOCAL_RANK only these two cases leave no doubt: all ranks on one node, or one rank on each.
    if local_rank is None and local_size.value == world_size.value:
        local_rank = Number(rank.value, f"RANK, as all ranks are on one node ({local_size.source})")
    if local_rank is None and local_size.value == 1:
        local_rank = Number(0, f"the only rank of its node ({local_size})")
    if local_rank is None:
        raise refusal(
            f"{rank}, {world_size} and {local_size} leave open which of its node's ranks it is", TORCHRUN.advice
        )
    if local_size.value == world_size.value and "GROUP_RANK" not in environ:
        return _Others(local_rank, local_size, Number(0, "one node"), Number(1, "one node"))
    node_rank, nodes = number(environ, *TORCHRUN.node_rank), number(environ, *TORCHRUN.nodes)
    if node_rank is not None and nodes is not None:
        return _Others(local_rank, local_size, node_rank, nodes)
    # Without node numbers all nodes are taken to hold equally many ranks, in a row.
    if local_size.value == 0 or world_size.value % local_size.value:
        advice = "set GROUP_RANK and GROUP_WORLD_SIZE: the number of this rank's node, and how many there are"
        raise refusal(f"{world_size} is no multiple of {local_size}, so the number of this node is not known", advice)
    return _Others(local_rank, local_size, *_nodes_in_a_row(rank, world_size, local_size))


def _implied_local_size(environ: Environ, rank: Number, world_size: Number) -> Number:
    """Return the number of ranks on this node.

    It follows from the number of nodes, or from a MASTER_ADDR that is this machine.
    """
    # One node has all ranks; as many nodes as ranks have one each.
    nodes = number(environ, *TORCHRUN.nodes)
    if nodes is not None and nodes.value in (1, world_size.value):
        return Number(world_size.value // nodes.value, f"WORLD_SIZE and {nodes}")
    # A loopback address means that all ranks are on this machine.
    master = environ.get("MASTER_ADDR", "")
    if nodes is None and _LOOPBACK.fullmatch(master):
        return Number(world_size.value, f"WORLD_SIZE, as MASTER_ADDR={master} is this machine")
    where = f"MASTER_ADDR={master}" if master else "MASTER_ADDR is not set"
    raise refusal(
        f"{rank} and {world_size} are set, but LOCAL_WORLD_SIZE is not, and {where}: nothing says which of the ranks "
        "share this machine (LOCAL_RANK)",
        TORCHRUN.advice,
    )


def _nodes_in_a_row(rank: Number, world_size: Number, local_size: Number) -> tuple[Number, Number]:
    """Return node number and nodes if each is filled before the next. The last one may have fewer ranks."""
    source = f"{rank.source} / {local_size.source}"
    nodes = -(-world_size.value // local_size.value)  # rounded up
    return Number(rank.value // local_size.value, source), Number(nodes, source)


# ---------------------------------------------------------------------------------------------------------- MPI


def _mpi_others(launch: Launch, environ: Environ, rank: Number, world_size: Number) -> _Others:
    """Return what mpirun says. It numbers ranks but not nodes, so a node's number follows from the ranks before it."""
    # A single rank needs no other variable.
    if world_size.value == 1:
        return _only_rank(world_size.source)
    local_rank = required(environ, *launch.local_rank, because=rank, advice=launch.advice)
    local_size = required(environ, *launch.local_world_size, because=rank, advice=launch.advice)
    if local_size.value == 0:
        raise refusal(f"{local_size} leaves no rank on this node", launch.advice)
    return _Others(local_rank, local_size, *_nodes_in_a_row(rank, world_size, local_size))


# --------------------------------------------------------------------------------------------------------- srun


def _srun_others(environ: Environ, step: Number) -> _Others:
    """Return what srun says, which sets every number."""
    local_rank, node_rank, nodes = (
        required(environ, *names, because=step, advice=SRUN.advice)
        for names in (SRUN.local_rank, SRUN.node_rank, SRUN.nodes)
    )
    # This node's entry of ``2(x3),1``. Nodes may have different numbers of tasks, so nothing is divided.
    name = next((name for name in SRUN.local_world_size if name in environ), None)
    if name is None:
        raise refusal(f"{SRUN.local_world_size[0]} is not set in an srun step", SRUN.advice)
    try:
        counts = hostlist.expand_counts(environ[name])
    except RequestError as error:
        raise refusal(f"{name}={environ[name]!r}: {error}", SRUN.advice) from None
    if len(counts) != nodes.value or node_rank.value >= len(counts):
        raise refusal(f"{name}={environ[name]!r} does not fit {nodes} and {node_rank}", SRUN.advice)
    return _Others(local_rank, Number(counts[node_rank.value], name), node_rank, nodes)
