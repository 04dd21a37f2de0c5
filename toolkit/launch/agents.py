"""Starting the ranks and the store of every attempt through the agents of the job's nodes, one on each.

The agents are started once, by one srun step or on this machine, and stay. What happens to the ranks goes into the
supervisor's queue, as with the other launchers.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Protocol

from toolkit import fsio, logs
from toolkit.agent.link import SECRET_BYTES, Message
from toolkit.cluster import hostlist
from toolkit.cluster.commands import Step as SrunPlan
from toolkit.cluster.container import Container
from toolkit.cluster.network import job_address, listen, wildcard
from toolkit.cluster.placement import Placement, rank_environment
from toolkit.errors import EXIT_FAILED
from toolkit.launch import foreign, patience
from toolkit.launch.agent_links import AgentLinks
from toolkit.launch.allocation import Allocation
from toolkit.launch.srun import Srun, SrunEvent
from toolkit.launch.steps import (
    Events,
    LaunchFailed,
    NodeFailed,
    RankEnded,
    Step,
    StepEnded,
    Store,
    open_log,
    signal_name,
    tethered,
)
from toolkit.launch.store import StoreHostEnded, hear
from toolkit.rundir import RunDir

#: An agent must stand after so long, or its node counts as one where nothing can be started.
STANDS_WITHIN_S = 120.0
#: How our own modules are started.
MODULE = (sys.executable, "-P", "-m")
FOREIGN_MODULE = "toolkit.launch.foreign"
#: Variables by which srun binds tasks to GPUs.
GPU_BINDINGS = ("SLURM_GPU_BIND", "SLURM_TRES_BIND")
#: Agents that are told to leave are gone after this long.
LEAVE_S = 2.0

log = logs.get(__name__)


class OnFailure(Protocol):
    """What is called when agents cannot be started, or have ended; in any thread."""

    def __call__(self, hosts: Collection[str], why: str, *, is_certain: bool = True) -> None:
        """``is_certain``: also of those that are connected."""


class AgentStarter(Protocol):
    """Starts agents that connect to ``address`` and ``port``; an empty address is where they are started from."""

    def start(
        self,
        hosts: Sequence[str],
        secret_file: Path,
        address: str,
        port: int,
        environ: Mapping[str, str],
        on_failure: OnFailure,
    ) -> None:
        """Start one on each of ``hosts``, with ``environ``, which the ranks inherit, and return at once."""

    def close(self) -> None:
        """End what is left of them."""


class LocalAgent:
    """An agent on this machine, which dies with this process."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        hosts: Sequence[str],
        secret_file: Path,
        address: str,
        port: int,
        environ: Mapping[str, str],
        on_failure: OnFailure,
    ) -> None:
        """See :class:`AgentStarter`."""
        (host,) = hosts
        log_path = self._run.logs / "agent.log"
        with open_log(log_path) as output:
            process = subprocess.Popen(
                tethered(_command(secret_file, address, port, host), signal.SIGKILL),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes.append(process)

        def wait() -> None:
            code = process.wait()
            on_failure(hosts, f"its agent ended with exit code {code}: see {log_path}")

        threading.Thread(target=wait, daemon=True).start()

    def close(self) -> None:
        """See :class:`AgentStarter`."""
        for process in self._processes:
            process.kill()


class SrunAgents:
    """Agents as one step of our job, which has all that the job has on its nodes."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._sruns: list[Srun] = []

    def start(
        self,
        hosts: Sequence[str],
        secret_file: Path,
        address: str,
        port: int,
        environ: Mapping[str, str],
        on_failure: OnFailure,
    ) -> None:
        """See :class:`AgentStarter`."""
        plan = SrunPlan(
            command=_command(secret_file, address, port),
            hosts=hosts,
            cpus_per_task=None,
            output=str(self._run.logs / "agent-%N.log"),
            name=f"{self._run.id}.agents",
            mpi="none",
            extra=["--cpu-bind=none", "--no-kill"],
            overlap=True,
        )
        # --gpu-bind is for tasks that are ranks: this one has all GPUs of its node, and its ranks choose by LOCAL_RANK
        unbound = {name: value for name, value in environ.items() if not name.startswith(GPU_BINDINGS)}
        srun = Srun(plan, unbound, self._run.logs / f"agents-{len(self._sruns)}.hosts")
        self._sruns.append(srun)
        threading.Thread(target=self._wait, args=[srun, hosts, on_failure], daemon=True).start()

    def _wait(self, srun: Srun, hosts: Sequence[str], on_failure: OnFailure) -> None:
        code = srun.wait(partial(self._take, hosts, on_failure))
        on_failure(hosts, f"the agents' srun ended with exit code {code}", is_certain=False)

    @staticmethod
    def _take(hosts: Sequence[str], on_failure: OnFailure, event: SrunEvent) -> None:
        match event:
            case LaunchFailed():
                on_failure(hosts if event.host is None else [event.host], event.why)
            case RankEnded():
                on_failure([event.host], f"its agent: {event.how}; see agent-{event.host}.log")
            case NodeFailed(host):  # a dead node ends no connection
                on_failure([host], "Slurm has given the node up")

    def close(self) -> None:
        """See :class:`AgentStarter`. The agents themselves have left, and srun must not end a step by its number."""
        for srun in self._sruns:
            srun.silence()


def _command(secret_file: Path, address: str, port: int, *host: str) -> list[str]:
    return [*MODULE, "toolkit.agent.node", str(secret_file), address, str(port), *host]


class AgentLauncher:
    """Starts ranks through the agents of the job's nodes.

    ``is_bound`` tells whether each rank gets CPUs of its own.
    """

    def __init__(
        self,
        run: RunDir,
        allocation: Allocation,
        starter: AgentStarter,
        container: Container | None = None,
        is_bound: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_bound = is_bound
        self._run, self._allocation, self._container = run, allocation, container
        self._starter = starter
        self._links: AgentLinks | None = None
        self._starting: dict[str, float] = {}  #: since when
        self._start_of: dict[str, int] = {}  #: the number of the last start of each host's agent
        self._step: _AgentStep | None = None
        self._store: _AgentStore | None = None
        self._events: Events | None = None
        self._store_order: Message | None = None  #: that has not been sent
        self._is_warm = False
        self._is_closed = threading.Event()
        self._all_left = threading.Event()

    # ------------------------------------------------------------------------------------------ for the supervisor

    def start_store(
        self, attempt: int, world_size: int, host: str, environ: Mapping[str, str], events: Events
    ) -> Store:
        """See :class:`~toolkit.launch.steps.Launcher`."""
        links = self._open(environ)
        module = ["toolkit.dist.store_host", "--world-size", str(world_size), "--host", host]
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
        """See :class:`~toolkit.launch.steps.Launcher`."""
        assert isinstance(store, _AgentStore)
        links = self._open(environ)
        step = _AgentStep(attempt, allocation, events, links)
        cpus = allocation.cpus_per_task if self._is_bound() else None
        for node_rank, host in enumerate(allocation.hosts):
            processes = [
                {
                    "rank": place.rank,
                    "environ": {**rank_environment(place), **_slurm_environment(place, allocation)},
                    "log": str(self._run.rank_log(attempt, place.rank)),
                }
                for place in _places(allocation, node_rank)
            ]
            step.orders[host] = self._order(attempt, command, environ, processes, cpus)
        links.call(lambda: self._begin(step, store))
        return step

    def close(self) -> None:
        """See :class:`~toolkit.launch.steps.Launcher`."""
        if self._links is not None:
            self._links.call(self._leave)
            self._all_left.wait(LEAVE_S)
            self._starter.close()
            with contextlib.suppress(OSError):
                self._secret_file.unlink()

    def _open(self, environ: Mapping[str, str]) -> AgentLinks:
        """The first attempt's environment is the agents' own: orders tell what is different."""
        if self._links is not None:
            return self._links
        here, hosts = self._allocation.hosts[0], self._allocation.hosts
        address = job_address(here, hosts, environ)
        self._secret_file = self._run.path / f".agents-{secrets.token_hex(8)}.key"
        secret = secrets.token_bytes(SECRET_BYTES)
        patience.persist(lambda: fsio.write_atomic(self._secret_file, secret), self._run.path)
        listening = listen(address)
        self._address = "" if address == wildcard() else address
        self._port = int(listening.getsockname()[1])
        self._environ = dict(environ)
        self._links = AgentLinks(listening, secret, self)
        return self._links

    def _order(
        self,
        attempt: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        processes: Sequence[Message],
        cpus: int | None = None,
    ) -> Message:
        is_module = tuple(command[:3]) == MODULE and (command[3] != FOREIGN_MODULE or self._command_gains)
        changed = {name: value for name, value in environ.items() if self._environ.get(name) != value}
        return {
            "do": "start",
            "attempt": attempt,
            "module": list(command[3:]) if is_module else None,
            "command": list(command),
            "environ": changed,
            "unset": [name for name in self._environ if name not in environ],
            "processes": processes,
            "cpus_per_task": cpus,
        }

    @cached_property
    def _command_gains(self) -> bool:
        return foreign.gains_by_fork(self._run)

    # --------------------------------------------------------------------------------------------------- the thread

    def _begin_store(self, store: _AgentStore, order: Message) -> None:
        self._events = store.events
        self._store, self._store_order = store, order

    def _begin(self, step: _AgentStep, store: _AgentStore) -> None:
        assert self._links is not None
        is_first, self._step = self._step is None, step
        self._is_warm = any(order["module"] is not None for order in step.orders.values())
        self._ensure({self._allocation.hosts[0], *step.hosts})
        if is_first:  # the spares, apart: one of them may be why a step is refused
            self._ensure(self._allocation.hosts)
        store.when_ready(lambda: self._set_port(step, store))
        self._send_orders()

    def _set_port(self, step: _AgentStep, store: _AgentStore) -> None:
        for order in step.orders.values():
            order["environ"]["MASTER_PORT"] = str(store.port)
        step.may_begin = True
        self._send_orders()

    def _ensure(self, hosts: Collection[str]) -> None:
        """Start agents where none is and none is on its way."""
        assert self._links is not None
        there = self._links.hosts | self._starting.keys()
        missing = [host for host in self._allocation.hosts if host in hosts and host not in there]
        if missing:
            self._starting |= dict.fromkeys(missing, time.monotonic())
            number = max(self._start_of.values(), default=0) + 1
            self._start_of |= dict.fromkeys(missing, number)
            on_failure = partial(self._agents_failed, number)
            try:
                self._starter.start(missing, self._secret_file, self._address, self._port, self._environ, on_failure)
            except OSError as error:
                self._give_up(missing, f"agents cannot be started: {error}")

    def _send_orders(self) -> None:
        assert self._links is not None
        here = self._allocation.hosts[0]
        if self._store is not None and self._store_order is not None and here in self._links.hosts:
            if not self._store.is_closing:
                self._links.send(here, self._store_order)
            self._store_order = None
        if self._step is not None and self._step.may_begin:
            for host in self._step.orders.keys() & self._links.hosts:
                self._links.send(host, self._step.orders.pop(host))

    def _leave(self) -> None:
        assert self._links is not None
        self._is_closed.set()
        for host in self._links.hosts:
            self._links.send(host, {"do": "leave"})
        if not self._links.hosts:
            self._all_left.set()

    def _agents_failed(self, number: int, hosts: Collection[str], why: str, *, is_certain: bool = True) -> None:
        """See :class:`OnFailure`. Of an agent that has been started again since, nothing is to be heard any more."""
        assert self._links is not None
        self._links.call(
            lambda: self._give_up([h for h in hosts if self._start_of[h] == number], why, is_certain=is_certain)
        )

    def _give_up(self, hosts: Collection[str], why: str, *, is_certain: bool = True) -> None:
        assert self._links is not None
        for host in hosts:
            if is_certain:
                self._links.drop(host, why)
            if self._starting.pop(host, None) is None:
                continue
            log.warning("no agent on %s: %s", host, why)
            if self._step is not None:
                self._step.never_began(host, why)
            if host == self._allocation.hosts[0] and self._store is not None:
                self._store_order = None
                self._store.end(EXIT_FAILED)

    # what the links tell

    def agent_came(self, host: str) -> None:
        """See :class:`~toolkit.launch.agent_links.Listener`."""
        assert self._links is not None
        self._starting.pop(host, None)
        if self._is_warm:  # also a spare
            self._links.send(host, {"do": "warm"})
        self._send_orders()

    def agent_said(self, host: str, message: Message) -> None:
        """See :class:`~toolkit.launch.agent_links.Listener`."""
        store, step = self._store, self._step
        if message["is"] == "said":
            if store is not None and message["attempt"] == store.attempt:
                store.take(message["text"])
        elif message["rank"] is None:
            if store is not None and message["attempt"] == store.attempt:
                store.end(message.get("code", EXIT_FAILED))
        elif step is not None:
            step.take(host, message)

    def agent_left(self, host: str, why: str) -> None:
        """See :class:`~toolkit.launch.agent_links.Listener`."""
        assert self._links is not None
        if self._is_closed.is_set():
            if not self._links.hosts:
                self._all_left.set()
            return
        log.warning("node %s: %s", host, why)
        if self._step is not None:
            self._step.lose(host, why)
        if host == self._allocation.hosts[0] and self._store is not None:
            self._store.end(EXIT_FAILED)

    def broke(self, error: Exception) -> None:
        """See :class:`~toolkit.launch.agent_links.Listener`."""
        if self._events is not None:
            self._events.put(error)

    def time_passed(self) -> None:
        """See :class:`~toolkit.launch.agent_links.Listener`."""
        late = [host for host, since in self._starting.items() if time.monotonic() - since > STANDS_WITHIN_S]
        if late:
            self._give_up(late, f"no agent has come from it within {STANDS_WITHIN_S:.0f} s")


class _AgentStore:
    """The store of one attempt, on our own node."""

    def __init__(self, attempt: int, host: str, events: Events, links: AgentLinks) -> None:
        self.attempt = attempt
        self.port: int | None = None
        self.events, self._host, self._links = events, host, links
        self._text = ""
        self._on_ready: list[Callable[[], None]] = []
        self.is_closing = False
        self._is_over = threading.Event()

    def propose(self, kind: str, by: str) -> None:
        """See :class:`~toolkit.launch.store.Store`."""
        text = json.dumps({"propose": kind, "by": by}) + "\n"
        self._links.call(lambda: self.when_ready(lambda: self._tell(do="tell", text=text)))

    def close(self, patience_s: float) -> None:
        """See :class:`~toolkit.launch.store.Store`."""
        self.is_closing = True
        if self.port is not None:
            self._tell(do="tell", text="")
            self._is_over.wait(patience_s)
        if not self._is_over.is_set():
            self._tell(do="end_store")

    def _tell(self, **order: str) -> None:
        message = {**order, "attempt": self.attempt}
        self._links.call(lambda: self._links.send(self._host, message))

    # of the thread

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call it as soon as the port is known."""
        if self.port is not None:
            call()
        else:
            self._on_ready.append(call)

    def take(self, text: str) -> None:
        """Take what the store has printed."""
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            content = hear(line, self.events)
            if self.port is None and content is not None and "port" in content:
                self.port = int(content["port"])
                for call in self._on_ready:
                    call()

    def end(self, code: int) -> None:
        """It has ended, or never will begin."""
        if not self._is_over.is_set():
            self._is_over.set()
            if not self.is_closing:
                self.events.put(StoreHostEnded(code or EXIT_FAILED))


class _AgentStep:
    """The ranks of one attempt. All but ``kill`` and ``abandon`` is called in the links' thread."""

    def __init__(self, attempt: int, allocation: Allocation, events: Events, links: AgentLinks) -> None:
        self._attempt, self._events, self._links = attempt, events, links
        self._rank_hosts = allocation.rank_hosts
        self._left = set(range(allocation.world_size))
        self._exit_code = 0
        self.hosts = allocation.hosts
        self.orders: dict[str, Message] = {}  #: that have not been sent
        self.may_begin = False

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """See :class:`~toolkit.launch.steps.Step`."""
        self._links.call(lambda: self._kill(number))

    def _kill(self, number: signal.Signals) -> None:
        if number is signal.SIGKILL:
            for host in list(self.orders):  # whose agents have not come yet
                del self.orders[host]
                self._end(self._ranks_on(host), -number)
        for host in self.hosts:
            self._links.send(host, {"do": "signal", "attempt": self._attempt, "number": int(number)})

    def abandon(self) -> None:
        """See :class:`~toolkit.launch.steps.Step`."""
        self._links.call(lambda: self._end(list(self._left), EXIT_FAILED))

    def _ranks_on(self, host: str) -> list[int]:
        return [rank for rank in sorted(self._left) if self._rank_hosts[rank] == host]

    def take(self, host: str, message: Message) -> None:
        """Take what the agent of ``host`` says of this attempt's ranks."""
        rank = message["rank"]
        if message["attempt"] != self._attempt or rank not in self._left or self._rank_hosts[rank] != host:
            return
        if message["is"] == "not_started":
            self._events.put(LaunchFailed((rank,), host, message["why"]))
            self._end([rank], EXIT_FAILED)
        elif message["is"] == "ended":
            code = message["code"]
            if code != 0:
                self._events.put(_ended(rank, host, code, message["time"], out_of_memory=message["out_of_memory"]))
            self._end([rank], code)

    def lose(self, host: str, why: str) -> None:
        """Its agent has ended, and its ranks with it."""
        ranks = self._ranks_on(host)
        if ranks:
            how = f"killed by SIGKILL ({why})"
            self._events.put(RankEnded(tuple(ranks), host, how, signal.SIGKILL, time.time(), with_agent=True))
            self._end(ranks, -signal.SIGKILL)

    def never_began(self, host: str, why: str) -> None:
        """No agent stands there."""
        if self.orders.pop(host, None) is not None:
            ranks = self._ranks_on(host)
            self._events.put(LaunchFailed(tuple(ranks), host, why))
            self._end(ranks, EXIT_FAILED)

    def _end(self, ranks: Sequence[int], code: int) -> None:
        if not self._left:
            return
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


def _places(allocation: Allocation, node_rank: int) -> list[Placement]:
    first = sum(allocation.tasks[:node_rank])
    return [
        Placement(
            rank=first + local_rank,
            world_size=allocation.world_size,
            local_rank=local_rank,
            local_world_size=allocation.tasks[node_rank],
            node_rank=node_rank,
            nodes=len(allocation.hosts),
            host=allocation.hosts[node_rank],
            launcher="supervisor",
        )
        for local_rank in range(allocation.tasks[node_rank])
    ]


def _slurm_environment(place: Placement, allocation: Allocation) -> dict[str, str]:
    """What srun would tell a task of this attempt, for scripts that read it. From srun(1), output variables."""
    if allocation.job_id is None:
        return {}
    first = place.rank - place.local_rank
    counts = ",".join(map(str, allocation.tasks))
    return {
        "SLURM_PROCID": str(place.rank),
        "SLURM_LOCALID": str(place.local_rank),
        "SLURM_NODEID": str(place.node_rank),
        "SLURM_GTIDS": ",".join(map(str, range(first, first + place.local_world_size))),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS"), str(place.world_size)),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_STEP_NUM_NODES"), str(place.nodes)),
        **dict.fromkeys(("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"), counts),
        "SLURM_STEP_NODELIST": hostlist.compress(allocation.hosts),
        "SLURM_CPUS_PER_TASK": str(allocation.cpus_per_task),
    }
