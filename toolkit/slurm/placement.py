"""Derives this process's place among the ranks from its launcher's variables.

The innermost launcher wins: torchrun (or the supervisor's explicit variables), then MPI, then an srun step, then alone.
Only variables of *one* launcher are ever combined: under ``srun torchrun`` SLURM_PROCID numbers the agents, and under
``mpirun`` every rank sees SLURM_PROCID=0 of the process that mpirun runs in. Two variables of the same launcher that
contradict each other raise a `PlacementError`: a guess would hang all ranks at the rendezvous.

What each launcher tells its ranks is one table of variables, with one reader. Sources: srun(1) OUTPUT ENVIRONMENT
VARIABLES and ``_exec_task`` of slurmstepd (het steps number nodes and tasks globally); torch's ``LocalElasticAgent``;
PRRTE's and Open MPI's ``OMPI_COMM_WORLD_*``; ``pmixp_info_set`` and ``p_mpi_hook_slurmstepd_task`` of Slurm's PMI
plugins, which name a step's own launch ``slurm.pmix.<job>.<step>`` and ``<job>.<step>``.

Each rank decides on its own node on its variables for torch, NCCL, gloo and OpenMP: those of user scripts too, under
every launcher. It loads nothing heavy: a script's rank pays for it before its own imports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from toolkit.base import hostlist
from toolkit.base.errors import PlacementError, RequestError
from toolkit.slurm import network
from toolkit.slurm.environment import Environ, Number, number, placement_error, required


@dataclass(frozen=True)
class Placement:
    """One rank's place. ``node_rank`` counts the launcher's nodes; ``hosts`` names them in that order where known."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    host: str
    launcher: str  #: "supervisor", "torchrun", "mpi", "srun" or "alone"
    hosts: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)  #: field name -> the variable it was read from
    notes: tuple[str, ...] = ()  #: what a reader of ``toolkit placement`` should know
    job_id: str | None = None
    array_job_id: str | None = None
    array_task_id: str | None = None
    step_id: str | None = None
    restart_count: int | None = None  #: None outside a job

    @property
    def job(self) -> str | None:
        """The id to requeue or cancel, ``ARRAY_TASK`` for an array element: the bare id would mean the whole array."""
        if self.array_job_id and self.array_task_id:
            return f"{self.array_job_id}_{self.array_task_id}"
        return self.job_id


def derive(environ: Environ, hostname: str) -> Placement:
    """Return the placement of this process.

    Raises `PlacementError` where one launcher's variables contradict each other.
    """
    launch = _innermost(environ)
    numbers = ALONE if launch is None else read(launch, environ)
    launcher = "alone" if launch is None else launch.launcher
    host, notes = hostname, []
    # The host names of other nodes are unknown, except in an srun step.
    hosts: tuple[str, ...] = (hostname,) if numbers.nodes.value == 1 else ()
    if launch is None:
        notes = _alone_notes(environ)
    elif launch is SRUN:
        # In the order of their numbers; none if Slurm did not name them.
        hosts = tuple(hostlist.expand(environ.get("SLURM_STEP_NODELIST", "")))
        if hosts and len(hosts) != numbers.nodes.value:
            named = f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']!r}"
            raise placement_error(f"{named} does not fit {numbers.nodes}", SRUN.advice)
        # Slurm's name of the node, which need not be the host name.
        host = environ.get("SLURMD_NODENAME") or (hosts[numbers.node_rank.value] if hosts else hostname)
    elif numbers.nodes.value > 1 and "/" in numbers.node_rank.source:  # divided: the launcher numbers no nodes
        subject = "RANK and its companions name" if launch is TORCHRUN else "mpirun names"
        notes = [f"{subject} no node numbers: node_rank and nodes assume that nodes are filled one after the other"]
    is_torchruns_own = launch is TORCHRUN and "TORCHELASTIC_RUN_ID" in environ
    if launch in (TORCHRUN, SRUN) and "TOOLKIT_ATTEMPT" in environ and not is_torchruns_own:
        launcher = "supervisor"
    restarts = number(environ, "SLURM_RESTART_COUNT")
    job_id = environ.get("SLURM_JOB_ID")
    return Placement(
        **{name: number.value for name, number in vars(numbers).items()},
        host=host,
        launcher=launcher,
        hosts=hosts,
        sources={name: number.source for name, number in vars(numbers).items()},
        notes=tuple(notes),
        job_id=job_id,
        array_job_id=environ.get("SLURM_ARRAY_JOB_ID"),
        array_task_id=environ.get("SLURM_ARRAY_TASK_ID"),
        step_id=_step_id(environ),
        # Slurm sets the count only from the first restart on.
        restart_count=restarts.value if restarts else (0 if job_id else None),
    )


def _alone_notes(environ: Environ) -> list[str]:
    notes = []
    allocated = number(environ, "SLURM_NTASKS", "SLURM_NPROCS")
    try:
        counts = hostlist.expand_counts(environ.get("SLURM_TASKS_PER_NODE", ""))
    except RequestError:
        counts = []
    tasks = sum(counts) if allocated is None else allocated.value
    if tasks > 1:
        notes.append(f"alone: the allocation has {tasks} tasks; start with `srun` (or `toolkit supervise`) to use them")
    if "WORLD_SIZE" in environ:
        notes.append(f"WORLD_SIZE={environ['WORLD_SIZE']} is ignored: RANK is not set, so no launcher set it")
    return notes


def rank_environment(placement: Placement) -> dict[str, str]:
    """Return the variables of one rank that torchrun-style scripts read.

    TORCHELASTIC_RUN_ID is left out on purpose: with it `derive` would take this launch for torchrun's.
    """
    values = {
        "RANK": placement.rank,
        "WORLD_SIZE": placement.world_size,
        "LOCAL_RANK": placement.local_rank,
        "LOCAL_WORLD_SIZE": placement.local_world_size,
        "GROUP_RANK": placement.node_rank,
        "GROUP_WORLD_SIZE": placement.nodes,
        "NODE_RANK": placement.node_rank,
    }
    return {name: str(value) for name, value in values.items()}


def launch_key(environ: Environ) -> str | None:
    """Return a name for the rendezvous that all ranks of this launch derive, and no other launch; None without.

    It holds the port and address that this step's srun listens on, because job ids start at 1 again in a fresh cluster
    and two steps of a job run side by side. Plain MPICH passes nothing unique.
    """
    if _is_torchrun(environ):
        return _join_key("torchrun", environ, TORCHRUN.key)
    if _is_foreign_pmix(environ):
        return f"mpi-{environ['PMIX_NAMESPACE']}"
    if _mpi_launches(environ):
        return next((f"mpi-{environ[name]}" for name in MPI_KEYS if name in environ), None)
    if _step_id(environ) is None:
        return None
    # The components of a het job listen on ports of their own: the port in the key would split the launch.
    names = SRUN.key if "SLURM_HET_SIZE" in environ else (*SRUN.key, "SLURM_SRUN_COMM_PORT")
    return _join_key("srun", environ, names)


def _join_key(kind: str, environ: Environ, names: Sequence[str]) -> str:
    return "-".join([kind, *(environ.get(name, "") for name in names)])


# --------------------------------------------------------------------------------- which launch is the innermost

#: Step ids from here up are no srun steps: batch script, interactive shell, extern step (SLURM_MAX_NORMAL_STEP_ID).
_FIRST_SPECIAL_STEP_ID = 0xFFFFFFF0


def _innermost(environ: Environ) -> LauncherVariables | None:
    """Return the innermost launcher: torchrun's kind, then MPI, then the srun step. None if no launcher ran.

    Raises PlacementError where the variables of two launchers that stand for one launch contradict each other.
    """
    if _is_torchrun(environ):
        return TORCHRUN
    mpis = _mpi_launches(environ)
    if mpis:
        first, *others = mpis
        for other in others:
            _check_equal(environ, first.rank, other.rank, first.advice)
            _check_equal(environ, first.world_size[0], other.world_size[0], first.advice)
        # Open MPI starts its ranks over PMIx, which numbers them as well.
        if first is OPEN_MPI:
            _check_equal(environ, first.rank, "PMIX_RANK", first.advice)
        return first
    pmix_rank = number(environ, "PMIX_RANK")
    if pmix_rank is not None and _is_foreign_pmix(environ):
        raise placement_error(
            f"{pmix_rank} was set by a PMIx launcher, but no variable says how many ranks there are", MPI_ADVICE
        )
    if _step_id(environ) is None:
        return None
    # If the step's own PMI plugin numbers the rank differently, one of the two was overwritten.
    if environ.get("PMIX_NAMESPACE") == f"slurm.pmix.{_step_name(environ)}":
        _check_equal(environ, "PMIX_RANK", SRUN.rank, SRUN.advice)
    if environ.get("PMI_JOBID") == _step_name(environ):
        _check_equal(environ, "PMI_RANK", SRUN.rank, SRUN.advice)
    return SRUN


def _is_torchrun(environ: Environ) -> bool:
    """True if RANK and its companions are a launch of their own.

    False if they are a copy of the srun step's numbers. MASTER_ADDR, MASTER_PORT or WORLD_SIZE without RANK were
    exported by hand; no launcher set them.
    """
    rank = number(environ, "RANK")
    if rank is None:
        return False
    world_size = required(environ, "WORLD_SIZE", because=rank, advice=TORCHRUN.advice)
    if "TORCHELASTIC_RUN_ID" in environ:
        return True
    # A wrapper in the step, or our own shim, may have copied the step's numbers into RANK and WORLD_SIZE.
    step_rank, step_size = _step_rank_and_size(environ)
    if step_rank is None or step_size is None or step_size.value != world_size.value:
        return True
    if step_rank.value == rank.value:
        return False
    # The same number of ranks but another rank: which of the two holds would be a guess.
    raise placement_error(
        f"{rank} and {step_rank}, both of {world_size.value} ranks, name different ranks",
        "RANK was exported before srun started the tasks (in the batch script SLURM_PROCID is always 0): "
        "unset RANK there, each task learns its own",
    )


def _mpi_launches(environ: Environ) -> list[LauncherVariables]:
    """Return the kinds of mpirun that started this process, without those whose variables the srun step itself set."""
    present = [launch for launch in (OPEN_MPI, MVAPICH, MPICH) if environ.get(launch.rank)]
    return [launch for launch in present if not _is_of_step(environ, launch)]


def _is_of_step(environ: Environ, mpi: LauncherVariables) -> bool:
    """True if srun's own PMI plugin set the variables of ``mpi``. Then there is one launch, the step."""
    step_rank, step_size = _step_rank_and_size(environ)
    if step_rank is None or step_size is None:
        return False
    if mpi is MPICH and number(environ, *mpi.local_rank) is not None:
        return False  # Slurm's plugin never sets these, but an mpirun inside the step does
    # Slurm's PMI plugin gives the step's name as the job's.
    if mpi is MPICH and environ.get("PMI_JOBID") == _step_name(environ):
        return True
    if mpi is OPEN_MPI and _is_foreign_pmix(environ):
        return False
    # Equal numbers in both are one launch.
    rank, size = number(environ, mpi.rank), number(environ, *mpi.world_size)
    agrees_on_size = size is not None and size.value == step_size.value
    return rank is not None and rank.value == step_rank.value and agrees_on_size


def _is_foreign_pmix(environ: Environ) -> bool:
    """True if a PMIx launcher other than srun (``prterun-host-pid@1``) started this process."""
    namespace = environ.get("PMIX_NAMESPACE", "")
    return bool(namespace) and not namespace.startswith("slurm.pmix.")


def _step_id(environ: Environ) -> str | None:
    """Return the id of this process's srun step. A batch script and an interactive shell are in none."""
    step = number(environ, *SRUN.proof)
    return None if step is None or step.value >= _FIRST_SPECIAL_STEP_ID else str(step.value)


def _step_name(environ: Environ) -> str:
    return f"{environ.get('SLURM_JOB_ID')}.{_step_id(environ)}"


def _step_rank_and_size(environ: Environ) -> tuple[Number | None, Number | None]:
    if _step_id(environ) is None:
        return None, None
    return number(environ, SRUN.rank), number(environ, *SRUN.world_size)


def _check_equal(environ: Environ, one: str, other: str, advice: str) -> None:
    a, b = number(environ, one), number(environ, other)
    if a and b and a.value != b.value:
        raise placement_error(f"{a} and {b} contradict each other", advice)


@dataclass(frozen=True)
class LauncherVariables:
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
TORCHRUN = LauncherVariables(
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
OPEN_MPI = LauncherVariables(
    launcher="mpi",
    advice=MPI_ADVICE,
    rank="OMPI_COMM_WORLD_RANK",
    world_size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
MVAPICH = LauncherVariables(
    launcher="mpi",
    advice=MPI_ADVICE,
    rank="MV2_COMM_WORLD_RANK",
    world_size=("MV2_COMM_WORLD_SIZE",),
    local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
    local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
)
#: Also Intel MPI.
MPICH = LauncherVariables(
    launcher="mpi",
    advice=MPI_ADVICE,
    rank="PMI_RANK",
    world_size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
    local_world_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
)
SRUN = LauncherVariables(
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


@dataclass(frozen=True)
class RankNumbers:
    """The six numbers of a placement, each with its source."""

    rank: Number
    world_size: Number
    local_rank: Number
    local_world_size: Number
    node_rank: Number
    nodes: Number


#: The last four of them, which each launcher tells in another way.
_Others = tuple[Number, Number, Number, Number]


def _only_rank(source: str) -> _Others:
    zero, one = Number(0, source), Number(1, source)
    return zero, one, zero, one


#: The numbers of a process that no launcher started.
ALONE = RankNumbers(Number(0, "alone"), Number(1, "alone"), *_only_rank("alone"))


def read(launch: LauncherVariables, environ: Environ) -> RankNumbers:
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
    local_rank, local_size, node_rank, nodes = others
    for index, size in ((rank, world_size), (local_rank, local_size), (node_rank, nodes)):
        if index.value >= size.value:
            raise placement_error(f"{index} does not fit {size} (the first is counted from 0)", launch.advice)
    if local_size.value > world_size.value:
        raise placement_error(f"{local_size} is more than {world_size}", launch.advice)
    return RankNumbers(rank, world_size, *others)


# ------------------------------------------------------------------------- torchrun and the supervisor's local ranks


def _torchrun_others(environ: Environ, rank: Number, world_size: Number) -> _Others:
    """Return what torchrun says. ``init_process_group`` needs less, and some launchers set no more than that."""
    local_rank = number(environ, *TORCHRUN.local_rank)
    # A single rank needs no other variable.
    if world_size.value == 1:
        only = _only_rank(world_size.source)
        return only if local_rank is None else (local_rank, *only[1:])
    local_size = number(environ, *TORCHRUN.local_world_size) or _implied_local_size(environ, rank, world_size)
    # Without LOCAL_RANK only these two cases leave no doubt: all ranks on one node, or one rank on each.
    if local_rank is None and local_size.value == world_size.value:
        local_rank = Number(rank.value, f"RANK, as all ranks are on one node ({local_size.source})")
    if local_rank is None and local_size.value == 1:
        local_rank = Number(0, f"the only rank of its node ({local_size})")
    if local_rank is None:
        raise placement_error(
            f"{rank}, {world_size} and {local_size} leave open which of its node's ranks it is", TORCHRUN.advice
        )
    if local_size.value == world_size.value and "GROUP_RANK" not in environ:
        return local_rank, local_size, Number(0, "one node"), Number(1, "one node")
    node_rank, nodes = number(environ, *TORCHRUN.node_rank), number(environ, *TORCHRUN.nodes)
    if node_rank is not None and nodes is not None:
        return local_rank, local_size, node_rank, nodes
    # Without node numbers all nodes are taken to hold equally many ranks, in a row.
    if local_size.value == 0 or world_size.value % local_size.value:
        advice = "set GROUP_RANK and GROUP_WORLD_SIZE: the number of this rank's node, and how many there are"
        raise placement_error(
            f"{world_size} is not a multiple of {local_size}, so this node's number is not known", advice
        )
    return local_rank, local_size, *_nodes_in_a_row(rank, world_size, local_size)


def _implied_local_size(environ: Environ, rank: Number, world_size: Number) -> Number:
    """Return the number of ranks on this node, by the number of nodes or a MASTER_ADDR that is this machine."""
    # One node has all ranks; as many nodes as ranks have one each.
    nodes = number(environ, *TORCHRUN.nodes)
    if nodes is not None and nodes.value in (1, world_size.value):
        return Number(world_size.value // nodes.value, f"WORLD_SIZE and {nodes}")
    # A loopback address means that all ranks are on this machine.
    master = environ.get("MASTER_ADDR", "")
    if nodes is None and _LOOPBACK.fullmatch(master):
        return Number(world_size.value, f"WORLD_SIZE, as MASTER_ADDR={master} is this machine")
    where = f"MASTER_ADDR={master}" if master else "MASTER_ADDR is not set"
    raise placement_error(
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


def _mpi_others(launch: LauncherVariables, environ: Environ, rank: Number, world_size: Number) -> _Others:
    """Return what mpirun says. It numbers ranks but not nodes, so a node's number follows from the ranks before it."""
    # A single rank needs no other variable.
    if world_size.value == 1:
        return _only_rank(world_size.source)
    local_rank = required(environ, *launch.local_rank, because=rank, advice=launch.advice)
    local_size = required(environ, *launch.local_world_size, because=rank, advice=launch.advice)
    if local_size.value == 0:
        raise placement_error(f"{local_size} leaves no rank on this node", launch.advice)
    return local_rank, local_size, *_nodes_in_a_row(rank, world_size, local_size)


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
        raise placement_error(f"{SRUN.local_world_size[0]} is not set in an srun step", SRUN.advice)
    try:
        counts = hostlist.expand_counts(environ[name])
    except RequestError as error:
        raise placement_error(f"{name}={environ[name]!r}: {error}", SRUN.advice) from None
    if len(counts) != nodes.value or node_rank.value >= len(counts):
        raise placement_error(f"{name}={environ[name]!r} does not fit {nodes} and {node_rank}", SRUN.advice)
    return local_rank, Number(counts[node_rank.value], name), node_rank, nodes


def environment(place: Placement, environ: Mapping[str, str], cpus_per_task: int) -> dict[str, str]:
    """Return the variables of torch, NCCL, gloo and OpenMP for this node. Those that the user has set are left out."""
    values = rank_environment(place)
    if environ.get("TOOLKIT_SUPERVISED") == "1" and "MASTER_ADDR" not in environ:
        if "SLURM_LAUNCH_NODE_IPADDR" not in environ:
            raise PlacementError(
                "TOOLKIT_SUPERVISED=1 is set, and neither MASTER_ADDR nor SLURM_LAUNCH_NODE_IPADDR says where the "
                "supervisor is; if none started this process, unset TOOLKIT_SUPERVISED"
            )
        values["MASTER_ADDR"] = environ["SLURM_LAUNCH_NODE_IPADDR"]  # where srun runs, so does the store host
    key = launch_key(environ)
    if key is not None and "TOOLKIT_LAUNCH_KEY" not in environ:  # a file's name
        values["TOOLKIT_LAUNCH_KEY"] = "".join(c if c.isalnum() or c in "._-" else "_" for c in key)
    # The interface is the one that reaches the rendezvous, or the node of srun.
    peer = values.get("MASTER_ADDR") or environ.get("MASTER_ADDR") or environ.get("SLURM_LAUNCH_NODE_IPADDR")
    if peer is not None:
        values.update(network.rank_network_environment(environ, peer))
    if "OMP_NUM_THREADS" not in environ:
        values["OMP_NUM_THREADS"] = environ.get("SLURM_CPUS_PER_TASK", str(cpus_per_task))
    return values
