"""Starts the store and the ranks of every attempt through the agents of the job's nodes."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property

from toolkit import hostlist, logs
from toolkit.agent import reports
from toolkit.agent.link import Message
from toolkit.errors import EXIT_FAILED
from toolkit.launch.job.allocation import Allocation
from toolkit.launch.start import foreign
from toolkit.launch.start.agent_links import AgentLinks
from toolkit.launch.start.agents import Agents, AgentUser, Awaited
from toolkit.launch.start.steps import (
    Events,
    LaunchFailed,
    RankEnded,
    RankFinished,
    Step,
    StepEnded,
    Store,
    signal_name,
)
from toolkit.launch.start.store import StoreHostEnded, port_in
from toolkit.rundir import RunDir
from toolkit.slurm.container import Container
from toolkit.slurm.placement import Placement, rank_environment

#: The command that starts a module of the toolkit.
MODULE = (sys.executable, "-P", "-m")
#: The agents of a supervisor that has died connect to the next one within this time.
COME_BACK_S = 5.0
#: A module that becomes a command of the user's.
FOREIGN_MODULE = "toolkit.launch.start.foreign"

log = logs.get(__name__)


class AgentLauncher(AgentUser):
    """Starts ranks through the agents of the job's nodes.

    ``is_bound`` tells whether each rank gets CPUs of its own.
    """

    def __init__(
        self,
        run: RunDir,
        allocation: Allocation,
        agents: Agents,
        container: Container | None = None,
        is_bound: Callable[[], bool] = lambda: False,
    ) -> None:
        self._run, self._allocation, self._container = run, allocation, container
        self._agents, self._is_bound = agents, is_bound
        self._step: _AgentStep | None = None
        self._store: _AgentStore | None = None
        self._store_order: Message | None = None  #: not sent yet
        self._is_warm = False

    # ------------------------------------------------------------------------------------------ for the supervisor

    def prepare(
        self, hosts: Collection[str], command: Sequence[str], environ: Mapping[str, str], events: Events
    ) -> None:
        """See :class:`~toolkit.launch.start.steps.Launcher`."""
        if not self._agents.is_open:
            self._open(command, environ, events)
            self._agents.links.start()
        self._agents.links.call(lambda: self._agents.ensure({self._allocation.hosts[0], *hosts}))

    def _open(
        self, command: Sequence[str], environ: Mapping[str, str], events: Events, awaited: Awaited | None = None
    ) -> None:
        # Agents of ranks that are forked keep a zygote ready, which has imported torch.
        self._is_warm = self._is_forked(command)
        self._agents.open(environ, events, self, awaited)

    def take_over(
        self, attempt: int, allocation: Allocation, command: Sequence[str], environ: Mapping[str, str], events: Events
    ) -> tuple[Step, Store] | None:
        """See :class:`~toolkit.launch.start.steps.Launcher`."""
        # All ranks of the attempt must be there, and the agents of spare nodes are welcome.
        spares = dict.fromkeys(self._allocation.hosts, 0)
        awaited = Awaited(attempt, {**spares, **dict(zip(allocation.hosts, allocation.tasks, strict=True))})
        self._open(command, environ, events, awaited)
        links = self._agents.links
        store = _AgentStore(attempt, self._allocation.hosts[0], events, links)
        step = _AgentStep(attempt, allocation, events, links)
        self._step, self._store = step, store
        links.start()
        if awaited.wait(COME_BACK_S):
            # All ranks are there and go on. Start agents where one is missing.
            links.call(lambda: self._agents.ensure(allocation.hosts))
            return step, store
        # Some ranks are missing: end the others, too.
        log.warning("not all ranks of attempt %d are there: starting anew", attempt)
        self._step = self._store = None
        self._agents.dismiss_all()
        return None

    def start_store(
        self, attempt: int, world_size: int, host: str, environ: Mapping[str, str], events: Events
    ) -> Store:
        """See :class:`~toolkit.launch.start.steps.Launcher`."""
        links = self._agents.links
        module = ["toolkit.ranks.store_host", "--world-size", str(world_size), "--host", host]
        command = self._container.command(module) if self._container else [*MODULE, *module]
        process: Message = {"rank": None, "environ": {}, "log": str(self._run.attempt_logs(attempt) / "store.log")}
        store = _AgentStore(attempt, self._allocation.hosts[0], events, links)
        order = self._order(attempt, command, environ, [process])
        links.call(lambda: self._begin_store(store, order))
        return store

    def start(
        self,
        attempt: int,
        allocation: Allocation,
        command: Sequence[str],
        environ: Mapping[str, str],
        events: Events,
        store: Store,
    ) -> Step:
        """See :class:`~toolkit.launch.start.steps.Launcher`."""
        assert isinstance(store, _AgentStore)
        links = self._agents.links
        step = _AgentStep(attempt, allocation, events, links)
        # The order of each node holds all its ranks, so one message starts them.
        cpus = allocation.cpus_per_task if self._is_bound() else None
        environ = {**environ, reports.VARIABLE: self._agents.reports_token}
        slurms = _slurm_environment(allocation)
        for host, places in _places(allocation).items():
            processes = [
                {
                    "rank": place.rank,
                    "environ": {**rank_environment(place), **(_slurm_rank_environment(place) if slurms else {})},
                    "log": str(self._run.rank_log(attempt, place.rank)),
                }
                for place in places
            ]
            order = self._order(attempt, command, environ, processes, cpus)
            order["environ"] |= slurms  # all of it, because the agent's own variables describe the agents' step
            step.orders[host] = order
        links.call(lambda: self._begin(step, store))
        return step

    def _order(
        self,
        attempt: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        processes: Sequence[Message],
        cpus: int | None = None,
    ) -> Message:
        # Only the differences from the agents' environment are sent.
        changed = {name: value for name, value in environ.items() if self._agents.environ.get(name) != value}
        return {
            "do": "start",
            "attempt": attempt,
            "module": list(command[3:]) if self._is_forked(command) else None,
            "command": list(command),
            "environ": changed,
            "unset": [name for name in self._agents.environ if name not in environ],
            "processes": processes,
            "cpus_per_task": cpus,
        }

    def _is_forked(self, command: Sequence[str]) -> bool:
        return tuple(command[:3]) == MODULE and (command[3] != FOREIGN_MODULE or self._command_gains)

    @cached_property
    def _command_gains(self) -> bool:
        return foreign.gains_by_fork(self._run)

    # --------------------------------------------------------------------------------------------------- the thread

    def _begin_store(self, store: _AgentStore, order: Message) -> None:
        self._store, self._store_order = store, order

    def _begin(self, step: _AgentStep, store: _AgentStore) -> None:
        self._step = step
        self._agents.ensure({self._allocation.hosts[0], *step.hosts})
        store.when_ready(lambda: self._set_port(step, store))
        self._send_orders(self._agents.links.hosts)

    def _set_port(self, step: _AgentStep, store: _AgentStore) -> None:
        for order in step.orders.values():
            order["environ"]["MASTER_PORT"] = str(store.port)
        step.may_begin = True
        self._send_orders(self._agents.links.hosts)

    def _send_orders(self, hosts: Collection[str]) -> None:
        """Send the waiting orders to the agents of ``hosts``, which are connected."""
        here, links = self._allocation.hosts[0], self._agents.links
        if self._store is not None and self._store_order is not None and here in hosts:
            if not self._store.is_closing:
                links.send(here, self._store_order)
            self._store_order = None
        if self._step is not None and self._step.may_begin:
            for host in self._step.orders.keys() & hosts:
                links.send(host, self._step.orders.pop(host))

    # what the agents tell

    def agent_connected(self, host: str) -> None:
        """See :class:`~toolkit.launch.start.agents.AgentUser`."""
        if self._is_warm:  # also on a spare
            self._agents.links.send(host, {"do": "warm"})
        self._send_orders([host])

    def take_message(self, host: str, message: Message) -> None:
        """See :class:`~toolkit.launch.start.agents.AgentUser`."""
        store, step = self._store, self._step
        # Messages of an earlier attempt's store are ignored; the step checks its own.
        if message["is"] == "output":
            if store is not None and message["attempt"] == store.attempt:
                store.take(message["text"])
        elif message["rank"] is None:
            if store is not None and message["attempt"] == store.attempt:
                store.end(message.get("code", EXIT_FAILED))
        elif step is not None:
            step.take(host, message)

    def agent_ended(self, host: str, why: str) -> None:
        """See :class:`~toolkit.launch.start.agents.AgentUser`."""
        if self._step is not None:
            self._step.lose(host, why)
        if host == self._allocation.hosts[0] and self._store is not None:
            self._store.end(EXIT_FAILED)

    def agent_missing(self, host: str, why: str) -> None:
        """See :class:`~toolkit.launch.start.agents.AgentUser`."""
        if self._step is not None:
            self._step.never_began(host, why)
        if host == self._allocation.hosts[0] and self._store is not None:
            self._store_order = None
            self._store.end(EXIT_FAILED)


class _AgentStore:
    """The store of one attempt, on the supervisor's node."""

    def __init__(self, attempt: int, host: str, events: Events, links: AgentLinks) -> None:
        self.attempt = attempt
        self.port: int | None = None
        self.events, self._host, self._links = events, host, links
        self._text = ""
        self._on_ready: list[Callable[[], None]] = []
        self.is_closing = False
        self._is_over = False

    def propose(self, kind: str, by: str) -> None:
        """See :class:`~toolkit.launch.start.steps.Store`."""
        text = json.dumps({"propose": kind, "by": by}) + "\n"
        self._links.call(lambda: self.when_ready(lambda: self._send(do="tell", text=text)))

    def close(self) -> None:
        """See :class:`~toolkit.launch.start.steps.Store`."""
        self.is_closing = True
        self._send(do="end_store")

    def _send(self, **order: str) -> None:
        message = {**order, "attempt": self.attempt}
        self._links.call(lambda: self._links.send(self._host, message))

    # of the thread

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call ``call`` as soon as the port is known."""
        if self.port is not None:
            call()
        else:
            self._on_ready.append(call)

    def take(self, text: str) -> None:
        """Take a piece of the store's output, and find the port in it."""
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            port = port_in(line)
            if self.port is None and port is not None:
                self.port = port
                for call in self._on_ready:
                    call()

    def end(self, code: int) -> None:
        """Note that the store has ended, or will never begin."""
        if not self._is_over:
            self._is_over = True
            if not self.is_closing:
                self.events.put(StoreHostEnded(code or EXIT_FAILED))


class _AgentStep:
    """The ranks of one attempt. All methods except ``kill`` and ``abandon`` are called in the links' thread."""

    def __init__(self, attempt: int, allocation: Allocation, events: Events, links: AgentLinks) -> None:
        self._attempt, self._events, self._links = attempt, events, links
        self._ranks = allocation.ranks_of
        self._left = set(range(allocation.world_size))
        self._exit_code = 0
        self.hosts = allocation.hosts
        self.orders: dict[str, Message] = {}  #: not sent yet
        self.may_begin = False

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """See :class:`~toolkit.launch.start.steps.Step`."""
        self._links.call(lambda: self._kill(number))

    def _kill(self, number: signal.Signals) -> None:
        if number is signal.SIGKILL:
            for host in list(self.orders):  # hosts whose agents have not connected yet
                del self.orders[host]
                self._end(self._ranks_on(host), -number)
        for host in self.hosts:
            self._links.send(host, {"do": "signal", "attempt": self._attempt, "number": int(number)})

    def abandon(self) -> None:
        """See :class:`~toolkit.launch.start.steps.Step`."""
        self._links.call(self._abandon)

    def _abandon(self) -> None:
        hosts = [host for host in self.hosts if self._ranks_on(host)]
        self._end(list(self._left), EXIT_FAILED)
        for host in hosts:  # if the node comes back, its agent finds the connection closed and ends the ranks
            self._links.drop(host, "its ranks were given up")

    def _ranks_on(self, host: str) -> list[int]:
        return [rank for rank in self._ranks.get(host, ()) if rank in self._left]

    def take(self, host: str, message: Message) -> None:
        """Take a message of the agent of ``host`` about this attempt's ranks."""
        rank = message["rank"]
        if message["attempt"] != self._attempt or rank not in self._ranks_on(host):
            return
        if message["is"] == "not_started":
            self._events.put(LaunchFailed((rank,), host, message["why"]))
            self._end([rank], EXIT_FAILED)
        elif message["is"] == "ended":
            code = message["code"]
            if code == 0:
                self._events.put(RankFinished((rank,)))
            else:
                self._events.put(_ended(rank, host, code, message["time"], out_of_memory=message["out_of_memory"]))
            self._end([rank], code)

    def lose(self, host: str, why: str) -> None:
        """Note that the agent of ``host`` has ended, and its ranks with it."""
        ranks = self._ranks_on(host)
        if ranks:
            how = f"killed by SIGKILL ({why})"
            self._events.put(RankEnded(tuple(ranks), host, how, signal.SIGKILL, time.time(), with_agent=True))
            self._end(ranks, -signal.SIGKILL)

    def never_began(self, host: str, why: str) -> None:
        """Note that no agent could be started on ``host``."""
        if self.orders.pop(host, None) is not None:
            ranks = self._ranks_on(host)
            self._events.put(LaunchFailed(tuple(ranks), host, why))
            self._end(ranks, EXIT_FAILED)

    def _end(self, ranks: Sequence[int], code: int) -> None:
        if not self._left:
            return
        # The step's exit code is the first failure's; the step ends with its last rank.
        self._exit_code = self._exit_code or code
        self._left -= set(ranks)
        if not self._left:
            self._events.put(StepEnded(self._exit_code))


def _ended(rank: int, host: str, code: int, when: float, *, out_of_memory: bool) -> RankEnded:
    number = -code if code < 0 else None
    how = f"killed by {signal_name(number)}" if number else f"exit code {code}"
    if out_of_memory:
        how = f"{how} (Out Of Memory)"
    return RankEnded((rank,), host, how, number, when, None if number else code, out_of_memory)


def _places(allocation: Allocation) -> dict[str, list[Placement]]:
    """Return the places of each node's ranks, by the node's name."""
    world_size = allocation.world_size
    return {
        host: [
            Placement(
                rank=rank,
                world_size=world_size,
                local_rank=local_rank,
                local_world_size=len(ranks),
                node_rank=node_rank,
                nodes=len(allocation.hosts),
                host=host,
                launcher="supervisor",
            )
            for local_rank, rank in enumerate(ranks)
        ]
        for node_rank, (host, ranks) in enumerate(allocation.ranks_of.items())
    }


def _slurm_environment(allocation: Allocation) -> dict[str, str]:
    """Return the variables that srun would set alike for every task of this attempt.

    Scripts may read them. From srun(1), output variables. Empty without Slurm. Its size grows with the number of nodes:
    make it once, not for each rank.
    """
    if allocation.job_id is None:
        return {}
    counts = hostlist.compress_counts(allocation.tasks)
    return {
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), str(allocation.world_size)),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_STEP_NUM_NODES"), str(len(allocation.hosts))),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), counts),
        "SLURM_STEP_NODELIST": hostlist.compress(allocation.hosts),
        "SLURM_CPUS_PER_TASK": str(allocation.cpus_per_task),
    }


def _slurm_rank_environment(place: Placement) -> dict[str, str]:
    """Return the variables that srun would set for one task alone."""
    first = place.rank - place.local_rank
    return {
        "SLURM_PROCID": str(place.rank),
        "SLURM_LOCALID": str(place.local_rank),
        "SLURM_NODEID": str(place.node_rank),
        "SLURM_GTIDS": ",".join(map(str, range(first, first + place.local_world_size))),
    }
