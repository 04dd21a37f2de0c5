"""Ranks as one srun step per attempt. Only srun offers PMI for MPI, and a site's containers.

MPI libraries ask the launcher over PMIx (Open MPI) or PMI-2 (MPICH and its derivatives). With the wrong plugin MPICH 5
aborts, and with none each rank is alone in a world of its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from toolkit.base import fsio, hostlist, logs, outages
from toolkit.base.errors import RequestError, SlurmError
from toolkit.config import JobConfig
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent import reports
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start.agents import Agents, AgentUser
from toolkit.nodes.start.children import start_child
from toolkit.nodes.start.launcher import (
    AllRanksEnded,
    Events,
    LaunchFailed,
    NodeFailed,
    RanksExited,
    RunningRanks,
    Store,
    signal_name,
)
from toolkit.nodes.start.store import StoreHost
from toolkit.slurm.commands import SlurmCommands, settings_of
from toolkit.slurm.container import Container
from toolkit.slurm.environment import step_environment
from toolkit.slurm.srun_commands import SrunStep, srun_argv

#: After the end of a step the agents confirm within this time that they have passed on its ranks' reports.
REPORTS_WAIT_S = 10.0

log = logs.get(__name__)

SrunEvent: TypeAlias = RanksExited | NodeFailed | LaunchFailed


class SrunLauncher(AgentUser):
    """Starts ranks as one srun step, each on its planned node: a `Launcher`.

    The ranks are not the agents' children, but report to the agents. Where an agent ends, the ranks of its node notice
    it, and end.
    """

    def __init__(
        self,
        run: RunDir,
        slurm: SlurmCommands,
        agents: Agents,
        container: Container | None = None,
        mpi: str | None = None,
    ) -> None:
        """Take what the launcher needs. ``mpi`` is the plugin that ranks over MPI need."""
        self._run, self._slurm, self._agents = run, slurm, agents
        self._container, self._mpi = container, mpi
        self._step: _SrunRanks | None = None

    def open(self, command: Sequence[str], environ: Mapping[str, str], events: Events) -> None:
        """Let new agents connect. Those of a dead supervisor must leave: their ranks notice it, and end."""
        self._agents.open(environ, events, self)

    def prepare(self, hosts: Collection[str]) -> None:
        """Start the agents. They start no ranks."""
        self._agents.links.call(lambda: self._agents.ensure(hosts))

    def start_store(
        self, attempt: int, world_size: int, host: str, environ: Mapping[str, str], events: Events
    ) -> StoreHost:
        log_path = self._run.attempt_logs(attempt) / "store.log"
        return StoreHost(world_size, host, environ, events, log_path, self._container)

    def start(
        self,
        attempt: int,
        allocation: Allocation,
        command: Sequence[str],
        environ: Mapping[str, str],
        events: Events,
        store: Store,
    ) -> RunningRanks:
        """Start the ranks. They get their numbers from the step's variables."""
        assert allocation.job_id is not None
        assert isinstance(store, StoreHost)
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
            extra=self._container.srun_options() if self._container else (),
            overlap=True,  # an abandoned step holds its CPUs, also on living nodes, until Slurm gives the dead one up
        )
        srun = Srun(plan, environ, fsio.make_dir(self._run.attempt_logs(attempt), parents=1) / "hostfile")
        step = _SrunRanks(srun, plan.name or "", allocation, self._slurm, events, self._agents)
        self._step = step
        self._agents.links.call(lambda: self._agents.ensure(allocation.hosts))
        threading.Thread(target=step.wait, daemon=True).start()
        return step

    def agent_missing(self, host: str, why: str) -> None:
        """Note a missing agent. Its ranks could not report."""
        if self._step is not None:
            self._step.lack_agent(host, why)


class Srun:
    """One srun of the job. It ends its step when this process dies."""

    def __init__(self, plan: SrunStep, environ: Mapping[str, str], host_file: Path) -> None:
        """Start it. ``host_file`` is the file from which srun reads the node of each task."""
        fsio.write_atomic(host_file, "".join(f"{host}\n" for host in plan.hosts), durable=False)
        self._hosts = plan.hosts
        self._argv = srun_argv(plan)
        self._environ = {**step_environment(environ), "SLURM_HOSTFILE": str(host_file)}
        self.given_up = threading.Event()  #: no further start: its ranks are killed, or abandoned
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        return start_child(
            self._argv,
            self._environ,
            end_by=signal.SIGTERM,  # SIGKILL would leave its step running
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def wait(self, put: Callable[[SrunEvent], None]) -> int:
        """Pass on what srun reports until it has ended; return its exit code.

        srun is started again while its step is refused because of a step that has ended: a controller that was away
        learns of that end a moment after it is back.
        """
        deadline = time.monotonic() + outages.GIVE_UP_AFTER_S
        while (refused := self._listen(put)) is not None:
            if time.monotonic() >= deadline or self.given_up.wait(outages.RETRY_EVERY_S):
                put(refused)
                break
            self._process.wait()
            self._process = self._start()
        return self._process.wait()

    def _listen(self, put: Callable[[SrunEvent], None]) -> LaunchFailed | None:
        """Pass on what one srun reports; return a refusal that may pass."""
        refused: LaunchFailed | None = None
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                log.info("%s", line.rstrip())
                event = parse_srun_line(line, self._hosts)
                if isinstance(event, LaunchFailed) and _HELD_BY_A_STEP.search(event.why):
                    refused = event
                elif event is not None:
                    put(event)
        return refused

    def terminate(self) -> None:
        """Have srun end its step, by SIGTERM and, KillWait later, by SIGKILL."""
        self._process.terminate()

    def silence(self) -> None:
        """Kill srun and its helper, but not its step.

        srun would wait until Slurm gives a dead node up: 300 s by default, or more. srun leads a session. With it ends
        its helper, a child that outlives a killed srun to end its step. The helper would cancel the step by number, and
        when that reaches the controller the number may belong to the job's next start.
        """
        self.given_up.set()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


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
            self._agents.ask({host: {"do": "hear_ranks"} for host in self._hosts}, REPORTS_WAIT_S)
        self._events.put(AllRanksEnded(code))

    def lack_agent(self, host: str, why: str) -> None:
        if host in self._hosts:
            self._events.put(LaunchFailed((), host, why))

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal the step in a thread. ``scancel -s KILL`` takes 75 ms, but 10 s while a dead node is asked."""
        if number is signal.SIGKILL:
            self._srun.given_up.set()
        threading.Thread(target=self._kill, args=[number], daemon=True).start()

    def abandon(self) -> None:
        self._srun.silence()

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


_NODE_FAILED = re.compile(r"srun: error: Node failure on (?P<host>\S+)")
#: A node that was away and has started again before Slurm noticed: its slurmd does not know the step.
_NODE_FORGOT = re.compile(r"srun: error: Aborting, io error and missing step on node (?P<index>\d+)")
_TASK_NOT_LAUNCHED = re.compile(r"srun: error: task (?P<rank>\d+) launch failed: (?P<why>.+?)\s*$")
_NODE_NOT_LAUNCHED = re.compile(r"srun: error: Task launch for \S+ failed on node (?P<host>[^\s:]+): (?P<why>.+?)\s*$")
_STEP_NOT_LAUNCHED = re.compile(
    r"srun: error: (?P<why>Unable to create step for job \d+: .+?|[Tt]imeout waiting for task launch.*?)\s*$"
)
#: The step asks for no memory, and shares the job's: only the record of an earlier step can be in the way.
_HELD_BY_A_STEP = re.compile("Memory required by task is not available")
_SRUN_ENDED = re.compile(
    r"srun: error: (?P<host>\S+): tasks? (?P<ranks>[\d,\-\[\]]+): (?P<how>.+?)\s*$",
)
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
#: srun prints strsignal(3)'s text for the signal that ended a task.
_SIGNAL_TEXTS = {signal.strsignal(number): number for number in signal.valid_signals()}


def parse_srun_line(line: str, hosts: Sequence[str]) -> SrunEvent | None:
    """Return the failure of ranks or of a node that a line of srun reports.

    An example is ``srun: error: node2: tasks 2-3: Exited with exit code 1``. ``hosts`` are the step's by rank, for
    lines that name only the rank or only the node, or a node by its number in the step. Return None for other lines,
    and for a rank or node that does not exist.
    """
    if lost := _NODE_FAILED.match(line):
        return NodeFailed(lost["host"])
    # srun names this node only by its number in the step.
    if forgot := _NODE_FORGOT.match(line):
        after = sorted(set(hosts), key=_slurms_order)[int(forgot["index"]) :]
        return NodeFailed(after[0]) if after else None
    # Failed launches, from slurm/src/api/step_launch.c and libsrun, 22.05 to 24.11. ``--distribution=arbitrary`` makes
    # task numbers equal to ranks.
    if task := _TASK_NOT_LAUNCHED.match(line):
        rank = int(task["rank"])
        return LaunchFailed((rank,), hosts[rank], task["why"]) if rank < len(hosts) else None
    if node := _NODE_NOT_LAUNCHED.match(line):
        ranks = tuple(rank for rank, host in enumerate(hosts) if host == node["host"])
        return LaunchFailed(ranks, node["host"], node["why"])
    if step := _STEP_NOT_LAUNCHED.match(line):
        return LaunchFailed((), None, step["why"])
    ended = _SRUN_ENDED.match(line)
    if ended is None:
        return None
    host, how, now = ended["host"], ended["how"], time.time()
    numbers = ended["ranks"].strip("[]")
    ranks = tuple(map(int, hostlist.expand(f"[{numbers}]")))
    code = _EXIT_CODE.search(how)
    if code:
        return RanksExited(ranks, host, f"exit code {code[1]}", None, now, int(code[1]))
    text = how.removesuffix(" (core dumped)")
    out_of_memory = "Out Of Memory" in text
    number = signal.SIGKILL if out_of_memory else _SIGNAL_TEXTS.get(text)
    if number:
        how = f"killed by {signal_name(number)} ({how})"
    return RanksExited(ranks, host, how, number, now, None, out_of_memory)


def _slurms_order(host: str) -> tuple[str, int]:
    """Return the key by which Slurm numbers nodes, also with an arbitrary distribution.

    The nodes' ranks do not matter.
    """
    number = re.search(r"\d*$", host)
    assert number is not None
    return host[: number.start()], int(number[0] or -1)


#: Asked in a separate process: a supervisor must not load an MPI library.
_ASK = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
_LIMIT_S = 60.0
_PMI2 = ("MPICH", "Intel(R) MPI", "MVAPICH")


def plugin(config: JobConfig, slurm: SlurmCommands) -> str | None:
    """Return the argument of ``srun --mpi``; None where none is needed.

    Only the backend mpi needs it, and not where the site's default or ``SLURM_MPI_TYPE`` is right.
    """
    if config.dist.backend != "mpi" or os.environ.get("SLURM_MPI_TYPE"):
        return None
    return of_library() if settings_of(slurm).mpi_default == "none" else None


def of_library(python: str = sys.executable) -> str:
    """Return ``pmix`` or ``pmi2``, as mpi4py's MPI library here needs. It is ``pmix`` if unknown."""
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("cannot find out which MPI the ranks will use: %s", error)
        return "pmix"
    return "pmi2" if any(name in done.stdout for name in _PMI2) else "pmix"
