"""The sbatch door: what ``sbatch/*.sh`` exec inside the allocation."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from toolkit import config as configs
from toolkit import logs, rundir
from toolkit.launch import snapshot
from toolkit.launch.allocation import Allocation
from toolkit.launch.prepare import new_run
from toolkit.rundir import RunDir

log = logs.get(__name__)

#: Set once the process runs from the copied sources.
_RUN_VARIABLE = "TOOLKIT_SUPERVISE_RUN"


def supervise(config_path: str, overrides: Sequence[str]) -> None:
    """Find or make the run of this job, then become its supervisor from the run's own copy of the sources."""
    from toolkit.launch.supervisor import supervise as supervise_run

    run_dir = os.environ.pop(_RUN_VARIABLE, None)
    if run_dir is not None:
        supervise_run(run_dir, "slurm")
        return
    logs.setup("supervisor")
    allocation = Allocation.slurm(os.environ)
    run = _open_run_of(allocation) or _make_run(config_path, overrides, allocation)
    os.environ.update(snapshot.environment(run.code, os.environ))
    os.environ["TOOLKIT_RUNS"] = str(run.path.parent.parent)
    os.environ[_RUN_VARIABLE] = str(run.path)
    os.execv(sys.executable, [sys.executable, "-m", "toolkit", "supervise", str(run.config)])


def _open_run_of(allocation: Allocation) -> RunDir | None:
    """The run that this job served before it was restarted by Slurm, unless that run has ended."""
    if allocation.restart_count == 0 or allocation.job_key is None:
        return None
    run = rundir.run_of_job(allocation.job_key)
    if run is None or run.result() is not None:
        return None
    log.info("restart %d of job %s: run %s goes on", allocation.restart_count, allocation.job_id, run.id)
    return run


def _make_run(config_path: str, overrides: Sequence[str], allocation: Allocation) -> RunDir:
    config = configs.load_config(config_path, overrides)
    configs.validate(config, ranks=allocation.world_size, login_node=False)
    run = new_run(config, Path.cwd())
    log.info("run folder: %s", run.path)
    return run
