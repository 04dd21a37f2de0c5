"""The follow-up job of a job that Slurm will not requeue (``--no-requeue``, ``JobRequeue=0``).

It is submitted when the attempt starts, because a compute node that is about to be taken away may have no time left for
an ``sbatch``, and waits for its predecessor's end by a dependency. Then it looks at what became of that: it takes the
run over if it was preempted, timed out or lost a node, and ends at once if it is over. So an heir never revives what
somebody cancelled.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from toolkit import fsio, logs
from toolkit.cluster.commands import JobRow, SlurmCommands
from toolkit.errors import SlurmError
from toolkit.launch import ending, intent, snapshot
from toolkit.rundir import RunDir

RUN_VARIABLE = "TOOLKIT_SUPERVISE_RUN"
PREDECESSOR_VARIABLE = "TOOLKIT_PREDECESSOR"

#: sbatch's options, from what describes our own job in its environment.
_OPTIONS: Mapping[str, str] = {
    "job-name": "SLURM_JOB_NAME",
    "partition": "SLURM_JOB_PARTITION",
    "account": "SLURM_JOB_ACCOUNT",
    "qos": "SLURM_JOB_QOS",
    "reservation": "SLURM_JOB_RESERVATION",
    "nodes": "SLURM_JOB_NUM_NODES",
    "ntasks": "SLURM_NTASKS",
    "ntasks-per-node": "SLURM_NTASKS_PER_NODE",
    "cpus-per-task": "SLURM_CPUS_PER_TASK",
    "gpus-per-node": "SLURM_GPUS_PER_NODE",
    "mem": "SLURM_MEM_PER_NODE",
    "mem-per-cpu": "SLURM_MEM_PER_CPU",
    "clusters": "SLURM_CLUSTERS",
}

log = logs.get(__name__)


@dataclass(frozen=True)
class Heir:
    """A submitted follow-up job."""

    job_id: str
    slurm: SlurmCommands

    @staticmethod
    def submit(run: RunDir, row: JobRow, slurm: SlurmCommands) -> Heir | None:
        """Submit the heir of our own job; None, with a warning, where a compute node may not submit."""
        script = run.submitit / "heir.sh"
        fsio.write_atomic(script, _script(run, row.requeue_id))
        try:
            job_id = slurm.sbatch([*_options(os.environ, row, run), str(script)])
        except SlurmError as error:
            log.warning("Slurm will not requeue this job and no follow-up could be submitted: %s", error)
            return None
        log.info("Slurm will not requeue this job; job %s waits to take over", job_id)
        return Heir(job_id, slurm)

    def dismiss(self) -> None:
        """The run has ended: nothing is left to take over."""
        try:
            self.slurm.cancel(self.job_id)
        except SlurmError as error:  # it will find the result and end by itself
            log.warning("the follow-up job %s could not be cancelled: %s", self.job_id, error)


def _options(environ: Mapping[str, str], row: JobRow, run: RunDir) -> Iterator[str]:
    for option, name in _OPTIONS.items():
        if environ.get(name):
            yield f"--{option}={environ[name]}"
    if row.time_limit_s is not None:
        yield f"--time={max(1, round(row.time_limit_s / 60))}"
    yield "--no-requeue"
    yield f"--dependency=afterany:{row.job_id}"
    yield f"--output={run.logs}/heir-%j.out"
    yield "--open-mode=append"


def _script(run: RunDir, predecessor: str) -> str:
    variables = {
        **snapshot.environment(run.code, os.environ),
        "TOOLKIT_RUNS": str(run.path.parent.parent),
        RUN_VARIABLE: str(run.path),
        PREDECESSOR_VARIABLE: predecessor,
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    command = f"exec {shlex.quote(sys.executable)} -m toolkit supervise {shlex.quote(str(run.config))}"
    return "\n".join(["#!/bin/bash", *exports, command, ""])


def takes_over(run: RunDir, predecessor: JobRow | None) -> bool:
    """Whether the heir is needed. A predecessor that nobody knows any more is judged by the run's own files."""
    if run.result() is not None or intent.asked(run):
        return False
    if run.status().get("state") == "requeued":
        return True
    seen = ending.how_slurm_sees_it(predecessor, restart_count=0)
    return seen in (ending.Slurm.PREEMPTED, ending.Slurm.TIMEOUT, ending.Slurm.NODE_FAILED)
