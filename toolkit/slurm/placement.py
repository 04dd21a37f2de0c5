"""Where this process stands among the ranks, derived from the variables that its launcher has set.

The innermost launcher wins: torchrun (or the supervisor's explicit variables), then MPI, then an srun step, then alone.
Only variables of *one* launcher are ever combined: under ``srun torchrun`` SLURM_PROCID numbers the agents, and under
``mpirun`` every rank sees SLURM_PROCID=0 of the process that mpirun runs in. Two variables of the same launcher that
contradict each other raise a `PlacementError`: a guess would hang all ranks at the rendezvous.

Sources: srun(1) OUTPUT ENVIRONMENT VARIABLES and ``_exec_task`` of slurmstepd (het steps number nodes and tasks
globally); torch's ``LocalElasticAgent``; PRRTE's and Open MPI's ``OMPI_COMM_WORLD_*``; ``pmixp_info_set`` and
``p_mpi_hook_slurmstepd_task`` of Slurm's PMI plugins, which name a step's own launch ``slurm.pmix.<job>.<step>`` and
``<job>.<step>``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NoReturn

from toolkit import hostlist
from toolkit.errors import PlacementError, RequestError

#: Step ids from here up are no srun steps: batch script, interactive shell, extern step (SLURM_MAX_NORMAL_STEP_ID).
FIRST_SPECIAL_STEP_ID = 0xFFFFFFF0

_NODE_NOTE = "{} no node numbers: node_rank and nodes assume that nodes are filled one after the other"

Environ = Mapping[str, str]


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
    notes: tuple[str, ...] = ()  #: what a reader of ``toolkit env`` should know
    job_id: str | None = None
    array_job_id: str | None = None
    array_task_id: str | None = None
    step_id: str | None = None
    restart_count: int | None = None  #: None outside a job

    @property
    def job(self) -> str | None:
        """Return the id to requeue or cancel, ``ARRAY_TASK`` for an array element.

        The bare id would mean the whole array.
        """
        if self.array_job_id and self.array_task_id:
            return f"{self.array_job_id}_{self.array_task_id}"
        return self.job_id


def derive(environ: Environ, hostname: str) -> Placement:
    """Return the placement of this process.

    Raises `PlacementError` where one launcher's variables contradict each other.
    """
    # The innermost launcher comes first.
    return (
        _from_explicit(environ, hostname)
        or _from_mpi(environ, hostname)
        or _from_step(environ, hostname)
        or _alone(environ, hostname)
    )


def rank_environment(
    placement: Placement, master_addr: str | None = None, master_port: int | None = None
) -> dict[str, str]:
    """Return the variables that torchrun-style scripts read, for one rank.

    Only this function in the package names these variables. It leaves out TORCHELASTIC_RUN_ID on purpose: with it
    `derive` would take this launch for torchrun's.
    """
    values: dict[str, object] = {
        "RANK": placement.rank,
        "WORLD_SIZE": placement.world_size,
        "LOCAL_RANK": placement.local_rank,
        "LOCAL_WORLD_SIZE": placement.local_world_size,
        "GROUP_RANK": placement.node_rank,
        "GROUP_WORLD_SIZE": placement.nodes,
        "NODE_RANK": placement.node_rank,
        "MASTER_ADDR": master_addr,
        "MASTER_PORT": master_port,
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def launch_key(environ: Environ) -> str | None:
    """Return a name that all ranks of this launch derive, and no other launch; ``None`` if there is none.

    It keys a rendezvous without a supervisor. It holds the port and address that this step's srun listens on, because
    job ids start at 1 again in a fresh cluster and two steps of a job run side by side. Plain MPICH passes nothing
    unique.
    """
    if _is_explicit(environ):
        return _join_key("torchrun", environ, _TORCHRUN_KEY)
    if _mpi_families(environ) or _is_foreign_pmix(environ):
        return _mpi_key(environ)
    if _step_id(environ) is None:
        return None
    # The components of a het job listen on ports of their own: the port in the key would split the launch.
    names = _STEP_KEY if "SLURM_HET_SIZE" in environ else (*_STEP_KEY, "SLURM_SRUN_COMM_PORT")
    return _join_key("srun", environ, names)


#: Variables that together name one launch of torchrun, and one srun step.
_TORCHRUN_KEY = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "TOOLKIT_ATTEMPT")
_STEP_KEY = (
    "SLURM_CLUSTER_NAME",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
    "SLURM_LAUNCH_NODE_IPADDR",
)
#: Variables with an id that an MPI gives each of its launches.
_MPI_KEYS = ("OMPI_MCA_ess_base_jobid", "I_MPI_HYDRA_UUID", "PALS_APID")


def _join_key(kind: str, environ: Environ, names: tuple[str, ...]) -> str:
    return "-".join([kind, *(environ.get(name, "") for name in names)])


def _mpi_key(environ: Environ) -> str | None:
    if _is_foreign_pmix(environ):
        return f"mpi-{environ['PMIX_NAMESPACE']}"
    return next((f"mpi-{environ[name]}" for name in _MPI_KEYS if name in environ), None)


# ---------------------------------------------------------------------------------------------- reading numbers


@dataclass(frozen=True)
class _Number:
    """A number and where it came from, so that errors and ``toolkit env`` can say so."""

    value: int
    source: str

    def __str__(self) -> str:
        return f"{self.source}={self.value}"


def _number(environ: Environ, *names: str) -> _Number | None:
    """Return the first of the variables ``names`` that is set."""
    name = next((name for name in names if environ.get(name, "") != ""), None)
    if name is None:
        return None
    text = environ[name]
    if not _WHOLE_NUMBER.fullmatch(text):
        _refuse(f"{name}={text[:80]!r} is not a number", "unset it, or start again with one launcher")
    return _Number(int(text), name)


#: No launcher sets a longer number, and Python refuses to convert very long ones.
_WHOLE_NUMBER = re.compile("[0-9]{1,18}")


def whole_number(environ: Environ, name: str, default: int) -> int:
    """Return the number in a variable, ``default`` where it is unset or empty. Raises RequestError that names it."""
    text = environ.get(name) or str(default)
    if not _WHOLE_NUMBER.fullmatch(text):
        raise RequestError(f"{name}={text[:80]!r} is not a whole number; was it changed by hand? Unset it")
    return int(text)


def _required(environ: Environ, *names: str, because: _Number, advice: str) -> _Number:
    number = _number(environ, *names)
    if number is None:
        _refuse(f"{because} is set but {' / '.join(names)} is not", advice)
    return number


def _refuse(problem: str, advice: str) -> NoReturn:
    raise PlacementError(f"cannot tell which rank this is: {problem}. What to do: {advice}.")


@dataclass(frozen=True)
class _Numbers:
    """The six numbers of a placement. `check` tests them against each other before they are used."""

    rank: _Number
    world_size: _Number
    local_rank: _Number
    local_world_size: _Number
    node_rank: _Number
    nodes: _Number

    def check(self, advice: str) -> None:
        for index, size in (
            (self.rank, self.world_size),
            (self.local_rank, self.local_world_size),
            (self.node_rank, self.nodes),
        ):
            if index.value >= size.value:
                _refuse(f"{index} does not fit {size} (the first is counted from 0)", advice)
        if self.local_world_size.value > self.world_size.value:
            _refuse(f"{self.local_world_size} is more than {self.world_size}", advice)

    def values(self) -> dict[str, int]:
        return {name: number.value for name, number in vars(self).items()}

    def sources(self) -> Mapping[str, str]:
        return MappingProxyType({name: number.source for name, number in vars(self).items()})


def _placement(
    environ: Environ,
    launcher: str,
    host: str,
    numbers: _Numbers,
    hosts: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> Placement:
    restarts = _number(environ, "SLURM_RESTART_COUNT")
    job_id = environ.get("SLURM_JOB_ID")
    return Placement(
        **numbers.values(),
        host=host,
        launcher=launcher,
        hosts=hosts,
        sources=numbers.sources(),
        notes=notes,
        job_id=job_id,
        array_job_id=environ.get("SLURM_ARRAY_JOB_ID"),
        array_task_id=environ.get("SLURM_ARRAY_TASK_ID"),
        step_id=_step_id(environ),
        # Slurm sets the count only from the first restart on.
        restart_count=restarts.value if restarts else (0 if job_id else None),
    )


# ------------------------------------------------------------------------- torchrun and the supervisor's local ranks

_EXPLICIT_ADVICE = (
    "set LOCAL_RANK and LOCAL_WORLD_SIZE as well (0 and 1 where each rank has a machine to itself), or start the "
    "ranks with torchrun, `toolkit exec` or srun, which set them all, or unset RANK and WORLD_SIZE"
)
#: A MASTER_ADDR that no other machine could reach: all ranks are on this one.
_LOOPBACK = re.compile(r"localhost|ip6-localhost|127\.[0-9.]+|::1")


def _from_explicit(environ: Environ, hostname: str) -> Placement | None:
    if not _is_explicit(environ):
        return None
    numbers = _explicit_numbers(environ)
    numbers.check(_EXPLICIT_ADVICE)
    # The host names of other nodes are unknown; a derived node number is noted for `toolkit env`.
    hosts = (hostname,) if numbers.nodes.value == 1 else ()
    notes = (_NODE_NOTE.format("RANK and its companions name"),) if "/" in numbers.node_rank.source else ()
    return _placement(environ, _explicit_launcher(environ), hostname, numbers, hosts, notes)


def _is_explicit(environ: Environ) -> bool:
    """True if RANK and its companions are a launch of their own, no echo of the srun step.

    MASTER_ADDR, MASTER_PORT or WORLD_SIZE without RANK were exported by hand; no launcher set them.
    """
    rank = _number(environ, "RANK")
    if rank is None:
        return False
    world_size = _required(environ, "WORLD_SIZE", because=rank, advice=_EXPLICIT_ADVICE)
    if "TORCHELASTIC_RUN_ID" in environ:
        return True
    return not _echoes_step(environ, rank, world_size)


def _echoes_step(environ: Environ, rank: _Number, world_size: _Number) -> bool:
    """True if a wrapper in the step, or our own shim, copied the step's numbers into RANK and WORLD_SIZE."""
    step_rank, step_size = _step_rank_and_size(environ)
    if step_rank is None or step_size is None or step_size.value != world_size.value:
        return False
    if step_rank.value == rank.value:
        return True
    # The same number of ranks but another rank: which of the two holds would be a guess.
    _refuse(
        f"{rank} and {step_rank}, both of {world_size.value} ranks, name different ranks",
        "RANK was exported before srun started the tasks (in the batch script SLURM_PROCID is always 0): "
        "unset RANK there, each task learns its own",
    )


def _explicit_numbers(environ: Environ) -> _Numbers:
    rank = _number(environ, "RANK")
    assert rank is not None, "the caller has looked"
    world_size = _required(environ, "WORLD_SIZE", because=rank, advice=_EXPLICIT_ADVICE)
    # A single rank needs no other variable.
    if world_size.value == 1:
        return _single(rank, world_size, _number(environ, "LOCAL_RANK"))
    local_size = _explicit_local_size(environ, rank, world_size)
    local_rank = _number(environ, "LOCAL_RANK")
    # Without LOCAL_RANK only these two cases leave no doubt: all ranks on one node, or one rank on each.
    if local_rank is None and local_size.value == world_size.value:
        local_rank = _Number(rank.value, f"RANK, as all ranks are on one node ({local_size.source})")
    if local_rank is None and local_size.value == 1:
        local_rank = _Number(0, f"the only rank of its node ({local_size})")
    if local_rank is None:
        _refuse(f"{rank}, {world_size} and {local_size} leave open which of its node's ranks it is", _EXPLICIT_ADVICE)
    return _Numbers(rank, world_size, local_rank, local_size, *_groups(environ, rank, world_size, local_size))


def _explicit_local_size(environ: Environ, rank: _Number, world_size: _Number) -> _Number:
    """Return LOCAL_WORLD_SIZE, or derive it from the number of nodes or a MASTER_ADDR that is this machine.

    ``init_process_group`` needs RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT only, and some launchers set no more.
    """
    local_size = _number(environ, "LOCAL_WORLD_SIZE")
    if local_size is not None:
        return local_size
    # One node has all ranks; as many nodes as ranks have one each.
    nodes = _number(environ, "GROUP_WORLD_SIZE", "NNODES")
    if nodes is not None and nodes.value in (1, world_size.value):
        return _Number(world_size.value // nodes.value, f"WORLD_SIZE and {nodes}")
    # A loopback address means that all ranks are on this machine.
    master = environ.get("MASTER_ADDR", "")
    if nodes is None and _LOOPBACK.fullmatch(master):
        return _Number(world_size.value, f"WORLD_SIZE, as MASTER_ADDR={master} is this machine")
    where = f"MASTER_ADDR={master}" if master else "MASTER_ADDR is not set"
    _refuse(
        f"{rank} and {world_size} are set, but LOCAL_WORLD_SIZE is not, and {where}: nothing says which of the ranks "
        "share this machine (LOCAL_RANK)",
        _EXPLICIT_ADVICE,
    )


def _groups(environ: Environ, rank: _Number, world_size: _Number, local_size: _Number) -> tuple[_Number, _Number]:
    """Return the node's number and the number of nodes.

    Where no variable gives them, all nodes are taken to hold equally many ranks, in a row.
    """
    if local_size.value == world_size.value and "GROUP_RANK" not in environ:
        return _Number(0, "one node"), _Number(1, "one node")
    node_rank, nodes = _number(environ, "GROUP_RANK", "NODE_RANK"), _number(environ, "GROUP_WORLD_SIZE", "NNODES")
    if node_rank is not None and nodes is not None:
        return node_rank, nodes
    if local_size.value == 0 or world_size.value % local_size.value:
        advice = "set GROUP_RANK and GROUP_WORLD_SIZE: the number of this rank's node, and how many there are"
        _refuse(f"nodes that do not all have {local_size} ranks of {world_size} have no number", advice)
    source = f"{rank.source} / {local_size.source}"
    return _Number(rank.value // local_size.value, source), _Number(world_size.value // local_size.value, source)


def _single(rank: _Number, size: _Number, local_rank: _Number | None = None) -> _Numbers:
    zero, one = _Number(0, size.source), _Number(1, size.source)
    return _Numbers(rank, size, local_rank or zero, one, zero, one)


def _explicit_launcher(environ: Environ) -> str:
    is_ours = "TOOLKIT_ATTEMPT" in environ and "TORCHELASTIC_RUN_ID" not in environ
    return "supervisor" if is_ours else "torchrun"


# ---------------------------------------------------------------------------------------------------------- MPI


@dataclass(frozen=True)
class _MpiFamily:
    """The variables of one kind of mpirun."""

    name: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


_MPI_FAMILIES = (
    _MpiFamily(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _MpiFamily(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    _MpiFamily(
        "MPICH or Intel MPI",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
)
_MPI_ADVICE = "start the ranks with one launcher only: `mpirun ...` (Open MPI, MPICH, Intel MPI) or `srun ...`"


def _from_mpi(environ: Environ, hostname: str) -> Placement | None:
    families = _mpi_families(environ)
    if not families:
        _refuse_bare_pmix(environ)
        return None
    _check_families_agree(environ, families)
    numbers = _mpi_numbers(environ, families[0])
    numbers.check(_MPI_ADVICE)
    # MPI numbers ranks but not nodes, so a node's number follows from the ranks before it.
    is_one_node = numbers.nodes.value == 1
    notes = () if is_one_node else (_NODE_NOTE.format("mpirun names"),)
    return _placement(environ, "mpi", hostname, numbers, (hostname,) if is_one_node else (), notes)


def _mpi_families(environ: Environ) -> list[_MpiFamily]:
    """Return the kinds of mpirun that started this process, without those whose variables the srun step itself set."""
    present = [family for family in _MPI_FAMILIES if environ.get(family.rank)]
    return [family for family in present if not _is_of_step(environ, family)]


def _is_of_step(environ: Environ, family: _MpiFamily) -> bool:
    """True if srun's own PMI plugin set ``family``'s variables: then there is one launch, the step."""
    step_rank, step_size = _step_rank_and_size(environ)
    if step_rank is None or step_size is None:
        return False
    if family.rank == "PMI_RANK" and _number(environ, *family.local_rank) is not None:
        return False  # Slurm's plugin never sets these, but an mpirun inside the step does
    # Slurm's PMI plugin gives the step's name as the job's.
    if family.rank == "PMI_RANK" and environ.get("PMI_JOBID") == _step_name(environ):
        return True
    if family.rank == "OMPI_COMM_WORLD_RANK" and _is_foreign_pmix(environ):
        return False
    # Equal numbers in both are one launch.
    rank, size = _number(environ, family.rank), _number(environ, family.size)
    agrees_on_size = size is not None and size.value == step_size.value
    return rank is not None and rank.value == step_rank.value and agrees_on_size


def _step_name(environ: Environ) -> str:
    return f"{environ.get('SLURM_JOB_ID')}.{_step_id(environ)}"


def _is_foreign_pmix(environ: Environ) -> bool:
    """True if a PMIx launcher other than srun (``prterun-host-pid@1``) started this process."""
    namespace = environ.get("PMIX_NAMESPACE", "")
    return bool(namespace) and not namespace.startswith("slurm.pmix.")


def _refuse_bare_pmix(environ: Environ) -> None:
    rank = _number(environ, "PMIX_RANK")
    if rank is not None and _is_foreign_pmix(environ):
        _refuse(f"{rank} was set by a PMIx launcher, but no variable says how many ranks there are", _MPI_ADVICE)


def _check_families_agree(environ: Environ, families: list[_MpiFamily]) -> None:
    first, *others = families
    for other in others:
        _check_equal(environ, first.rank, other.rank, _MPI_ADVICE)
        _check_equal(environ, first.size, other.size, _MPI_ADVICE)
    # Open MPI starts its ranks over PMIx, which numbers them as well.
    if first.name == "Open MPI":
        _check_equal(environ, first.rank, "PMIX_RANK", _MPI_ADVICE)


def _check_equal(environ: Environ, one: str, other: str, advice: str) -> None:
    a, b = _number(environ, one), _number(environ, other)
    if a and b and a.value != b.value:
        _refuse(f"{a} and {b} contradict each other", advice)


def _mpi_numbers(environ: Environ, family: _MpiFamily) -> _Numbers:
    rank = _number(environ, family.rank)
    assert rank is not None, "the caller has looked"
    size = _required(environ, family.size, because=rank, advice=_MPI_ADVICE)
    # A single rank needs no other variable.
    if size.value == 1:
        return _single(rank, size)
    local_rank = _required(environ, *family.local_rank, because=rank, advice=_MPI_ADVICE)
    local_size = _required(environ, *family.local_size, because=rank, advice=_MPI_ADVICE)
    if local_size.value == 0:
        _refuse(f"{local_size} leaves no rank on this node", _MPI_ADVICE)
    # Rounded up: the last node may have fewer ranks.
    source = f"{family.rank} / {local_size.source}"
    node_rank = _Number(rank.value // local_size.value, source)
    nodes = _Number(-(-size.value // local_size.value), source)
    return _Numbers(rank, size, local_rank, local_size, node_rank, nodes)


# --------------------------------------------------------------------------------------------------------- srun

_STEP_ADVICE = "start the ranks with `srun`, without exporting SLURM_* variables by hand"


def _step_id(environ: Environ) -> str | None:
    """Return the id of the srun step that this process is a task of.

    A batch script and an interactive shell are in none.
    """
    number = _number(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    if number is None or number.value >= FIRST_SPECIAL_STEP_ID:
        return None
    return str(number.value)


def _step_rank_and_size(environ: Environ) -> tuple[_Number | None, _Number | None]:
    if _step_id(environ) is None:
        return None, None
    return _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


def _from_step(environ: Environ, hostname: str) -> Placement | None:
    step = _step_id(environ)
    if step is None:
        return None
    numbers = _step_numbers(environ, _Number(int(step), "SLURM_STEP_ID"))
    numbers.check(_STEP_ADVICE)
    _check_pmi_agrees(environ)
    hosts = _step_hosts(environ, numbers.nodes)
    # Slurm's name of the node, which need not be the host name.
    host = environ.get("SLURMD_NODENAME") or (hosts[numbers.node_rank.value] if hosts else hostname)
    launcher = "supervisor" if "TOOLKIT_ATTEMPT" in environ else "srun"
    return _placement(environ, launcher, host, numbers, hosts)


def _step_numbers(environ: Environ, step: _Number) -> _Numbers:
    def read(*names: str) -> _Number:
        return _required(environ, *names, because=step, advice=_STEP_ADVICE)

    node_rank = read("SLURM_NODEID")
    nodes = read("SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    return _Numbers(
        rank=read("SLURM_PROCID"),
        # SLURM_NTASKS only where the step's own number is missing: in the batch script it is the job's.
        world_size=read("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=read("SLURM_LOCALID"),
        local_world_size=_tasks_on_node(environ, node_rank, nodes),
        node_rank=node_rank,
        nodes=nodes,
    )


def _tasks_on_node(environ: Environ, node_rank: _Number, nodes: _Number) -> _Number:
    """Return this node's entry of ``2(x3),1``. Nodes may have different numbers of tasks, so nothing is divided."""
    name = next((n for n in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") if n in environ), None)
    if name is None:
        _refuse("SLURM_STEP_TASKS_PER_NODE is not set in an srun step", _STEP_ADVICE)
    try:
        counts = hostlist.expand_counts(environ[name])
    except RequestError as error:
        _refuse(f"{name}={environ[name]!r}: {error}", _STEP_ADVICE)
    if len(counts) != nodes.value or node_rank.value >= len(counts):
        _refuse(f"{name}={environ[name]!r} does not fit {nodes} and {node_rank}", _STEP_ADVICE)
    return _Number(counts[node_rank.value], name)


def _step_hosts(environ: Environ, nodes: _Number) -> tuple[str, ...]:
    hosts = tuple(hostlist.expand(environ.get("SLURM_STEP_NODELIST", "")))
    if hosts and len(hosts) != nodes.value:
        _refuse(f"SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']!r} does not fit {nodes}", _STEP_ADVICE)
    return hosts


def _check_pmi_agrees(environ: Environ) -> None:
    """Refuse a step whose own PMI plugin numbers the rank differently: one of the two was overwritten."""
    if environ.get("PMIX_NAMESPACE") == f"slurm.pmix.{_step_name(environ)}":
        _check_equal(environ, "PMIX_RANK", "SLURM_PROCID", _STEP_ADVICE)
    if environ.get("PMI_JOBID") == _step_name(environ):
        _check_equal(environ, "PMI_RANK", "SLURM_PROCID", _STEP_ADVICE)


# -------------------------------------------------------------------------------------------------------- alone


def _alone(environ: Environ, hostname: str) -> Placement:
    zero, one = _Number(0, "alone"), _Number(1, "alone")
    numbers = _Numbers(zero, one, zero, one, zero, one)
    return _placement(environ, "alone", hostname, numbers, (hostname,), tuple(_alone_notes(environ)))


def _alone_notes(environ: Environ) -> list[str]:
    notes = []
    tasks = _allocated_tasks(environ)
    if tasks > 1:
        notes.append(f"alone: the allocation has {tasks} tasks; start with `srun` (or `toolkit supervise`) to use them")
    if "WORLD_SIZE" in environ:
        notes.append(f"WORLD_SIZE={environ['WORLD_SIZE']} is ignored: RANK is not set, so no launcher set it")
    return notes


def _allocated_tasks(environ: Environ) -> int:
    number = _number(environ, "SLURM_NTASKS", "SLURM_NPROCS")
    if number is not None:
        return number.value
    try:
        return sum(hostlist.expand_counts(environ.get("SLURM_TASKS_PER_NODE", "")))
    except RequestError:
        return 0
