"""``python -m toolkit.plugins.site.proof_follower RUN_DIR``: the follow-up job of `toolkit doctor --prove`.

It proves by running at all that follow-up jobs come. Then it gives back all nodes but its own, which leaves the job as
the death of the other nodes would, and starts an srun step in what is left.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from toolkit.base import fsio, hostlist
from toolkit.base.errors import SlurmError
from toolkit.files.records import FileRecord
from toolkit.files.run_files import Moment
from toolkit.slurm.commands import Slurm
from toolkit.slurm.environment import step_environment
from toolkit.slurm.srun_commands import SrunStep, srun_argv

FOLLOWED = "followed.json"
STEP_LIMIT_S = 60.0


@dataclass(frozen=True)
class Followed(FileRecord):
    """What the job has found. ``shrunk_s`` is the time until a step ran on the rest; None if it did not."""

    started: Moment
    nodes: int
    shrunk_s: float | None = None
    why: str = ""


def main(run_dir: Path) -> None:
    """Be the job."""
    started, hosts = time.time(), hostlist.expand(os.environ["SLURM_JOB_NODELIST"])
    shrunk_s, why = (None, "the job has one node") if len(hosts) == 1 else _step_after_loss(hosts, run_dir)
    fsio.write_json(run_dir / FOLLOWED, Followed(started, len(hosts), shrunk_s, why).to_json())


def _step_after_loss(hosts: list[str], run_dir: Path) -> tuple[float | None, str]:
    """Give back all nodes but the first and run a step there. Return the seconds it took, or None and why."""
    try:
        Slurm().release_nodes(os.environ["SLURM_JOB_ID"], keep=hosts[0])
    except SlurmError as error:
        return None, f"Slurm gives no nodes back: {error}"
    # The step must run on the node that is left: srun takes its hosts from this file.
    host_file = run_dir / "follower-hosts"
    fsio.write_atomic(host_file, f"{hosts[0]}\n")
    argv = srun_argv(SrunStep(["true"], hosts[:1], 1, None, overlap=True))
    environ = {**step_environment(os.environ), "SLURM_HOSTFILE": str(host_file)}
    began = time.monotonic()
    try:
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=STEP_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if done.returncode != 0:
        return None, f"srun ended with {done.returncode}: {done.stderr.strip()}"
    return time.monotonic() - began, ""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
