"""Start this Python as the ranks of an MPI launch on this machine.

The mpirun is that of the wheel beside this Python, Open MPI's or MPICH's.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 240
#: As root, more ranks than cores, over shared memory; MPICH needs to be told none of it.
_OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
}


def mpirun(ranks: int, arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run ``python ARGUMENTS`` on ``ranks`` ranks. Return mpirun's exit code and all output."""
    argv = [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks), sys.executable, *arguments]
    variables = {**os.environ, **_OPEN_MPI, "OMP_NUM_THREADS": "1", **(environ or {})}
    done = subprocess.run(argv, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
    return done.returncode, done.stdout + done.stderr
