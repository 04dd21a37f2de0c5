"""The environments in which Slurm's programs, new jobs and srun steps start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.base.errors import PlacementError, RequestError

#: Prefixes of variables by which a user's profile changes the columns, filters and questions of Slurm's programs.
_OUTPUT_CHANGING = ("SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SCONTROL_", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN")


def plain_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with the C locale and times in seconds: local ones are ambiguous for an hour each autumn."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_OUTPUT_CHANGING)}
    return kept | {"LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}


#: Where Slurm is and which cluster is meant. All other variables of these families describe the current job.
_SITE_VARIABLES = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_SOCKET"})
_JOB_VARIABLES = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "PMI", "OMPI_COMM_WORLD_", "PRTE_LAUNCHED")
#: One rank's place in one launch. Inherited by another launch they name the wrong rank, see `placement`.
_RANK_VARIABLES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK", "ROLE_RANK"}
)
_LAUNCH_VARIABLES = _RANK_VARIABLES | {
    *("MASTER_ADDR", "MASTER_PORT", "TOOLKIT_RUN_DIR", "TOOLKIT_ATTEMPT", "TOOLKIT_OWNER", "TOOLKIT_REPORTS"),
    *("TOOLKIT_SUPERVISED", "TOOLKIT_LAUNCH_KEY", "TOOLKIT_SUPERVISE_RUN", "TOOLKIT_PREDECESSORS"),
    "TOOLKIT_SUBMISSION",
}


def submit_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment to submit a new job from, also from inside a running job.

    sbatch takes options from SBATCH_* and SLURM_* and hands its environment on to the job: an inherited
    SLURM_CPU_BIND pins the new job's ranks to the old job's cores, and an inherited RANK names the wrong rank.
    """
    strange = (*_JOB_VARIABLES, "TORCHELASTIC_")
    return {
        name: value
        for name, value in environ.items()
        if name in _SITE_VARIABLES or not (name in _LAUNCH_VARIABLES or name.startswith(strange))
    }


#: Variables by which the batch script describes itself and which srun reads as options (srun(1), INPUT ENVIRONMENT).
#: After the allocation has shrunk they contradict it. The command line gives everything that they say.
_STEP_OPTIONS = frozenset(
    {
        *("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_NPROCS", "SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK"),
        *("SLURM_DISTRIBUTION", "SLURM_HOSTFILE", "SLURM_KILL_BAD_EXIT", "SLURM_WAIT", "SLURM_OPEN_MODE"),
        *("SLURM_EXPORT_ENV", "SLURM_EXACT", "SLURM_EXCLUSIVE", "SLURM_OVERLAP", "SLURM_LABELIO"),
        *("SLURM_STDOUTMODE", "SLURM_STDERRMODE", "SLURM_STDINMODE", "SLURM_MULTI_PROG"),
        *("SLURM_THREADS_PER_CORE", "SLURM_NO_KILL", "SLURM_STEP_ID", "SLURM_STEPID"),
    }
)
#: The job's request for GPUs. Slurm would divide it among the tasks of a step, or refuse the step.
GPU_REQUEST = (
    *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_SOCKET", "SLURM_GPUS_PER_TASK", "SLURM_CPUS_PER_GPU"),
)
_STEP_OPTION_FAMILIES = (
    *("SLURM_NTASKS", "SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_MEM_PER_", "SLURM_GPU_BIND", "SLURM_TRES_BIND"),
    *("SLURM_GRES", "SRUN_", "PMI"),
)


def step_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for an ``srun`` inside an allocation. Its command line gives all options."""
    return {
        name: value
        for name, value in environ.items()
        if name not in {*_STEP_OPTIONS, *_RANK_VARIABLES, *GPU_REQUEST} and not name.startswith(_STEP_OPTION_FAMILIES)
    }


Environ = Mapping[str, str]

#: No launcher sets a longer number, and Python refuses to convert very long ones.
_WHOLE_NUMBER = re.compile("[0-9]{1,18}")


@dataclass(frozen=True)
class Number:
    """A number and where it came from. Errors and ``toolkit placement`` show the source."""

    value: int
    source: str

    def __str__(self) -> str:
        return f"{self.source}={self.value}"


def number(environ: Environ, *names: str) -> Number | None:
    """Return the first of the variables ``names`` that is set, None if none is. Raises PlacementError for a text."""
    name = next((name for name in names if environ.get(name, "") != ""), None)
    if name is None:
        return None
    text = environ[name]
    if not _WHOLE_NUMBER.fullmatch(text):
        raise placement_error(f"{name}={text[:80]!r} is not a number", "unset it, or start again with one launcher")
    return Number(int(text), name)


def required(environ: Environ, *names: str, because: Number, advice: str) -> Number:
    """Return the first of ``names`` that is set. Raises PlacementError if none is, although ``because`` is."""
    value = number(environ, *names)
    if value is None:
        raise placement_error(f"{because} is set but {' / '.join(names)} is not", advice)
    return value


def whole_number(environ: Environ, name: str, default: int) -> int:
    """Return the number in a variable, ``default`` where it is unset or empty. Raises RequestError that names it."""
    text = environ.get(name) or str(default)
    if not _WHOLE_NUMBER.fullmatch(text):
        raise RequestError(f"{name}={text[:80]!r} is not a whole number; was it changed by hand? Unset it")
    return int(text)


_OF_COMPONENT = re.compile(r"(.+)_HET_GROUP_([0-9]+)")
#: Without a component's number they describe the first. 24.11 tells the others' only where they were asked for.
_SIZES = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_CPUS", "SLURM_GPUS", "SLURM_JOB_GPUS", "SLURM_MEM", "SLURM_TRES")


def component_environments(environ: Environ) -> list[Environ]:
    """Return the environment of each component of a heterogeneous job; that of any other job alone.

    A variable that describes one component has ``_HET_GROUP_N`` behind its name. Here it has the name that it has in
    other jobs. What describes the first component alone is left out of the others.
    """
    count = whole_number(environ, "SLURM_HET_SIZE", 1)
    own_id = environ.get("SLURM_JOB_ID")
    # They may be those of the job in which this one was submitted.
    if count == 1 or environ.get("SLURM_JOB_ID_HET_GROUP_0", own_id) != own_id:
        return [environ]
    own: list[dict[str, str]] = [{} for _ in range(count)]
    first = dict(environ)
    for name, value in environ.items():
        match = _OF_COMPONENT.fullmatch(name)
        if match is not None and int(match[2]) < count:
            own[int(match[2])][match[1]] = value
            first.pop(name)
    sizes = {name for each in own for name in each}
    common = {name: value for name, value in first.items() if name not in sizes and not name.startswith(_SIZES)}
    return [first | own[0], *(common | each for each in own[1:])]


def placement_error(problem: str, advice: str) -> PlacementError:
    """Return the error to raise, with the problem and what to do."""
    return PlacementError(f"cannot tell which rank this is: {problem}. What to do: {advice}.")
