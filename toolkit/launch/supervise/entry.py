"""Starts a supervisor: in a batch job under a guard, or on this machine. Handles its own failures, too."""

from __future__ import annotations

import os
import signal
from functools import cache, partial
from pathlib import Path

from toolkit import config as configs
from toolkit import logs
from toolkit.agent.die_with_parent import SIGNALS
from toolkit.config import JobConfig
from toolkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, ToolkitError
from toolkit.launch import outages
from toolkit.launch.job.allocation import Allocation
from toolkit.launch.job.fate import JobFate
from toolkit.launch.job.nodes import may_lose_nodes
from toolkit.launch.job.requeue import forbid_expedited_requeue, how_it_stands, take_back
from toolkit.launch.job.slurm_job import settings_of
from toolkit.launch.record import ownership
from toolkit.launch.record.journal import write_ended
from toolkit.launch.record.notify import notify
from toolkit.launch.record.ownership import Overtaken
from toolkit.launch.start import pmi
from toolkit.launch.start.agent_launcher import AgentLauncher
from toolkit.launch.start.agent_starters import LocalAgent, SrunAgents
from toolkit.launch.start.agents import Agents, Endpoint
from toolkit.launch.start.launcher import Launcher
from toolkit.launch.start.srun import SrunLauncher
from toolkit.launch.supervise.guard import guarded
from toolkit.launch.supervise.supervisor import Supervisor
from toolkit.run_files import RunState
from toolkit.rundir import RunDir
from toolkit.slurm.commands import Slurm
from toolkit.slurm.container import Container, outermost
from toolkit.slurm.container import parse as parse_image

#: The most restarts of one job because of a full disk: each waits for `outages.GIVE_UP_AFTER_S`, and then in the queue.
MAX_RESTARTS_ON_A_FULL_DISK = 100

log = logs.get(__name__)


def supervise(run_dir: str, where: str) -> None:
    """Supervise the run in ``run_dir`` to its end; exit with the job's code. Both entry points end here.

    ``where`` is ``slurm`` (inside an allocation, whose size wins over the config's and is recorded in ``config.yaml``)
    or ``local``.
    """
    run = RunDir(Path(run_dir))
    os.umask(0o077)
    logs.setup("supervisor")
    try:
        if where == "local":
            code = _supervise(run, where, None, None)
        else:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # held until there is a child to pass them to
            try:
                code = guarded(partial(_supervise, run, where, _endpoint(run)), partial(_step, run))
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    except ToolkitError as error:
        _write_own_failure(run, error)
        code = EXIT_FAILED
    # A run that is over must not be requeued because of the exit code.
    if code != EXIT_DONE:
        if where == "slurm" and run.result() is not None:
            forbid_expedited_requeue(Slurm(), os.environ["SLURM_JOB_ID"])
        raise SystemExit(code)


def _endpoint(run: RunDir) -> Endpoint | None:
    """Return the endpoint that outlives a supervisor; None if it cannot be opened.

    Then each supervisor opens its own, which reports the error.
    """
    try:
        return Endpoint.open(run, Allocation.slurm(os.environ).hosts, os.environ)
    except (OSError, ToolkitError) as error:
        log.warning("a supervisor that is killed would lose its ranks: %s", error)
        return None


def _step(run: RunDir) -> int:
    """Return the step reached, or 0 if it cannot be read. A disk's short failure must not end the guard."""
    try:
        return run.step()
    except OSError:
        return 0


def _supervise(run: RunDir, where: str, endpoint: Endpoint | None, earlier_death: str | None) -> int:
    # Held until there are handlers: a `toolkit cancel` at this moment would kill this process, and leave no result.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        outages.persist(lambda: logs.add_file(run.logs / "supervisor.log"), run.logs)
        return _build(run, where, endpoint).run(earlier_death)
    except Overtaken as error:
        log.error("%s", error)
        return EXIT_DONE
    except Exception as error:
        if isinstance(error, OSError):
            log.error("%s: %s", run.path, error, exc_info=True)
            # A full disk passes: go back into the queue.
            if where == "slurm" and _is_given_back(run, error):
                return EXIT_STOPPED
        _write_own_failure(run, error)
        return EXIT_FAILED


def _is_given_back(run: RunDir, error: OSError) -> bool:
    """Put this job back into the queue when the disk is full. The run has not failed, and goes on when there is room.

    No file can record that. A follow-up job sees it by the exit code, EXIT_STOPPED, and takes over.
    """
    if error.errno not in outages.FULL:
        return False
    # With a follow-up job the exit code is enough; else requeue this one.
    owner = ownership.read(run)
    if owner is not None and owner.follow_ups:
        return True
    allocation = Allocation.slurm(os.environ)
    if allocation.job_id is None or allocation.restart_count >= MAX_RESTARTS_ON_A_FULL_DISK:
        return False
    slurm = Slurm()
    look = partial(how_it_stands, run, slurm, allocation.job_id, allocation.restart_count)
    return take_back(look, slurm, allocation.job_id) is JobFate.REQUEUED


def _build(run: RunDir, where: str, endpoint: Endpoint | None) -> Supervisor:
    token = os.environ.get(ownership.TOKEN_VARIABLE)
    outages.persist(lambda: ownership.adopt_config(run, token), run.path)
    config = configs.load_config(run.config, site=False)
    if where == "local":
        allocation = Allocation.local(config.cluster)
        container = _container(run, config, allocation)
        agents = Agents(run, allocation, LocalAgent(run))
        launcher: Launcher = AgentLauncher(run, allocation, agents, container)
        return Supervisor(run, config, allocation, launcher, None, agents, container, token)
    allocation, slurm = Allocation.slurm(os.environ), Slurm()
    container = _container(run, config, allocation)
    watch_batch_host = may_lose_nodes(config, len(allocation.hosts))
    agents = Agents(run, allocation, SrunAgents(run), endpoint, watch_batch_host=watch_batch_host)
    # Ranks over MPI, or in a container that is a step, need srun; the agents start all others.
    if config.dist.backend == "mpi" or (container is not None and container.is_a_step):
        launcher = SrunLauncher(run, slurm, agents, container, pmi.plugin(config, slurm))
    else:
        launcher = AgentLauncher(run, allocation, agents, container, cache(partial(settings_of, slurm)))
    return Supervisor(run, config, allocation, launcher, slurm, agents, container, token)


def _container(run: RunDir, config: JobConfig, allocation: Allocation) -> Container | None:
    """Return the container, if any. It shows all runs, the start folder, the data, and what the config names."""
    if config.cluster.container is None:
        return None
    here = Path.cwd()
    data = config.data.root or os.environ.get("TOOLKIT_DATA") or "data"
    named = (config.model.init_from, config.checkpoint.copy_to, *config.cluster.container_mounts)
    folders: list[str | Path] = [run.path.parent.parent, here, data, *filter(None, named)]
    gpus = allocation.gpus_per_node > 0
    image = parse_image(config.cluster.container)
    return Container(image, outermost(folders), workdir=str(here), code=str(run.code), gpus=gpus)


def _write_own_failure(run: RunDir, error: Exception) -> None:
    """Write the result of a run whose supervisor failed. Callers that wait for it must learn that it is over."""
    log.error("the supervisor failed: %s", error, exc_info=not isinstance(error, ToolkitError))
    why = f"the supervisor failed: {type(error).__name__}: {error}"
    try:
        outages.persist(lambda: write_ended(run, RunState.FAILED, why), run.path)
    except OSError as also:
        log.error("%s: this could not be written either: %s; `toolkit resume %s` goes on", run.path, also, run.id)
    notify(run)
