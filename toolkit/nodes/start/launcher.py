"""Starts the store and the ranks of each attempt: what every launcher does, and the one that has agents do it.

Every launcher puts events into the supervisor's queue: :class:`RanksExited` as soon as a rank ends badly,
:class:`AllRanksEnded` when all have ended and their reports are in the queue. Nothing polls. What the agents send about
ranks goes there as they have sent it, and a report of rank 0 as its :class:`~toolkit.nodes.agent.reports.RankReport`.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from toolkit.base import hostlist, logs, this_node
from toolkit.base.errors import EXIT_FAILED, RequestError, ToolkitError
from toolkit.base.process_limits import limits
from toolkit.files.rundir import RunDir
from toolkit.nodes.agent import messages, reports
from toolkit.nodes.allocation import Allocation
from toolkit.nodes.start import python_command, user_script
from toolkit.nodes.start.agents import Agents, AgentUser, Events
from toolkit.slurm.commands import Settings
from toolkit.slurm.container import Container
from toolkit.slurm.environment import GPU_REQUEST
from toolkit.slurm.placement import Placement, rank_environment

log = logs.get(__name__)

#: Slurm's words for a step that fits no job of this request, and for one of a job that is over.
_UNFIT = re.compile(
    "Insufficient GRES|Invalid generic resource|Invalid GRES|Requested node configuration is not available"
)
_OVER = re.compile("(?i)invalid job id|expired or invalid job")


@dataclass(frozen=True)
class RanksExited:
    """Ranks that ended badly on ``host``, by a ``signal`` or not. ``with_agent``: all of the node's; it may be dead."""

    ranks: tuple[int, ...]
    host: str
    how: str
    signal: int | None
    time: float
    exit_code: int | None = None
    out_of_memory: bool = False
    with_agent: bool = False


@dataclass(frozen=True)
class RanksSucceeded:
    """Ranks that ended with exit code 0. srun does not report them: only agents do."""

    ranks: tuple[int, ...]


@dataclass(frozen=True)
class NodeFailed:
    """A node of the attempt does not answer, or srun has lost it."""

    host: str


@dataclass(frozen=True)
class LaunchFailed:
    """Slurm could not start these ranks on ``host``; no ranks: it refused the whole step."""

    ranks: tuple[int, ...]
    host: str | None
    why: str

    @property
    def advice(self) -> str | None:
        """Return what to do where no node is at fault, and no other node, and no later try, would help."""
        if _OVER.search(self.why):
            return "the job is over: submit another one"
        return "ask for other nodes or GPUs" if _UNFIT.search(self.why) else None


@dataclass(frozen=True)
class AllRanksEnded:
    """All ranks have ended; 0 if each did so with exit code 0."""

    exit_code: int


@dataclass(frozen=True)
class StoreHostEnded:
    """The store host ended by itself, which it must not."""

    exit_code: int
    out_of_memory: bool = False


class RunningRanks(Protocol):
    """The running ranks of one attempt."""

    tells_each_end: bool  #: True if RanksExited or RanksFinished comes of every rank that ends

    def send_signal(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send every rank a signal, without waiting. One of ``ENDING`` ends those that have not started."""

    def abandon(self) -> None:
        """Stop waiting for ranks that cannot be reached, and send nothing more."""


class Store(Protocol):
    """The store of one attempt."""

    def propose(self, kind: str, by: str) -> None:
        """Have the ranks agree on a step for ``kind``."""

    def close(self) -> None:
        """End the store."""


class Launcher(Protocol):
    """Starts the store and the ranks of an attempt."""

    def listen(self, command: Sequence[str], environ: Mapping[str, str], events: Events) -> None:
        """Let agents connect, which are prepared for ranks that run ``command``. Called once, before all else.

        All that happens goes into ``events``. Agents of a killed supervisor return now, if they can start ranks.
        """

    def start_agents(self, hosts: Collection[str]) -> None:
        """Start the agents of all nodes, those of ``hosts`` first. Waits only for those that may return."""

    def start_store(self, attempt: int, world_size: int, host: str, environ: Mapping[str, str]) -> Store:
        """Start the store on this node, at its address ``host``."""

    def start(
        self, attempt: int, allocation: Allocation, command: Sequence[str], environ: Mapping[str, str], store: Store
    ) -> RunningRanks:
        """Start ``command`` on every rank of ``allocation``, with the store's port as ``MASTER_PORT``."""


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


#: A rank's connections to the store: the process group's and, with NCCL, a clone of it; the gate's watcher; requests;
#: saves; and in a user's loop the thread that tells other ranks where this one is.
CONNECTIONS_A_RANK = 6
#: The files that the store host has open besides its connections.
OTHER_FILES = 64


def port_in(line: str) -> int | None:
    """Return the port that a store host has printed. None for a library's output, which goes into the log."""
    port = None
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        port = json.loads(line)["port"]
    if type(port) is int and 0 < port < 1 << 16:
        return port
    log.warning("the store host says: %s", line.rstrip())
    return None


def refuse_too_many_ranks(world_size: int) -> None:
    """Raise RequestError for more ranks than a store host on this node has open files for, one each connection."""
    needed, limit = CONNECTIONS_A_RANK * world_size + OTHER_FILES, this_node.max_open_files()
    if needed > limit:
        raise RequestError(
            f"{world_size} ranks need {needed} open files on {socket.gethostname()}, where their store is "
            f"({CONNECTIONS_A_RANK} connections each), and its hard limit is {limit}: raise it (`ulimit -Hn`; "
            f"LimitNOFILE of slurmd), or run at most {(limit - OTHER_FILES) // CONNECTIONS_A_RANK} ranks"
        )


class AgentStore:
    """The store of one attempt, on the supervisor's node: a :class:`Store`."""

    def __init__(self, attempt: int, host: str, events: Events, agents: Agents) -> None:
        self.attempt = attempt
        self.port: int | None = None
        self.events, self._host, self._agents = events, host, agents
        self._text = ""
        self._on_ready: list[Callable[[], None]] = []
        self.is_closing = False
        self._is_over = False

    def propose(self, kind: str, by: str) -> None:
        text = json.dumps({"propose": kind, "by": by}) + "\n"
        with self._agents.lock:
            self.when_ready(lambda: self._agents.send(self._host, messages.StoreInput(self.attempt, text)))

    def close(self) -> None:
        self.is_closing = True
        self._agents.send(self._host, messages.EndStoreOrder(self.attempt))

    # while the lock of the agents is held

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call ``call`` as soon as the port is known."""
        if self.port is not None:
            call()
        else:
            self._on_ready.append(call)

    def take(self, text: str) -> None:
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            port = port_in(line)
            if self.port is None and port is not None:
                self.port = port
                for call in self._on_ready:
                    call()

    def end(self, code: int, *, out_of_memory: bool = False) -> None:
        """Note that the store has ended, or will never begin."""
        if not self._is_over:
            self._is_over = True
            if not self.is_closing:
                self.events.put(StoreHostEnded(code or EXIT_FAILED, out_of_memory))


class AgentRanks:
    """The ranks of one attempt. The agents' lock is held by the callers of all methods but ``kill`` and ``abandon``."""

    tells_each_end = True

    def __init__(self, attempt: int, allocation: Allocation, events: Events, agents: Agents) -> None:
        self._attempt, self._events, self._agents = attempt, events, agents
        self._ranks = allocation.ranks_of
        self._still_running = set(range(allocation.world_size))
        self._exit_code = 0
        self.hosts = allocation.hosts
        self.orders: dict[str, messages.StartOrder] = {}  #: not sent yet
        self.may_begin = False

    def send_signal(self, number: signal.Signals = signal.SIGKILL) -> None:
        with self._agents.lock:
            # Hosts whose agents have not connected yet start none.
            for host in list(self.orders) if number in messages.ENDING else ():
                del self.orders[host]
                ranks = self._ranks_on(host)
                self._events.put(RanksExited(tuple(ranks), host, "killed before it was started", number, time.time()))
                self._end(ranks, -number)
            for host in self.hosts:
                self._agents.send(host, messages.SignalOrder(self._attempt, int(number)))

    def abandon(self) -> None:
        with self._agents.lock:
            hosts = [host for host in self.hosts if self._ranks_on(host)]
            self._end(list(self._still_running), EXIT_FAILED)
            for host in hosts:  # if the node comes back, its agent finds the connection closed and ends the ranks
                self._agents.drop(host, "its ranks were given up")

    def _ranks_on(self, host: str) -> list[int]:
        return [rank for rank in self._ranks.get(host, ()) if rank in self._still_running]

    def take(self, host: str, message: messages.ProcessEnded | messages.ProcessNotStarted) -> None:
        """Take a message of the agent of ``host`` about this attempt's ranks."""
        rank = message.rank
        # The message may be of an earlier attempt, or of a rank that was already counted as ended.
        if message.attempt != self._attempt or rank is None or rank not in self._ranks_on(host):
            return
        if isinstance(message, messages.ProcessNotStarted):
            self._events.put(LaunchFailed((rank,), host, message.why))
            self._end([rank], EXIT_FAILED)
            return
        code = message.code
        if code == 0:
            self._events.put(RanksSucceeded((rank,)))
        else:
            number, exit_code = (-code, None) if code < 0 else (None, code)
            how = f"killed by {signal_name(number)}" if number else f"exit code {code}"
            if message.out_of_memory:
                how += " (Out Of Memory)"
            self._events.put(RanksExited((rank,), host, how, number, message.time, exit_code, message.out_of_memory))
        self._end([rank], code)

    def lose(self, host: str, why: str) -> None:
        """Note that the agent of ``host`` has ended, and its ranks with it."""
        ranks = self._ranks_on(host)
        if ranks:
            how = f"killed by SIGKILL ({why})"
            self._events.put(RanksExited(tuple(ranks), host, how, signal.SIGKILL, time.time(), with_agent=True))
            self._end(ranks, -signal.SIGKILL)

    def on_not_started(self, host: str, why: str) -> None:
        """Note that no agent could be started on ``host``."""
        if self.orders.pop(host, None) is not None:
            ranks = self._ranks_on(host)
            self._events.put(LaunchFailed(tuple(ranks), host, why))
            self._end(ranks, EXIT_FAILED)

    def _end(self, ranks: Sequence[int], code: int) -> None:
        if not self._still_running:
            return
        # The step's exit code is the first failure's; the step ends with its last rank.
        self._exit_code = self._exit_code or code
        self._still_running -= set(ranks)
        if not self._still_running:
            self._events.put(AllRanksEnded(self._exit_code))


#: The command that starts a module of the toolkit.
MODULE = (sys.executable, "-P", "-m")
#: A module that becomes a command of the user's.
SCRIPT_MODULE = "toolkit.nodes.start.user_script"


class AgentLauncher(AgentUser):
    """Starts ranks through the agents of the job's nodes: a :class:`Launcher`.

    ``settings`` tells what the ranks get from the agents because Slurm does not give it to them: CPUs of their own, and
    the signals for the job. Without Slurm the agents give neither: a signal reaches only the process it was sent to.
    """

    def __init__(
        self,
        run: RunDir,
        allocation: Allocation,
        agents: Agents,
        container: Container | None = None,
        settings: Callable[[], Settings] = lambda: Settings(signals_all=True),
    ) -> None:
        self._run, self._allocation, self._container = run, allocation, container
        self.agents, self._settings = agents, settings
        self.holds_zygotes = False  #: until :meth:`warm_zygotes`, while something is done on the nodes first
        self._ranks: AgentRanks | None = None
        self._store: AgentStore | None = None
        self._store_order: messages.StartOrder | None = None  #: not sent yet
        self._is_warm = False  #: whether agents keep a zygote ready, which has imported torch
        self._return_by = 0.0

    # ------------------------------------------------------------------------------------------ for the supervisor

    def listen(self, command: Sequence[str], environ: Mapping[str, str], events: Events) -> None:
        self._is_warm, self._events = self._is_forked(command), events
        self._return_by = time.monotonic() + limits().agents_return_s
        self.agents.listen(environ, events, self, again=True)

    def start_agents(self, hosts: Collection[str]) -> None:
        self.agents.ready[self._allocation.hosts[0], "prepared"] = time.time()
        hosts = {self._allocation.hosts[0], *hosts}
        self.agents.wait_for_returning(hosts, self._return_by)
        self.agents.ensure(hosts)

    def start_store(self, attempt: int, world_size: int, host: str, environ: Mapping[str, str]) -> Store:
        module = ["toolkit.ranks.store_host", "--world-size", str(world_size), "--host", host]
        command = self._container.command(module) if self._container else [*MODULE, *module]
        process = messages.ProcessSpec(None, {}, str(self._run.attempt_logs(attempt) / "store.log"))
        store = AgentStore(attempt, self._allocation.hosts[0], self._events, self.agents)
        order = self._order(attempt, command, environ, [process])
        with self.agents.lock:
            self._store, self._store_order = store, order
        return store

    def start(
        self, attempt: int, allocation: Allocation, command: Sequence[str], environ: Mapping[str, str], store: Store
    ) -> RunningRanks:
        assert isinstance(store, AgentStore)
        ranks = AgentRanks(attempt, allocation, self._events, self.agents)
        # The order of each node holds all its ranks, so one message starts them.
        binds = "affinity" in self._settings().task_plugins
        cpus_of = allocation.cpus_of
        environ = {**environ, reports.VARIABLE: self.agents.reports_token}
        common = srun_environment(allocation)
        if common:  # the agents' step does without them, and scripts read them
            common |= {name: environ[name] for name in GPU_REQUEST if name in environ}
        for host, places in places_by_host(allocation).items():
            processes = []
            for place in places:
                own = rank_environment(place) | (srun_rank_environment(place) if common else {})
                log_path = self._run.rank_log(attempt, place.rank)
                processes.append(messages.ProcessSpec(place.rank, own, str(log_path)))
            order = self._order(attempt, command, environ, processes, cpus_of[host] if binds else None)
            # All variables of Slurm's, because those of the agents describe their step.
            of_node = {"SLURM_CPUS_PER_TASK": str(cpus_of[host])} if common else {}
            variables = {**order.environ, **common, **of_node}
            ranks.orders[host] = order.replace(environ=variables, tasks_per_gpu=allocation.tasks_per_gpu)
        with self.agents.lock:
            self._begin(ranks, store)
        return ranks

    def _order(
        self,
        attempt: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        processes: Sequence[messages.ProcessSpec],
        cpus: int | None = None,
    ) -> messages.StartOrder:
        # Only the differences from the agents' environment are sent.
        changed = {name: value for name, value in environ.items() if self.agents.environ.get(name) != value}
        return messages.StartOrder(
            attempt,
            module=tuple(command[3:]) if self._is_forked(command) else None,
            command=tuple(command),
            environ=changed,
            unset=tuple(name for name in self.agents.environ if name not in environ),
            processes=tuple(processes),
            cpus_per_task=cpus,
            tasks_per_gpu=1,
            gets_signals=self._settings().signals_all,
        )

    def _is_forked(self, command: Sequence[str]) -> bool:
        return tuple(command[:3]) == MODULE and (command[3] != SCRIPT_MODULE or self._command_gains)

    @cached_property
    def _command_gains(self) -> bool:
        try:
            return python_command.gains_by_fork(user_script.read_command(self._run))
        except ToolkitError:  # its ranks will report it
            return False

    # ------------------------------------------------------------------------- while the lock of the agents is held

    def _begin(self, ranks: AgentRanks, store: AgentStore) -> None:
        self._ranks = ranks
        self.agents.ensure({self._allocation.hosts[0], *ranks.hosts})

        def set_port() -> None:
            for host, order in ranks.orders.items():
                ranks.orders[host] = order.replace(environ={**order.environ, "MASTER_PORT": str(store.port)})
            ranks.may_begin = True
            self._send_orders(self.agents.hosts)

        store.when_ready(set_port)
        self._send_orders(self.agents.hosts)

    def warm_zygotes(self) -> None:
        """Have zygotes import what ranks import, from now on."""
        with self.agents.lock:
            if self._is_warm and self.holds_zygotes:
                self.agents.send_all(messages.WarmOrder())
            self.holds_zygotes = False

    def _send_orders(self, hosts: Collection[str]) -> None:
        """Send the waiting orders to the agents of ``hosts``, which are connected."""
        here, agents = self._allocation.hosts[0], self.agents
        if self._store is not None and self._store_order is not None and here in hosts:
            if not self._store.is_closing:
                agents.send(here, self._store_order)
            self._store_order = None
        if self._ranks is not None and self._ranks.may_begin:
            for host in self._ranks.orders.keys() & hosts:
                agents.send(host, self._ranks.orders.pop(host))

    # what the agents tell, see AgentUser

    def agent_connected(self, host: str) -> None:
        self.agents.ready[host, "connected"] = time.time()
        if self._is_warm and not self.holds_zygotes:  # also on a spare
            self.agents.send(host, messages.WarmOrder())
        self._send_orders([host])

    def take_message(self, host: str, message: messages.Message) -> None:
        store, ranks = self._store, self._ranks
        match message:
            case messages.ZygoteReady():
                self.agents.ready[host, "imported"] = time.time()
                self.agents.has_torch[host] = message.has_torch
            case messages.AgentSignalled() if host == self._allocation.hosts[0]:
                self._events.put(message)
            # Messages of an earlier attempt's store are ignored; the ranks check their own.
            case messages.StoreOutput(attempt, text) if store is not None and attempt == store.attempt:
                store.take(text)
            case messages.ProcessEnded(attempt, None, code) if store is not None and attempt == store.attempt:
                store.end(code, out_of_memory=message.out_of_memory)
            case messages.ProcessNotStarted(attempt, None) if store is not None and attempt == store.attempt:
                store.end(EXIT_FAILED)
            case messages.ProcessEnded() | messages.ProcessNotStarted() if ranks is not None:
                ranks.take(host, message)

    def agent_ended(self, host: str, why: str) -> None:
        if self._ranks is not None:
            self._ranks.lose(host, why)
        if host == self._allocation.hosts[0] and self._store is not None:
            self._store.end(EXIT_FAILED)

    def agent_missing(self, host: str, why: str) -> None:
        if self._ranks is not None:
            self._ranks.on_not_started(host, why)
        if host == self._allocation.hosts[0] and self._store is not None:
            self._store_order = None
            self._store.end(EXIT_FAILED)


def places_by_host(allocation: Allocation) -> dict[str, list[Placement]]:
    places: dict[str, list[Placement]] = {host: [] for host in allocation.hosts}
    for node_rank, (host, ranks) in enumerate(allocation.ranks_of.items()):
        for local_rank, rank in enumerate(ranks):
            place = Placement(
                rank=rank,
                world_size=allocation.world_size,
                local_rank=local_rank,
                local_world_size=len(ranks),
                node_rank=node_rank,
                nodes=len(allocation.hosts),
                host=host,
                launcher="supervisor",
            )
            places[host].append(place)
    return places


def srun_environment(allocation: Allocation) -> dict[str, str]:
    """Return what srun(1) sets alike for every task, for scripts; empty without Slurm. It grows with the nodes."""
    if allocation.job_id is None:
        return {}
    counts = hostlist.compress_counts(allocation.tasks)
    return {
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), str(allocation.world_size)),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_STEP_NUM_NODES"), str(len(allocation.hosts))),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), counts),
        "SLURM_STEP_NODELIST": hostlist.compress(allocation.hosts),
    }


def srun_rank_environment(place: Placement) -> dict[str, str]:
    """Return the variables that srun would set for one task alone."""
    first = place.rank - place.local_rank
    return {
        "SLURM_PROCID": str(place.rank),
        "SLURM_LOCALID": str(place.local_rank),
        "SLURM_NODEID": str(place.node_rank),
        "SLURM_GTIDS": ",".join(map(str, range(first, first + place.local_world_size))),
    }
