"""The follow-up job of a job that Slurm will not bring back by itself.

It may not be requeued (``--no-requeue``, ``JobRequeue=0``), or where it runs a preemption cancels it, perhaps before
its supervisor could do anything (``PreemptMode=CANCEL``, ``GraceTime=0``).

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
from toolkit.config import ClusterConfig, load_config
from toolkit.errors import EXIT_STOPPED, SlurmError
from toolkit.launch import ending, intent, ownership, patience, snapshot
from toolkit.launch.intent import Intent
from toolkit.launch.journal import write_ended
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
    def submit(run: RunDir, row: JobRow, slurm: SlurmCommands, token: str) -> Heir | None:
        """Submit the heir of our own job; None, with a warning, where a compute node may not, or the disk is full."""
        script = run.submitit / "heir.sh"
        try:
            fsio.write_atomic(script, _script(run, row.requeue_id, token))
            job_id = slurm.sbatch([*_options(os.environ, row, run), str(script)])
        except (SlurmError, OSError) as error:
            log.warning("no follow-up job could be submitted: %s", error)
            return None
        log.info("job %s waits to take over where Slurm does not bring this one back", job_id)
        return Heir(job_id, slurm)

    def still_waits(self) -> bool:
        """False once somebody has cancelled it. A controller that does not answer says nothing about it."""
        try:
            status = self.slurm.show_jobs([self.job_id])[self.job_id]
        except SlurmError:
            return True
        return status is not None and not status.is_over

    def dismiss(self) -> None:
        """The run has ended: nothing is left to take over."""
        try:
            self.slurm.cancel(self.job_id)
        except SlurmError as error:  # it will find the result and end by itself
            log.warning("the follow-up job %s could not be cancelled: %s", self.job_id, error)


def options_of_job(environ: Mapping[str, str], row: JobRow, run: RunDir) -> Iterator[str]:
    """sbatch's options for another job like our own."""
    for option, name in _OPTIONS.items():
        if environ.get(name):
            yield f"--{option}={environ[name]}"
    yield from row.options
    yield from _extra_options(run)
    if row.time_limit_s is not None:
        yield f"--time={max(1, round(row.time_limit_s / 60))}"


def _options(environ: Mapping[str, str], row: JobRow, run: RunDir) -> Iterator[str]:
    yield from options_of_job(environ, row, run)
    yield "--no-requeue"
    yield f"--dependency=afterany:{row.job_id}"
    yield f"--output={run.logs}/heir-%j.out"
    yield "--open-mode=append"


def _extra_options(run: RunDir) -> Iterator[str]:
    """What neither a job's environment nor Slurm tells: mail, comments. An sbatch script's lines are not seen."""
    cluster = load_config(run.config, site=False).cluster if run.config.exists() else ClusterConfig()
    for key, value in cluster.extra.items():
        flag = str(key).replace("_", "-")
        if flag not in _NOT_INHERITED and value is not False:
            yield f"--{flag}" if value is True else f"--{flag}={value}"


#: They were about that job's place in the queue, or are set for the heir below.
_NOT_INHERITED = ("hold", "begin", "dependency", "no-requeue", "requeue")


def _script(run: RunDir, predecessor: str, token: str) -> str:
    variables = {
        **snapshot.environment(run.code, os.environ),
        "TOOLKIT_RUNS": str(run.path.parent.parent),
        RUN_VARIABLE: str(run.path),
        PREDECESSOR_VARIABLE: predecessor,
        ownership.TOKEN_VARIABLE: token,
    }
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    command = f"exec {shlex.quote(sys.executable)} -m toolkit supervise {shlex.quote(str(run.config))}"
    return "\n".join(["#!/bin/bash", *exports, command, ""])


def fate_of(predecessor: str, slurm: SlurmCommands) -> ending.Slurm:
    """What became of the job. The controller forgets within minutes and queues are long: then accounting is asked.

    Waits for a controller that does not answer: the heir is the run's only way on, and has its nodes already.
    """

    def look() -> JobRow | None:
        row = slurm.show_job(predecessor)
        status = None if row else slurm.show_jobs([predecessor])[predecessor]
        return JobRow(predecessor, status.state) if status else row

    row = patience.ask(look, f"Slurm does not say what became of job {predecessor}")
    if row is not None and row.exit_code == EXIT_STOPPED:  # its supervisor has left the run to be continued
        return ending.Slurm.REQUEUED
    return ending.how_slurm_sees_it(row, restart_count=0)


def takes_over(run: RunDir, fate: ending.Slurm) -> bool:
    """Whether the heir is needed, by the run's own files first.

    A predecessor that nobody knows any more is over all the same, or we would not have started; who cancelled it would
    have left it the time to write a result.
    """
    if run.result() is not None or intent.asked(run):
        return False
    return run.status().get("state") == "requeued" or fate in _TAKEN_AWAY


def close(run: RunDir, predecessor: str, token: str | None) -> None:
    """Write the result of a run that goes no further, where what ended the predecessor left it no time to do so.

    Not of one that somebody has resumed meanwhile: it has another ``token``.
    """
    owner = ownership.read(run)
    if run.result() is not None or owner is None or owner.token != token:
        return
    state = "stopped" if intent.asked(run) is Intent.STOP else "cancelled"
    why = f"job {predecessor} was {state}, and could not say so itself"
    patience.persist(lambda: write_ended(run, state, why), run.path)


_TAKEN_AWAY = (
    ending.Slurm.PREEMPTED,
    ending.Slurm.REQUEUED,
    ending.Slurm.TIMEOUT,
    ending.Slurm.NODE_FAILED,
    ending.Slurm.UNKNOWN,
)
