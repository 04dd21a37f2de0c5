"""The environments in which Slurm's programs, new jobs and srun steps start."""

from __future__ import annotations

from collections.abc import Mapping

#: Prefixes of variables by which a user's profile changes the columns, filters and questions of Slurm's programs.
_OUTPUT_CHANGING = ("SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_", "SCONTROL_", "SLURM_TIME_FORMAT", "SLURM_BITSTR_LEN")


def plain_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` with the C locale, and with times in seconds since the epoch.

    Local times are ambiguous for an hour each autumn.
    """
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
