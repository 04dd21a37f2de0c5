"""Python as the ranks of an MPI launch on this machine: Open MPI's, from its wheel, over shared memory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 240


def mpirun(ranks: int, arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[int, str]:
    """``python ARGUMENTS`` on each of ``ranks`` ranks; the exit code of mpirun, and what all of them said."""
    launcher = [str(Path(sys.executable).with_name("mpirun")), "--allow-run-as-root", "--oversubscribe"]
    local = ["--mca", "pml", "ob1", "--mca", "btl", "self,sm"]
    argv = [*launcher, *local, "-n", str(ranks), sys.executable, *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
    done = subprocess.run(argv, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT_S)
    return done.returncode, done.stdout + done.stderr
