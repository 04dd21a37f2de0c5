"""Chooses the srun plugin by which the ranks of `dist.backend: mpi` find their launcher.

MPI libraries ask the launcher over PMIx (Open MPI) or PMI-2 (MPICH and its derivatives). With the wrong plugin MPICH 5
aborts, and with none each rank is alone in a world of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

from toolkit.base import logs
from toolkit.config import JobConfig
from toolkit.slurm.commands import SlurmCommands, settings_of

#: Asked in a separate process: a supervisor must not load an MPI library.
_ASK = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
_LIMIT_S = 60.0
_PMI2 = ("MPICH", "Intel(R) MPI", "MVAPICH")

log = logs.get(__name__)


def plugin(config: JobConfig, slurm: SlurmCommands) -> str | None:
    """Return the argument of ``srun --mpi``; None where none is needed.

    Only the backend mpi needs it, and not where the site's default or ``SLURM_MPI_TYPE`` is right.
    """
    if config.dist.backend != "mpi" or os.environ.get("SLURM_MPI_TYPE"):
        return None
    return of_library() if settings_of(slurm).mpi_default == "none" else None


def of_library(python: str = sys.executable) -> str:
    """Return ``pmix`` or ``pmi2``, as mpi4py's MPI library here needs. It is ``pmix`` if unknown."""
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("cannot find out which MPI the ranks will use: %s", error)
        return "pmix"
    return "pmi2" if any(name in done.stdout for name in _PMI2) else "pmix"
