"""Ranks as one srun step per attempt. Only srun offers PMI for MPI, and a site's containers.

MPI libraries ask the launcher over PMIx (Open MPI) or PMI-2 (MPICH and its derivatives). With the wrong plugin MPICH 5
aborts, and with none each rank is alone in a world of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from toolkit.base import fsio, logs
from toolkit.base.errors import EXIT_FAILED, RequestError, SlurmError, StoppedError, ToolkitError
from toolkit.base.process_limits import limits
from toolkit.config import JobConfig
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent import reports
from toolkit.nodes.agent.messages import ReportsOrder
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agents import Agents, AgentUser, Events
from toolkit.nodes.start.children import open_log, start_child
from toolkit.nodes.start.launcher import AllRanksEnded, LaunchFailed, RunningRanks, Store, StoreHostEnded, port_in
from toolkit.nodes.start.srun import Srun
from toolkit.run.supervise.rank_stop import is_stop_waiting
from toolkit.slurm.commands import SlurmCommands, settings_of
from toolkit.slurm.container import Container
from toolkit.slurm.environment import step_environment
from toolkit.slurm.network import listen
from toolkit.slurm.srun_commands import SrunStep, limit_options, srun_here_argv

#: After the end of a step the agents confirm within this time that they have passed on its ranks' reports.
REPORTS_WAIT_S = 10.0
#: Asked in a separate process: a supervisor must not load an MPI library.
_ASK = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
_LIMIT_S = 60.0
_PMI2 = ("MPICH", "Intel(R) MPI", "MVAPICH")

log = logs.get(__name__)


class SrunLauncher(AgentUser):
    """Starts ranks as one srun step, each on its planned node: a `Launcher`.

    The ranks are not the agents' children, but report to them. Where an agent ends, the ranks of its node notice it,
    and end.
    """

    def __init__(
        self, config: JobConfig, run: RunDir, slurm: SlurmCommands, agents: Agents, container: Container | None
    ) -> None:
        """Start ranks over MPI, or in ``container``, which is then a step."""
        self._run, self._slurm, self._agents, self._container = run, slurm, agents, container
        self._options = limit_options(config.cluster.setup) + ([] if container is None else container.srun_options())
        self._mpi = mpi_plugin(config, slurm)
        self._step: _SrunRanks | None = None

    def listen(self, command: Sequence[str], environ: Mapping[str, str], events: Events) -> None:
        """Let new agents connect. Those of a dead supervisor must leave: their ranks notice it, and end."""
        self._events = events
        self._agents.listen(environ, events, self)

    def start_agents(self, hosts: Collection[str]) -> None:
        """Start the agents. They start no ranks."""
        self._agents.ensure(hosts)

    def start_store(self, attempt: int, world_size: int, host: str, environ: Mapping[str, str]) -> StoreHost:
        log_path = self._run.attempt_logs(attempt) / "store.log"
        return StoreHost(world_size, host, environ, self._events, log_path, self._container)

    def start(
        self, attempt: int, allocation: Allocation, command: Sequence[str], environ: Mapping[str, str], store: Store
    ) -> RunningRanks:
        """Start the ranks. They get their numbers from the step's variables."""
        assert allocation.job_id is not None
        assert isinstance(store, StoreHost)
        if allocation.components:
            raise RequestError(
                "ranks that srun starts (MPI, Pyxis) are one step, and a step has nodes of one component of a "
                "heterogeneous job; submit a job without #SBATCH hetjob, or use another dist.backend and container"
            )
        fewest = min(allocation.gpus, default=0)
        if allocation.is_uneven and fewest < max(allocation.tasks):
            counts = ", ".join(f"{host} {gpus}" for host, gpus in allocation.gpus_of.items())
            raise RequestError(
                "ranks that srun starts (MPI, Pyxis) get as many GPUs on each node as the node with the fewest has, "
                f"and these have {counts}, for {max(allocation.tasks)} ranks on a node; ask for the same number on "
                "each (--gpus-per-node)"
            )
        environ = {**environ, "MASTER_PORT": str(store.port), reports.VARIABLE: self._agents.reports_token}
        # The step's name is unique in the job: a signal finds the step by it.
        plan = SrunStep(
            command=command,
            hosts=allocation.rank_hosts,
            cpus_per_task=allocation.cpus_per_task,
            output=str(self._run.rank_log(attempt, "%t")),
            name=f"{self._run.id}.{attempt}",
            mpi=self._mpi,
            gres=allocation.gres(allocation.hosts),
            extra=self._options,
            overlap=True,  # an abandoned step holds its CPUs, also on living nodes, until Slurm gives the dead one up
        )
        srun = Srun(plan, environ, fsio.make_dir(self._run.attempt_logs(attempt), parents=1) / "hostfile")
        step = _SrunRanks(srun, plan.name or "", allocation, self._slurm, self._events, self._agents)
        self._step = step
        self._agents.ensure(allocation.hosts)
        threading.Thread(target=step.wait, daemon=True).start()
        return step

    def agent_missing(self, host: str, why: str) -> None:
        """Note a missing agent. Its ranks could not report."""
        if self._step is not None:
            self._step.lack_agent(host, why)


class _SrunRanks:
    tells_each_end = False

    def __init__(
        self, srun: Srun, name: str, allocation: Allocation, slurm: SlurmCommands, events: Events, agents: Agents
    ) -> None:
        assert allocation.job_id is not None
        self._srun, self._name, self._slurm, self._events, self._agents = srun, name, slurm, events, agents
        self._number: str | None = None  #: the step's number in its job, once it has been asked for
        self._job_id, self._hosts = allocation.job_id, allocation.hosts

    def wait(self) -> None:
        code = self._srun.wait(self._events.put)
        if not self._srun.given_up.is_set():
            # The ranks' last reports must precede the end of the step.
            self._agents.ask(dict.fromkeys(self._hosts, ReportsOrder()), REPORTS_WAIT_S)
        self._events.put(AllRanksEnded(code))

    def lack_agent(self, host: str, why: str) -> None:
        if host in self._hosts:
            self._events.put(LaunchFailed((), host, why))

    def send_signal(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal the step in a thread. ``scancel -s KILL`` takes 75 ms, but 10 s while a dead node is asked."""
        if number is signal.SIGKILL:
            self._srun.given_up.set()
        threading.Thread(target=self._kill, args=[number], daemon=True).start()

    def abandon(self) -> None:
        self._srun.kill_client()

    def _kill(self, number: signal.Signals) -> None:
        """Signal the step by scancel. srun itself would send SIGTERM first and wait KillWait."""
        # The step's number is asked for once, by its name.
        try:
            self._number = self._number or self._slurm.find_step(self._job_id, self._name)
            if self._number is not None:
                self._slurm.cancel(self._job_id, signal=number.name.removeprefix("SIG"), step=self._number)
                return
        except SlurmError as error:
            instead = "; ending srun instead" if number is signal.SIGKILL else ""
            log.warning("%s for the step: %s%s", number.name, error, instead)
        # Without an answer of Slurm let srun end its step itself.
        if number is signal.SIGKILL:
            self._srun.terminate()


def mpi_plugin(config: JobConfig, slurm: SlurmCommands) -> str | None:
    """Return the argument of ``srun --mpi``: for the backend mpi, unless ``SLURM_MPI_TYPE`` or the site has one."""
    if config.dist.backend != "mpi" or os.environ.get("SLURM_MPI_TYPE"):
        return None
    return detect_pmi() if settings_of(slurm).mpi_default == "none" else None


def detect_pmi(python: str = sys.executable) -> str:
    """Return ``pmix`` or ``pmi2``, as mpi4py's MPI library here needs. It is ``pmix`` if unknown."""
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("cannot find out which MPI the ranks will use: %s", error)
        return "pmix"
    return "pmi2" if any(name in done.stdout for name in _PMI2) else "pmix"


class StoreHost:
    """The child that serves an attempt's store: a :class:`~toolkit.nodes.start.launcher.Store`."""

    def __init__(
        self,
        world_size: int,
        host: str,
        environ: Mapping[str, str],
        events: Events,
        log_path: Path,
        container: Container | None = None,
    ) -> None:
        """Listen on the address ``host``. In ``container``, if any: RequestError where the store does not start there.

        Raises StoppedError where a signal comes before it has.

        The socket is bound before the ranks start, so that no other job can take the port.
        """
        module = ["toolkit.ranks.store_host", "--world-size", str(world_size), "--host", host]
        self._events = events
        self._closing = False
        self._given_up: ToolkitError | None = None  #: why the start was not waited for
        self._is_a_step = container is not None and container.is_a_step
        # A container that is an srun step cannot inherit a socket.
        if container is not None and container.is_a_step:
            command = srun_here_argv([*container.srun_options(), *container.command(module)])
            self._process = _start(command, step_environment(environ), log_path, signal.SIGTERM)
            # The store chooses its port, since srun passes no socket on.
            assert self._process.stdout is not None
            # A container that hangs would keep the supervisor from all else.
            has_started = threading.Event()
            watch = threading.Thread(target=self._end_unless, args=[has_started, log_path], daemon=True)
            watch.start()
            port = next((port for line in self._process.stdout if (port := port_in(line)) is not None), None)
            has_started.set()
            watch.join()
            if self._given_up is not None:
                raise self._given_up
            if port is None:
                raise RequestError(f"the store host did not start in the container: {log_path} says why")
            self.port = port
        else:
            with listen(host) as listener:
                listener.set_inheritable(True)
                self.port = listener.getsockname()[1]
                module += ["--fd", str(listener.fileno())]
                command = container.command(module) if container else [sys.executable, "-P", "-m", *module]
                self._process = _start(command, environ, log_path, signal.SIGKILL, listener.fileno())
        threading.Thread(target=self._read, daemon=True).start()

    def _end_unless(self, has_started: threading.Event, log_path: Path) -> None:
        """End the step where it takes too long, or a signal comes meanwhile."""
        most_s = limits().zygote_imports_s
        deadline = time.monotonic() + most_s
        while not has_started.wait(limits().status_every_s) and not self._given_up:
            if is_stop_waiting(self._events):
                self._given_up = StoppedError("the store host's container is not waited for, as the run is to stop")
            elif time.monotonic() >= deadline:
                why = f"within {most_s:.0f} s: {log_path} says why"
                self._given_up = RequestError(f"the store host did not start in the container {why}")
            if self._given_up:
                self._end_step()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                port_in(line)
        code = self._process.wait()
        if not self._closing:
            self._events.put(StoreHostEnded(code or EXIT_FAILED))

    def propose(self, kind: str, by: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and the queue has that event
            self._process.stdin.write(json.dumps({"propose": kind, "by": by}) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        self._closing = True
        if self._is_a_step:
            self._end_step()
        else:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def _end_step(self) -> None:
        """End srun, which then ends its step. Until srun has handlers it ignores SIGTERM, and it may hang later."""
        self._process.terminate()
        try:
            self._process.wait(limits().kill_again_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # with it ends its helper, see Srun.silence
            self._process.wait()


def _start(
    command: list[str], environ: Mapping[str, str], log_path: Path, end_by: signal.Signals, *fds: int
) -> subprocess.Popen[str]:
    with open_log(log_path) as output:
        return start_child(
            command,
            environ,
            end_by=end_by,
            ignore_signals=True,  # the ranks need the store to agree on where to stop
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            errors="replace",
            pass_fds=fds,
        )
