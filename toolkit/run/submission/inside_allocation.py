"""The entry point inside an allocation: what ``sbatch/*.sh`` and follow-up jobs exec there."""

from __future__ import annotations

import json
import os
import socket
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit import config as configs
from toolkit.base import fsio, logs, outages
from toolkit.base.errors import EXIT_DONE, PlacementError, RequestError, SlurmError
from toolkit.files import rundir
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.run.job.slurm_job import JobOutcome
from toolkit.run.prepare import snapshot
from toolkit.run.prepare.new_run import load, new_run
from toolkit.run.records import ownership
from toolkit.run.requeue import follow_up
from toolkit.run.requeue.follow_up import PREDECESSORS_VARIABLE, RUN_VARIABLE
from toolkit.slurm import placement
from toolkit.slurm.commands import Slurm

log = logs.get(__name__)


def supervise(config_path: str, overrides: Sequence[str]) -> None:
    """Find or make the job's run, then become its supervisor. The run's copy of the sources is used."""
    refuse_one_of_many_tasks()

    def make_run(allocation: Allocation) -> RunDir:
        config = load(config_path, overrides, Path.cwd())
        configs.validate(
            config, ranks=allocation.without_spares(config.cluster.spare_nodes).world_size, login_node=False
        )
        configs.check_places(config)
        run = new_run(config, Path.cwd())
        log.info("run folder: %s", run.path)
        return run

    enter(make_run)


def refuse_one_of_many_tasks() -> None:
    """Refuse to be a supervisor that a launcher has started several times. Each would start all ranks.

    The first task raises RequestError, the others exit silently. A shell in the first task of an interactive step
    (``srun --pty``) is there once: only that task has a terminal. A rank may start another run.
    """
    try:
        place = placement.derive(os.environ, socket.gethostname())
    except PlacementError:  # of variables that somebody has exported: the ranks get others
        return
    launcher = place.launcher
    is_exported = launcher == "torchrun" and "TORCHELASTIC_RUN_ID" not in os.environ
    is_shell = launcher == "srun" and os.isatty(0)
    if place.world_size == 1 or "TOOLKIT_ATTEMPT" in os.environ or is_exported or is_shell:
        return
    if place.rank > 0:
        raise SystemExit(EXIT_DONE)  # after another code mpirun would end the first task before it has spoken
    name = "mpirun" if launcher == "mpi" else launcher
    raise RequestError(
        f"{name} starts this command {place.world_size} times: leave {name} out, the toolkit starts the ranks itself"
    )


def enter(make_run: Callable[[Allocation], RunDir]) -> None:
    """Supervise the run that this job served before, or the one that ``make_run`` makes."""
    from toolkit.run.supervise.entry import supervise as supervise_run

    run_dir = os.environ.pop(RUN_VARIABLE, None)
    # The first pass finds the run, and starts the second from the run's copy of the sources.
    if run_dir is None:
        logs.setup("supervisor")
        allocation = Allocation.slurm(os.environ)
        _refuse_ended_job(allocation)
        if "SLURMD_NODENAME" not in os.environ:  # slurmd sets it: a shell of salloc on a login node has none
            raise RequestError(
                f"{socket.gethostname()} is not a node of job {allocation.job_id}, and the supervisor must run on one; "
                "open a shell there by `srun --interactive --preserve-env --pty bash`, and give the command again"
            )
        # A job that Slurm has restarted continues its run.
        run = _served_before(allocation)
        if run is not None:
            log.info("restart %d of job %s: run %s continues", allocation.restart_count, allocation.job_id, run.id)
        else:
            run = make_run(allocation)
            rundir.remember_job(run, f"{allocation.job_key}-{command_key()}")
        if fsio.is_there(run.code):
            os.environ.update(snapshot.job_environment(run, os.environ))
            os.environ[RUN_VARIABLE] = str(run.path)
            os.execv(sys.executable, [sys.executable, "-m", "toolkit", "supervise", str(run.config)])
        supervise_run(str(run.path), "slurm")  # a user script: there is no copy to run from
    elif _is_wanted(RunDir(Path(run_dir))):
        supervise_run(run_dir, "slurm")


def _refuse_ended_job(allocation: Allocation) -> None:
    """Raise RequestError in a shell that has outlived its job, as one of tmux does. Its variables name it still."""
    assert allocation.job_id is not None
    try:
        row = Slurm().show_job(allocation.job_id)
    except SlurmError as error:  # that says nothing about the job
        log.warning("Slurm does not report the job's state: %s", error)
        return
    if row is None or row.is_over or row.restarts > allocation.restart_count:
        how = "is not known to Slurm" if row is None else f"is over here ({row.state})"
        raise RequestError(
            f"job {allocation.job_id}, in which this shell was started, {how}: open another shell, or first "
            '`unset "${!SLURM@}"`, and the command submits a job'
        )


def _served_before(allocation: Allocation) -> RunDir | None:
    """Return the run that this command, one of perhaps several, began before Slurm restarted the job.

    A command whose words have changed, such as a date, continues the job's last run, unless that has ended.
    """
    if allocation.job_key is None or not allocation.restart_count:
        return None
    own, last = rundir.run_of_job(f"{allocation.job_key}-{command_key()}"), rundir.run_of_job(allocation.job_key)
    return last if own is None and last is not None and last.result() is None else own


def command_key() -> str:
    """Return one word for this command in this folder."""
    return f"{zlib.crc32(os.fsencode(json.dumps([sys.argv[1:], str(Path.cwd())]))):08x}"


def _is_wanted(run: RunDir) -> bool:
    """True except for a follow-up job that is not needed. That one ends the run if its predecessor could not."""
    predecessors_text = os.environ.pop(PREDECESSORS_VARIABLE, None)
    if predecessors_text is None:
        return True
    logs.setup("follow-up")
    slurm, predecessors = Slurm(), predecessors_text.split(":")

    def judge() -> tuple[list[JobOutcome], bool]:
        outcomes = follow_up.outcomes(run, predecessors, slurm)
        return outcomes, follow_up.takes_over(run, outcomes)

    outcomes, wanted = outages.retry_write(judge, run.path, "read")
    log.info("job %s %s", predecessors[0], "is continued here" if wanted else "needs no follow-up")
    # A predecessor that still runs writes the result itself.
    if not wanted and JobOutcome.RUNNING not in outcomes:
        token, job_id = os.environ.get(ownership.TOKEN_VARIABLE), os.environ.get("SLURM_JOB_ID")
        follow_up.finish_run(run, predecessors[0], token, slurm, job_id)
    return wanted
