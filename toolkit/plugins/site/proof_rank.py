"""``python -m toolkit.plugins.site.proof_rank``: a rank of the run that `toolkit doctor --prove` submits.

The first attempt measures, submits a follow-up job from its node, and makes steps until it is stopped. The attempt that
resumes ends the run.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.base import fsio
from toolkit.base.errors import SlurmError, ToolkitError
from toolkit.files.records import FileRecord
from toolkit.slurm.commands import Slurm

#: In the run's folder: what rank 0 has measured, and files that ranks show each other.
MEASURED, SCRATCH = "measured.json", "proof"
#: More steps than are made until the stop comes, and the pause in each.
STEPS, STEP_S = 100_000, 0.05


@dataclass(frozen=True)
class Measured(FileRecord):
    """What the ranks have found. ``follow_up`` is the job that rank 0 has submitted; None where that was refused."""

    backend: str
    hosts: tuple[str, ...]
    interfaces: tuple[str, ...]
    follow_up: str | None = None
    refusal: str = ""
    all_reduce: bool = False  #: the sum over all ranks was right on each
    folder: Mapping[str, float] = field(default_factory=dict)


def main() -> None:
    """Be one rank of the run."""
    import toolkit

    with toolkit.start() as run:
        state = {"steps": 0}
        run.resumable(state=state)
        is_last = run.step > 0
        if not is_last:
            _measure(run)
        elif state["steps"] != run.step:
            raise ToolkitError(f"the checkpoint of step {run.step} has given back {state}")
        for _ in run.steps(range(STEPS), total=STEPS):
            state["steps"] += 1
            time.sleep(STEP_S)
            if is_last:
                break


def _measure(run: Any) -> None:
    """Measure with all ranks. Rank 0 submits the follow-up job, and writes the record."""
    from toolkit.plugins.site import measure

    scratch = run.dir / SCRATCH
    if run.rank == 0:
        fsio.make_dir(scratch)
    is_summed = all(run.gather(measure.all_reduce(run.device)))
    folder = run.gather(measure.shared_folder(scratch) if run.world_size > 1 else {})[-1]
    hosts = run.gather(socket.gethostname())
    interfaces = run.gather(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    if run.rank == 0:
        job, refusal = submit_follower(run.dir, os.environ["SLURM_JOB_ID"], len({*hosts}))
        record = Measured(measure.backend(), tuple(hosts), tuple(interfaces), job, refusal, is_summed, folder)
        fsio.write_json(run.dir / MEASURED, record.to_json())


def submit_follower(run_dir: Path, after: str, nodes: int) -> tuple[str | None, str]:
    """Submit a job that runs when ``after`` has ended. Return its id, or None and why Slurm refused."""
    from toolkit.files.rundir import RunDir
    from toolkit.run.requeue import follow_up

    run, slurm = RunDir(run_dir), Slurm()
    path = run.submitit / "follower.sh"
    words = [sys.executable, "-m", "toolkit.plugins.site.proof_follower", str(run_dir)]
    fsio.write_atomic(path, f"#!/bin/bash\nexec {shlex.join(words)}\n")
    try:
        row = slurm.show_job(after)
        like_this = [] if row is None else list(follow_up.options_of_job(os.environ, row, run))
        wait = f"--dependency=afterany:{after}"
        output = f"--output={run.logs}/follower-%j.out"
        # The variables of a rank describe the ranks' step: give the size anew.
        size = [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
        return slurm.sbatch([*like_this, *size, "--no-requeue", "--no-kill", wait, output, str(path)]), ""
    except SlurmError as error:
        return None, str(error)


if __name__ == "__main__":
    main()
