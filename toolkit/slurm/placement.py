"""Derives this process's place among the ranks from its launcher's variables.

The innermost launcher wins: torchrun (or the supervisor's explicit variables), then MPI, then an srun step, then alone.
Only variables of *one* launcher are ever combined: under ``srun torchrun`` SLURM_PROCID numbers the agents, and under
``mpirun`` every rank sees SLURM_PROCID=0 of the process that mpirun runs in. Two variables of the same launcher that
contradict each other raise a `PlacementError`: a guess would hang all ranks at the rendezvous.

`toolkit.slurm.rank_variables` has the table of the launchers' variables and reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from toolkit.base import hostlist
from toolkit.base.errors import RequestError
from toolkit.slurm.rank_variables import (
    ALONE,
    MPI_ADVICE,
    MPI_KEYS,
    MPICH,
    MVAPICH,
    OPEN_MPI,
    SRUN,
    TORCHRUN,
    Launch,
    read,
)
from toolkit.slurm.variables import Environ, Number, number, refusal, required


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
            raise refusal(f"{named} does not fit {numbers.nodes}", SRUN.advice)
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
        sources=MappingProxyType({name: number.source for name, number in vars(numbers).items()}),
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
    """Return a name that all ranks of this launch derive, and no other launch.

    Return None if there is none. It keys a rendezvous without a supervisor. It holds the port and address that this
    step's srun listens on, because job ids start at 1 again in a fresh cluster and two steps of a job run side by side.
    Plain MPICH passes nothing unique.
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


def _innermost(environ: Environ) -> Launch | None:
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
        raise refusal(
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
    raise refusal(
        f"{rank} and {step_rank}, both of {world_size.value} ranks, name different ranks",
        "RANK was exported before srun started the tasks (in the batch script SLURM_PROCID is always 0): "
        "unset RANK there, each task learns its own",
    )


def _mpi_launches(environ: Environ) -> list[Launch]:
    """Return the kinds of mpirun that started this process.

    Those whose variables the srun step itself set are left out.
    """
    present = [launch for launch in (OPEN_MPI, MVAPICH, MPICH) if environ.get(launch.rank)]
    return [launch for launch in present if not _is_of_step(environ, launch)]


def _is_of_step(environ: Environ, mpi: Launch) -> bool:
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
    """Return the id of the srun step that this process is a task of.

    A batch script and an interactive shell are in none.
    """
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
        raise refusal(f"{a} and {b} contradict each other", advice)
