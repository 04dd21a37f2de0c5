"""Starts the supervisor: under a guard in a batch job, directly on this machine.

The guard is the batch script's process. Slurm takes the job as over when that process ends, even if others still run.
So it only waits. A supervisor that gets SIGKILL (by the kernel for lack of memory, by someone's mistake) is replaced
within the allocation. The agents end the ranks; the next supervisor starts others, from the state in memory or on disk.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from toolkit import config as configs
from toolkit.base import fsio, logs, outages
from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, ConfigError, DamagedFileError, ToolkitError
from toolkit.config import JobConfig
from toolkit.devices import on_node
from toolkit.files.run_files import RunState
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent.die_with_parent import SIGNALS, die_with
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agent_starters import LocalAgent, SrunAgents
from toolkit.nodes.start.agents import Agents, Endpoint
from toolkit.nodes.start.launcher import AgentLauncher, Launcher
from toolkit.run.attempt.journal import write_ended
from toolkit.run.records import ownership
from toolkit.run.records.ownership import Overtaken
from toolkit.run.requeue.requeue import (
    bring_back_after_deaths,
    bring_back_if_half_started,
    bring_back_if_it_passes,
    forbid_expedited_requeue,
)
from toolkit.run.supervise import supervisor_components
from toolkit.run.supervise.supervisor import Supervisor
from toolkit.slurm.commands import Slurm
from toolkit.slurm.container import Container, outermost
from toolkit.slurm.container import parse as parse_image
from toolkit.slurm.srun_commands import limit_options

#: What kills a supervisor this often in a row, with no new step in between, will kill the next one, too.
MAX_DEATHS = 3
#: All that the guard waits for.
_AWAITED = (*SIGNALS, signal.SIGCONT, signal.SIGCHLD)

log = logs.get(__name__)


def supervise(run_dir: str, where: str) -> None:
    """Supervise the run in ``run_dir`` to its end; exit with the job's code. If the supervisor fails, a result says so.

    ``where`` is ``slurm`` (inside an allocation, whose size wins over the config's and is recorded in ``config.yaml``)
    or ``local``.
    """
    run = RunDir(Path(run_dir))
    fsio.set_private_umask()
    logs.setup("supervisor")
    try:
        if where == "local":
            code = run_supervisor(run, where, None, None)
        else:
            signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # held until there is a child to pass them to
            try:
                code = guarded(partial(run_supervisor, run, where, open_endpoint(run)), partial(_step, run))
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    except SupervisorCrashLoopError as error:
        code = EXIT_STOPPED if bring_back_after_deaths(run, error, Slurm()) else EXIT_FAILED
        if code == EXIT_FAILED:
            _write_own_failure(run, error)
    except ToolkitError as error:
        _write_own_failure(run, error)
        code = EXIT_FAILED
    # A run that is over must not be requeued because of the exit code.
    if code != EXIT_DONE:
        with contextlib.suppress(OSError, DamagedFileError):  # the code counts; the next start says what is damaged
            if where == "slurm" and run.result() is not None:
                forbid_expedited_requeue(Slurm(), os.environ["SLURM_JOB_ID"])
        raise SystemExit(code)


def _step(run: RunDir) -> int:
    """Return the step reached, or 0 if it cannot be read. A disk's short failure must not end the guard."""
    try:
        return run.step()
    except (OSError, DamagedFileError):
        return 0


def run_supervisor(run: RunDir, where: str, endpoint: Endpoint | None, earlier_death: str | None) -> int:
    """Make the run's supervisor and run it; return the job's exit code. See `Supervisor.run`."""
    # Held until there are handlers: a `toolkit cancel` at this moment would kill this process, and leave no result.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        outages.retry_write(lambda: logs.add_file(run.logs / "supervisor.log"), run.logs)
        if where == "slurm" and bring_back_if_half_started(run, Slurm()):
            return EXIT_STOPPED
        return build(run, where, endpoint).run(earlier_death)
    except Overtaken as error:
        log.error("%s", error)
        return EXIT_DONE
    except Exception as error:
        if isinstance(error, OSError):
            log.error("%s: %s", run.path, error, exc_info=True)
            if where == "slurm" and bring_back_if_it_passes(run, error, Slurm()):
                return EXIT_STOPPED
        _write_own_failure(run, error)
        return EXIT_FAILED


def _write_own_failure(run: RunDir, error: Exception) -> None:
    """Write the result of a run whose supervisor failed. Callers that wait for it must learn that it is over."""
    log.error("the supervisor failed: %s", error, exc_info=not isinstance(error, ToolkitError))
    why = f"the supervisor failed: {type(error).__name__}: {error}"
    try:
        outages.retry_write(lambda: write_ended(run, RunState.FAILED, why), run.path)
    except OSError as also:
        log.error("%s: this could not be written either: %s; `toolkit resume %s` continues", run.path, also, run.id)
    supervisor_components.notify(run)


class SupervisorCrashLoopError(ToolkitError):
    """Supervisors were killed one after the other, and the run made no new step in between."""


def guarded(run_once: Callable[[str | None], int], step: Callable[[], int]) -> int:
    """Run ``run_once(None)`` in a child process, with the stop signals blocked; return its exit code.

    When a signal kills the child, ``run_once`` runs again with a line that says so. Stop signals are passed on. If the
    child is killed after SIGTERM was passed on, the job is over and the code is 128 + the signal. Raises
    SupervisorKilledError after three deaths in a row between which ``step``, the run's highest one, did not grow.
    """
    earlier_death: str | None = None
    deaths, best = 0, step()
    try:
        while deaths < MAX_DEATHS:
            code, was_terminated = _run_child(run_once, earlier_death)
            if code >= 0:
                return code
            if was_terminated:
                return 128 - code
            earlier_death = f"the supervisor on {os.uname().nodename} was killed by {signal.Signals(-code).name}"
            # A new step since the last death starts the count anew.
            reached = step()
            deaths, best = (1, reached) if reached > best else (deaths + 1, best)
            log.error("%s, %d times in a row without a new step", earlier_death, deaths)
    finally:  # there is no child any more to pass signals to
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
    raise SupervisorCrashLoopError(
        f"{earlier_death}, and {MAX_DEATHS - 1} others before it: is the batch host out of memory?"
    )


def _run_child(run_once: Callable[[str | None], int], earlier_death: str | None) -> tuple[int, bool]:
    """Return the exit code, negative after a signal, and whether SIGTERM was passed on."""
    guard = os.getpid()
    # Blocked, and taken one by one by `sigwait`: a handler's signal that comes just before a wait would be noticed only
    # after it. What comes while there is no child is passed on to the next.
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    child = os.fork()
    if child == 0:
        # Never return: the frames above on the stack are the guard's.
        code = 1
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD, signal.SIGCONT])
            die_with(guard, signal.SIGKILL)
            code = run_once(earlier_death)  # unblocks the signals when it has handlers: one may have come already
        finally:
            with contextlib.suppress(OSError):  # the code counts also where the last lines cannot be written
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
    passed_on = set()
    # Looked at without reaping: the pid stays the child's while signals are passed on.
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        number = signal.sigwait(_AWAITED)
        if number != signal.SIGCHLD:
            passed_on.add(number)
            os.kill(child, number)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), signal.SIGTERM in passed_on


def open_endpoint(run: RunDir) -> Endpoint | None:
    """Return the endpoint that outlives a supervisor. Without one each supervisor opens its own."""
    try:
        return Endpoint.listen(run, Allocation.slurm(os.environ).hosts, os.environ)
    except (OSError, ToolkitError) as error:
        log.warning("a supervisor that is killed would lose what is in the nodes' memory: %s", error)
        return None


def build(run: RunDir, where: str, endpoint: Endpoint | None) -> Supervisor:
    """Return the supervisor of ``run``, with the launcher that its ranks need. ``where`` is ``slurm`` or ``local``."""
    token = os.environ.get(ownership.TOKEN_VARIABLE)
    config = outages.retry_write(lambda: _config(run, token), run.path, "read")
    if where == "local":
        allocation = Allocation.local(config.cluster)
        container = _container(run, config, allocation)
        agents = Agents(run, allocation, LocalAgent(run))
        launcher: Launcher = AgentLauncher(run, allocation, agents, container)
        return Supervisor(run, config, allocation, launcher, None, agents, container, token)
    slurm = Slurm()
    # One order for all: which nodes are spares is asked by placement, checks of the nodes, and copies.
    allocation = Allocation.slurm(os.environ, slurm).in_order(slurm)
    allocation = replace(allocation, tasks_per_gpu=config.cluster.tasks_per_gpu)
    container = _container(run, config, allocation)
    watch = supervisor_components.batch_host_watch_command(config, run, allocation)
    starter = SrunAgents(run, allocation, limit_options(config.cluster.setup))
    agents = Agents(run, allocation, starter, endpoint, watch_command=watch)
    launcher = supervisor_components.launcher(config, run, allocation, slurm, agents, container)
    return Supervisor(run, config, allocation, launcher, slurm, agents, container, token)


def _config(run: RunDir, token: str | None) -> JobConfig:
    """Return the run's config. Raises OSError where a file server that is away hides the folder: that passes."""
    run.config.stat()
    try:
        ownership.adopt_config(run, token)
        return configs.load_config(run.config, site=False)
    except ConfigError:
        run.config.stat()  # it was hidden just now
        raise


def _container(run: RunDir, config: JobConfig, allocation: Allocation) -> Container | None:
    """Return the container, if any. It shows all runs, the start folder, the data, and what the config names."""
    if config.cluster.container is None:
        return None
    here = Path.cwd()
    data = config.data.root or os.environ.get("TOOLKIT_DATA") or "data"
    named = (config.model.init_from, config.checkpoint.copy_to, *config.cluster.container_mounts)
    folders: list[str | Path] = [run.path.parent.parent, here, data, *filter(None, named)]
    gpus = tuple(on_node.apptainer_options()) if allocation.gpus_per_node else ()
    image = parse_image(config.cluster.container)
    return Container(image, outermost(folders), workdir=str(here), code=str(run.code), gpus=gpus)
