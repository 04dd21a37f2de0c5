"""Starting the ranks of one attempt, as an srun step or as local processes, behind one seam.

Both put what happens into the supervisor's queue: :class:`RankEnded` as soon as a rank ends badly, :class:`StepEnded`
when all have ended. Nothing polls: a thread waits for each process.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, Protocol

from toolkit import fsio, logs
from toolkit.cluster import hostlist
from toolkit.cluster.commands import SlurmCommands, srun_argv, step_environment
from toolkit.cluster.commands import Step as SrunPlan
from toolkit.cluster.placement import Placement, rank_environment
from toolkit.errors import SlurmError
from toolkit.launch import patience
from toolkit.launch.allocation import Allocation
from toolkit.rundir import RunDir

log = logs.get(__name__)


@dataclass(frozen=True)
class RankEnded:
    """Ranks that ended on ``host`` with another exit code than 0; ``signal`` is the one that killed them, or None."""

    ranks: tuple[int, ...]
    host: str
    how: str
    signal: int | None
    time: float
    exit_code: int | None = None
    out_of_memory: bool = False


@dataclass(frozen=True)
class NodeFailed:
    """srun has lost a node of the step."""

    host: str


@dataclass(frozen=True)
class LaunchFailed:
    """Slurm could not start these ranks on ``host``; no ranks: it refused the whole step."""

    ranks: tuple[int, ...]
    host: str | None
    why: str


@dataclass(frozen=True)
class StepEnded:
    """All ranks have ended; 0 when all did so with exit code 0."""

    exit_code: int


Events = SimpleQueue[Any]


class Step(Protocol):
    """The running ranks of one attempt."""

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send every rank a signal; SIGKILL ends all at once. Does not wait for anything."""

    def abandon(self) -> None:
        """Stop waiting for ranks that cannot be reached, and send nothing to anybody."""


class Launcher(Protocol):
    """Starts the ranks of an attempt."""

    def start(
        self, attempt: int, allocation: Allocation, command: Sequence[str], environ: Mapping[str, str], events: Events
    ) -> Step:
        """Start ``command`` on every rank of ``allocation``; what happens to them goes into ``events``."""


def tethered(command: Sequence[str], at_our_death: signal.Signals, *, deaf: bool = False) -> list[str]:
    """``command`` such that it gets ``at_our_death`` when this process dies, however it dies.

    ``deaf``: from its first moment it ignores what Slurm sends to all processes of a job that is to end.
    """
    tether = str(Path(__file__).with_name("tether.py"))
    how = [str(os.getpid()), at_our_death.name, "deaf" if deaf else "hearing"]
    return [sys.executable, "-I", "-S", tether, *how, *command]


# ------------------------------------------------------------------------------------------------- local processes


class LocalLauncher:
    """Ranks as processes of this machine."""

    def __init__(self, run: RunDir) -> None:
        self._run = run

    def start(
        self, attempt: int, allocation: Allocation, command: Sequence[str], environ: Mapping[str, str], events: Events
    ) -> Step:
        """See :class:`Launcher`. ``MASTER_ADDR`` is loopback: nobody from outside takes part."""
        step = _LocalStep(allocation.hosts[0], events)
        for rank in range(allocation.world_size):
            with open_log(self._run.rank_log(attempt, rank)) as output:
                step.add(_start_local(command, {**environ, **self._rank_environ(allocation, rank)}, output))
        threading.Thread(target=step.wait, daemon=True).start()
        return step

    @staticmethod
    def _rank_environ(allocation: Allocation, rank: int) -> dict[str, str]:
        size = allocation.world_size
        placement = Placement(
            rank=rank,
            world_size=size,
            local_rank=rank,
            local_world_size=size,
            node_rank=0,
            nodes=1,
            host=allocation.hosts[0],
            launcher="supervisor",
        )
        return {**rank_environment(placement), "MASTER_ADDR": "127.0.0.1"}


def open_log(path: Path) -> IO[bytes]:
    """A log file to append to, private to the user."""
    fsio.make_dir(path.parent)
    return os.fdopen(fsio.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")


def _start_local(command: Sequence[str], environ: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        tethered(command, signal.SIGKILL),
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C in the terminal is the supervisor's to judge; and a session dies as one
    )


class _LocalStep:
    def __init__(self, host: str, events: Events) -> None:
        self._host = host
        self._events = events
        self._processes: list[subprocess.Popen[bytes]] = []

    def add(self, process: subprocess.Popen[bytes]) -> None:
        self._processes.append(process)

    def wait(self) -> None:
        threads = [threading.Thread(target=self._wait_rank, args=item) for item in enumerate(self._processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self._events.put(StepEnded(next((p.returncode for p in self._processes if p.returncode), 0)))

    def _wait_rank(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if code != 0:
            number = -code if code < 0 else None
            how = f"killed by {_signal_name(number)}" if number else f"exit code {code}"
            self._events.put(RankEnded((rank,), self._host, how, number, time.time(), None if number else code))
        _signal_session(process.pid, signal.SIGKILL)  # data loader workers that a killed rank left behind

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        for process in self._processes:
            if process.poll() is None:
                _signal_session(process.pid, number)

    def abandon(self) -> None:
        """This machine is never lost."""


def _signal_session(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# --------------------------------------------------------------------------------------------------------- srun steps


class SrunLauncher:
    """Ranks as one srun step of our job, each on the node that the allocation planned it for."""

    def __init__(self, run: RunDir, slurm: SlurmCommands, options: Sequence[str] = (), mpi: str | None = None) -> None:
        """``options`` for every srun, such as those of a container; ``mpi`` is the plugin that ranks over MPI need."""
        self._run = run
        self._slurm = slurm
        self._options = options
        self._mpi = mpi

    def start(
        self, attempt: int, allocation: Allocation, command: Sequence[str], environ: Mapping[str, str], events: Events
    ) -> Step:
        """See :class:`Launcher`. The ranks read their numbers and ``MASTER_ADDR`` from the step's own variables."""
        assert allocation.job_id is not None
        folder = fsio.make_dir(self._run.attempt_logs(attempt))
        host_file = folder / "hostfile"
        hosts = allocation.rank_hosts
        fsio.write_atomic(host_file, "".join(f"{host}\n" for host in hosts), durable=False)
        plan = SrunPlan(
            command=command,
            hosts=hosts,
            cpus_per_task=allocation.cpus_per_task,
            output=str(self._run.rank_log(attempt, "%t")),
            name=f"{self._run.id}.{attempt}",
            mpi=self._mpi,
            extra=self._options,
            overlap=True,  # an abandoned step holds its CPUs, also on living nodes, until Slurm gives the dead one up
        )
        start = partial(
            subprocess.Popen[str],
            tethered(srun_argv(plan), signal.SIGTERM),  # srun ends its step at SIGTERM; SIGKILL would leave it running
            env={**step_environment(environ), "SLURM_HOSTFILE": str(host_file)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        step = _SrunStep(start, plan, allocation.job_id, self._slurm, events)
        threading.Thread(target=step.wait, daemon=True).start()
        return step


class _SrunStep:
    def __init__(
        self,
        start: Callable[[], subprocess.Popen[str]],
        plan: SrunPlan,
        job_id: str,
        slurm: SlurmCommands,
        events: Events,
    ) -> None:
        self._start = start
        self._process = start()
        self._is_given_up = threading.Event()
        self._name = plan.name or ""
        self._number: str | None = None  #: of the step in its job, once it has been asked for
        self._hosts = plan.hosts
        self._job_id = job_id
        self._slurm = slurm
        self._events = events

    def wait(self) -> None:
        """Hand on what srun says until it has ended. It is started again while its step is refused for the sake of one
        that has ended: a controller that was away then hears of the end a moment after it is back."""
        deadline = time.monotonic() + patience.PATIENCE_S
        while (refused := self._listen()) is not None:
            if time.monotonic() >= deadline or self._is_given_up.wait(patience.RETRY_EVERY_S):
                self._events.put(refused)
                break
            self._process.wait()
            self._process = self._start()
        self._events.put(StepEnded(self._process.wait()))

    def _listen(self) -> LaunchFailed | None:
        """Hand on what one srun says; return a refusal that may pass."""
        refused: LaunchFailed | None = None
        assert self._process.stderr is not None
        for line in self._process.stderr:
            log.info("%s", line.rstrip())
            event = parse_srun_line(line, self._hosts)
            if isinstance(event, LaunchFailed) and _HELD_BY_A_STEP.search(event.why):
                refused = event
            elif event is not None:
                self._events.put(event)
        return refused

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """``scancel -s KILL`` of the step takes 75 ms, but 10 s while a dead node is asked; so nobody waits for it."""
        if number is signal.SIGKILL:
            self._is_given_up.set()
        threading.Thread(target=self._kill, args=[number], daemon=True).start()

    def abandon(self) -> None:
        """srun itself would wait until Slurm gives a dead node up: SlurmdTimeout, 300 s by default, and longer."""
        self._is_given_up.set()
        silence(self._process)

    def _kill(self, number: signal.Signals) -> None:
        """srun's own way would be to send SIGTERM first and to wait KillWait."""
        try:
            self._number = self._number or self._slurm.find_step(self._job_id, self._name)
            if self._number is not None:
                self._slurm.cancel(self._job_id, signal=number.name.removeprefix("SIG"), step=self._number)
                return
        except SlurmError as error:
            instead = "; ending srun instead" if number is signal.SIGKILL else ""
            log.warning("%s for the step: %s%s", number.name, error, instead)
        if number is signal.SIGKILL:
            self._process.terminate()


def silence(srun: subprocess.Popen[str]) -> None:
    """End srun, the leader of a session, with its shepherd: a child that outlives a killed srun to end its step. It
    does so by number, and by the time that it reaches the controller that may be a step of the job's next start."""
    _signal_session(srun.pid, signal.SIGKILL)


_NODE_FAILED = re.compile(r"srun: error: Node failure on (?P<host>\S+)")
#: A node that was away and has started again, before Slurm has noticed: its slurmd knows nothing of the step.
_NODE_FORGOT = re.compile(r"srun: error: Aborting, io error and missing step on node (?P<index>\d+)")
_TASK_NOT_LAUNCHED = re.compile(r"srun: error: task (?P<rank>\d+) launch failed: (?P<why>.+?)\s*$")
_NODE_NOT_LAUNCHED = re.compile(r"srun: error: Task launch for \S+ failed on node (?P<host>[^\s:]+): (?P<why>.+?)\s*$")
_STEP_NOT_LAUNCHED = re.compile(
    r"srun: error: (?P<why>Unable to create step for job \d+: .+?|[Tt]imeout waiting for task launch.*?)\s*$"
)
#: We ask for no memory, and share what the job has: only the record of an earlier step can be in the way.
_HELD_BY_A_STEP = re.compile("Memory required by task is not available")
_SRUN_ENDED = re.compile(
    r"srun: error: (?P<host>\S+): tasks? (?P<ranks>[\d,\-\[\]]+): (?P<how>.+?)\s*$",
)
_EXIT_CODE = re.compile(r"Exited with exit code (\d+)")
#: srun prints strsignal(3)'s text for the signal that ended a task.
_SIGNAL_TEXTS = {signal.strsignal(number): number for number in signal.valid_signals()}


def parse_srun_line(line: str, hosts: Sequence[str]) -> RankEnded | NodeFailed | LaunchFailed | None:
    """Which ranks ended badly or did not start, or which node was lost; None for the other lines of srun.

    Such as ``srun: error: node2: tasks 2-3: Exited with exit code 1``. ``hosts`` are the step's by rank, for lines that
    name only one of the two, or a node by its number in the step. Of a rank or node that is not there nothing is said.
    """
    lost = _NODE_FAILED.match(line)
    if lost:
        return NodeFailed(lost["host"])
    if forgot := _NODE_FORGOT.match(line):
        found = sorted(set(hosts), key=_slurms_order)[int(forgot["index"]) :]
        return NodeFailed(found[0]) if found else None
    match = _SRUN_ENDED.match(line)
    return _launch_failed(line, hosts) if match is None else _rank_ended(match)


def _launch_failed(line: str, hosts: Sequence[str]) -> LaunchFailed | None:
    """From slurm/src/api/step_launch.c and libsrun, 22.05 to 24.11; ``--distribution=arbitrary`` makes tasks ranks."""
    if task := _TASK_NOT_LAUNCHED.match(line):
        rank = int(task["rank"])
        return LaunchFailed((rank,), hosts[rank], task["why"]) if rank < len(hosts) else None
    if node := _NODE_NOT_LAUNCHED.match(line):
        ranks = tuple(rank for rank, host in enumerate(hosts) if host == node["host"])
        return LaunchFailed(ranks, node["host"], node["why"])
    step = _STEP_NOT_LAUNCHED.match(line)
    return None if step is None else LaunchFailed((), None, step["why"])


def _slurms_order(host: str) -> tuple[str, int]:
    """Also an arbitrary distribution's nodes are numbered in this order, whichever ranks are on them."""
    number = re.search(r"\d*$", host)
    assert number is not None
    return host[: number.start()], int(number[0] or -1)


def _rank_ended(match: re.Match[str]) -> RankEnded:
    ranks = tuple(int(r) for r in hostlist.expand(f"[{match['ranks'].strip('[]')}]"))
    how, code = match["how"], _EXIT_CODE.search(match["how"])
    if code:
        return RankEnded(ranks, match["host"], f"exit code {code[1]}", None, time.time(), int(code[1]))
    text = how.removesuffix(" (core dumped)")
    out_of_memory = "Out Of Memory" in text
    number = signal.SIGKILL if out_of_memory else _SIGNAL_TEXTS.get(text)
    named = f"killed by {_signal_name(number)} ({how})" if number else how
    return RankEnded(ranks, match["host"], named, number, time.time(), None, out_of_memory)
