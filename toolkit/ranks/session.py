"""The session of one rank: its process group, device and run folder. They are closed in reverse order.

How the ranks of one launch find each other's store:

* Under a supervisor or torchrun ``MASTER_ADDR`` and ``MASTER_PORT`` name a store that an agent hosts.
* Plain ``srun`` and ``mpirun`` host none and reserve no port. A port computed from the job id collides with the next
  job that computes the same. So rank 0 binds a free port and writes it into a file on the shared folder, under a name
  that only this launch has. A file left over from an older launch names a dead port, or a store without our nonce: the
  other ranks read it again until rank 0 has replaced it.
* A single rank takes a free port on loopback.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore, distributed_c10d

from toolkit.base import fsio, logs, procfs, signals, trust
from toolkit.base.errors import EXIT_FAILED, ConfigError, StoppedError, ToolkitError
from toolkit.base.procfs import ProcessIdentity
from toolkit.config import DistConfig
from toolkit.devices.kinds import is_of_devices
from toolkit.files import error_file, records, rundir
from toolkit.files.records import JsonRecord
from toolkit.files.run_files import RunStatus
from toolkit.hang import Activity
from toolkit.nodes.agent import reports
from toolkit.ranks import collectives, older_torch
from toolkit.ranks.agreement import STOP, Gate, StalledRequest
from toolkit.ranks.agreement.torch_store import StoreTransport, connector
from toolkit.ranks.device import agree_on_backend, backend_of_plugin, choose_backend, choose_device
from toolkit.ranks.report import AgentReporter, FileReporter, Reporter
from toolkit.slurm import network

#: The number of this attempt, counted from 1.
ATTEMPT_VARIABLE = "TOOLKIT_ATTEMPT"
#: A stop that has not been reached this long after the request never will be: a rank is frozen or dead. Longer than any
#: step, save and batch of an evaluation should take, shorter than the grace time that sites grant.
FORCE_AFTER_S = 120.0

log = logs.get(__name__)


class StartUp:
    """The seconds of each part of a rank's start, one after the other. ``program`` has ended when this is made."""

    def __init__(self) -> None:
        self._mark = time.monotonic()
        # How long ago this process was started or forked, to 10 ms; 0 where the kernel does not tell.
        stat = procfs.read("self")
        age_s = 0.0 if stat is None else max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - stat.started_s)
        self.parts = {"program": round(age_s, 3)}

    def end(self, part: str) -> None:
        now = time.monotonic()
        self.parts = {**self.parts, part: round(now - self._mark, 3)}
        self._mark = now


@dataclass(frozen=True)
class Session:
    """One rank's place in the run. The default process group is open during the session, also for one rank."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    run_dir: Path
    attempt: int
    store: dist.Store
    reporter: Reporter
    gate: Gate
    #: The process group's limit until the first step has been made.
    timeout: timedelta = timedelta(minutes=10)
    #: What this rank is doing, for the supervisor: a run in which no rank's activity changes for long ends as a hang.
    activity: Activity = field(default_factory=Activity)
    #: How long each part of the rank's start takes.
    start_up: StartUp = field(default_factory=StartUp)
    #: The numbers of the blocks of :meth:`main_first`.
    blocks: Iterator[int] = field(default_factory=count)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def tighten_timeouts(self) -> None:
        """Tighten the timeouts after the attempt's first step: no rank has reason to keep others waiting then."""
        collectives.tighten_timeouts(self.timeout)

    def progress(self, **fields: Any) -> None:
        """Report where this rank is (phase, step, loss, ...). Cheap, and never blocks on I/O."""
        self.reporter.progress(**fields)

    def from_main(self, topic: str, say: Callable[[], Any]) -> Any:
        """Return on every rank what ``say()`` returns on rank 0, in JSON.

        All ranks call this, once per topic; only rank 0 calls ``say``. Where it raises, or returns None, the other
        ranks raise ToolkitError.
        """
        key = f"toolkit/{topic}/{self.attempt}"
        if not self.is_main:
            said = json.loads(self.store.get(key))
            if said is None:
                raise ToolkitError(f"{topic}: rank 0 could not provide it: see its log")
            return said
        # Publish None if ``say`` raises: the others must not wait for the timeout.
        said = None
        try:
            said = say()
        finally:
            self.store.set(key, json.dumps(said))
        return said

    @contextmanager
    def main_first(self, wait: Callable[[str], None] = lambda key: None) -> Iterator[None]:
        """Run the block on rank 0, then on all others. Every rank calls it.

        It suits a download into a shared folder. Where the block raises on rank 0, the others raise ToolkitError. The
        others may ``wait(key)`` in a way of their own until the store has ``key``.
        """
        topic = f"main_first/{next(self.blocks)}"
        if not self.is_main:
            wait(f"toolkit/{topic}/{self.attempt}")
            self.from_main(topic, dict)
            yield
            return
        is_done = False
        try:
            yield
            is_done = True
        finally:
            # Also if the block fails: the others must not wait for the timeout.
            self.store.set(f"toolkit/{topic}/{self.attempt}", "{}" if is_done else "null")

    def owns_run(self) -> bool:
        """True if no later attempt has taken the run over. One may while this rank's node is cut off."""
        return _owns_run(rundir.RunDir(self.run_dir))

    def finish(self, result: Mapping[str, Any]) -> None:
        """Hand over the run's result: step, epoch, samples, metrics. Any rank may call it; rank 0's result counts."""
        self.reporter.finish(result)


@contextmanager
def open_session(config: DistConfig, gpus: int = 0, tasks_per_gpu: int = 1) -> Iterator[Session]:
    """Open the process group of this launch, and the session in it. The environment describes the launch.

    ``gpus`` is the number asked for on each node, each of them for ``tasks_per_gpu`` ranks. Raises ConfigError when the
    backend does not fit the devices of all nodes.
    """
    start_up = StartUp()
    rank, world_size, local_rank = place = _place()
    timeout = timedelta(seconds=config.timeout_s)
    backend = choose_backend(config.backend, tasks_per_gpu)
    with ExitStack() as stack:
        # Over a backend that torch lacks the ranks can agree on a launch key themselves if the launcher gives none.
        key: Callable[[], str] | None = None
        if brought := backend_of_plugin(config.backend):
            stack.push(brought.finalize)
            key = partial(brought.launch_key, rank, world_size)
        store = open_store(rank, world_size, timeout, rundir.runs_root() / RENDEZVOUS, key)
        agree_on_backend(store, rank, world_size, backend, gpus)
        device = choose_device(store, backend, local_rank, tasks_per_gpu)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if is_of_devices(backend) else None,
        )
        stack.push(partial(_close_process_group, rank))
        log.info("rank %d of %d: %s on %s", rank, world_size, backend, device)
        yield stack.enter_context(_session(place, device, store, timeout, start_up))


@contextmanager
def open_beside(config: DistConfig, gpus: int = 0, tasks_per_gpu: int = 1) -> Iterator[Session]:
    """Open a session beside a library that opens the process group, with the launch's store alone and no collective."""
    start_up = StartUp()
    rank, world_size, local_rank = place = _place()
    timeout = timedelta(seconds=config.timeout_s)
    store = open_store(rank, world_size, timeout, rundir.runs_root() / RENDEZVOUS)
    agree_on_backend(store, rank, world_size, choose_backend("auto", tasks_per_gpu), gpus)
    device = choose_device(store, "gloo", local_rank, tasks_per_gpu)
    with _session(place, device, store, timeout, start_up) as session:
        yield session


@contextmanager
def _session(
    place: tuple[int, int, int], device: torch.device, store: dist.Store, timeout: timedelta, start_up: StartUp
) -> Iterator[Session]:
    rank, world_size, _ = place
    with ExitStack() as stack:
        run = rundir.RunDir(_agree_on_run_dir(store, rank))
        activity = Activity()
        # Closed in reverse order: the gate, then the reporter.
        client = older_torch.clone(store)
        attempt = int(os.environ.get(ATTEMPT_VARIABLE, "1"))
        reporter: Reporter
        if os.environ.get("TOOLKIT_SUPERVISED") == "1":
            token = os.environ.get(reports.VARIABLE)
            if token is None:
                raise ConfigError(f"TOOLKIT_SUPERVISED=1 is set, and {reports.VARIABLE} is not: hand all variables on")
            reporter = AgentReporter(reports.Outbox(reports.addresses(token)), attempt, rank, activity)
        elif rank == 0:
            who = asdict(ProcessIdentity.of(os.getpid()))
            status = RunStatus(supervised=False, world_size=world_size, attempt=1, **who)
            reporter = FileReporter(run, status, partial(_owns_run, run))
        else:
            reporter = Reporter()  # no one reads the reports of the other ranks of an unsupervised run
        stack.callback(reporter.close)
        gate = stack.enter_context(_open_gate(store, client, rank, world_size))
        start_up.end("group")
        yield Session(*place, device, run.path, attempt, store, reporter, gate, timeout, activity, start_up)


def _owns_run(run: rundir.RunDir) -> bool:
    owner = os.environ.get(rundir.OWNER_VARIABLE)
    return owner is None or run.belongs_to(int(owner))


def _place() -> tuple[int, int, int]:
    """Return rank, world size and local rank; without a launcher those of a rank that is alone."""
    get = os.environ.get
    return int(get("RANK", "0")), int(get("WORLD_SIZE", "1")), int(get("LOCAL_RANK", "0"))


def _agree_on_run_dir(store: dist.Store, rank: int) -> Path:
    """Return the environment's run folder, else rank 0's: ranks of an unsupervised run may lack the variable."""
    known = os.environ.get(rundir.RUN_DIR_VARIABLE)
    if rank == 0:
        if known is None:
            raise ConfigError(f"{rundir.RUN_DIR_VARIABLE} is not set: start this job with `toolkit run`")
        store.set("toolkit/run_dir", known)
    if known is not None:
        return Path(known)
    # The path comes from the store: check that it exists here and is trusted.
    told = Path(store.get("toolkit/run_dir").decode(errors="replace"))
    if not fsio.is_there(told):
        raise ToolkitError(f"rank {rank}: there is no run folder {told}, which rank 0 has sent; do all nodes share it?")
    trust.refuse_untrusted(told, f"rank {rank}: the run folder that rank 0 has sent")
    return told


@contextmanager
def _open_gate(store: dist.Store, client: dist.Store, rank: int, world_size: int) -> Iterator[Gate]:
    """Open the gate at which the ranks agree where to stop. A stop signal of this process is a request at it."""
    ask = StoreTransport(client)
    gate = Gate(rank, world_size, connector(store), ask=ask, force_after_s=FORCE_AFTER_S, on_hang=_force_exit)
    handler = signals.install()
    handler.listen(lambda: gate.request(STOP))
    try:
        yield gate
    finally:
        handler.listen(None)
        gate.close()


def _force_exit(hang: StalledRequest) -> None:
    """End the process if a stop hangs: nothing can be saved any more, and the next start needs the time."""
    if hang.kind != STOP:  # a save can wait, for the end of an evaluation too
        log.warning("%s", hang)
        return
    log.error("forced exit: %s", hang)
    os._exit(EXIT_FAILED)


def _close_process_group(rank: int, kind: object, error: BaseException | None, trace: object) -> None:
    """Destroy the group. After an exception, write it down first and abort NCCL's group.

    NCCL's shutdown may wait for peers that sit in a collective: a crash would look like a hang, without a message.
    """
    crashed = error is not None and not isinstance(error, StoppedError)
    if error is not None and crashed:
        error_file.write(error, rank)
    if not dist.is_initialized():
        return
    if crashed and is_of_devices(dist.get_backend()):
        with suppress(Exception):  # the exception that is on its way is the one to show
            distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()


LAUNCH_KEY_VARIABLE = "TOOLKIT_LAUNCH_KEY"
#: The folder of the rendezvous files in that of the runs.
RENDEZVOUS = ".rendezvous"
#: Key of the launch's random text in its store. The rendezvous file holds the same text.
NONCE_KEY = "toolkit/nonce"
#: Seconds between two reads of the rendezvous file.
RETRY_S = 0.2


@dataclass(frozen=True)
class _StoreAddress(JsonRecord):
    """The rendezvous file: where rank 0 serves the store."""

    host: str
    port: int
    nonce: str


def open_store(
    rank: int, world_size: int, timeout: timedelta, folder: Path, own_key: Callable[[], str] | None = None
) -> Store:
    """Return a connected client of this launch's store.

    ``folder`` is shared by the ranks. It holds the rendezvous file, if one is needed, under the name that the launcher
    gives this launch, or else ``own_key()``. Raises ToolkitError when rank 0 cannot be found within ``timeout``.
    """
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        has_host = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # else rank 0 hosts the store
        return TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            world_size,
            is_master=rank == 0 and not has_host,
            timeout=timeout,
            wait_for_workers=not has_host,
            multi_tenant=True,  # a library in this process may host its store there too: they share the server
        )
    if world_size == 1:
        return _served("127.0.0.1", 1, timeout)
    key = os.environ.get(LAUNCH_KEY_VARIABLE) or (own_key() if own_key is not None else None)
    if key is None:
        raise ToolkitError(
            f"rank {rank} of {world_size}: nothing says where rank 0 is; start with `toolkit submit`, `toolkit run` "
            "under srun, torchrun or Open MPI's mpirun, set MASTER_ADDR and MASTER_PORT, or use dist.backend: mpi"
        )
    # A folder of another user could hold a forged rendezvous file.
    trust.refuse_untrusted(fsio.make_dir(folder), f"rank {rank}: the folder by which the ranks find each other")
    path = folder / f"{key}.json"
    if rank == 0:
        return _host(path, world_size, timeout)
    return _join(path, rank, timeout)


def _host(path: Path, world_size: int, timeout: timedelta) -> Store:
    nonce = secrets.token_hex(8)
    peer = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")
    address = network.interface_for(peer).address if peer else None  # under which the other nodes reach this one
    # Without a known address: listen on all of them, and let the others use the host name.
    store = _served(address or network.wildcard(), world_size, timeout)
    store.set(NONCE_KEY, nonce)
    fsio.write_json(path, _StoreAddress(address or socket.gethostname(), store.port, nonce).to_json())
    # The file is removed once all ranks are in, or the wait has failed.
    store.set("toolkit/joined/0", "1")
    try:
        store.wait([f"toolkit/joined/{rank}" for rank in range(world_size)], timeout)
    finally:
        path.unlink(missing_ok=True)
    return store


def _join(path: Path, rank: int, timeout: timedelta) -> Store:
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        written = records.read_or_none(path, _StoreAddress)
        if written is not None:
            with suppress(RuntimeError, OSError, OverflowError):  # refused: the port of an older launch
                host, port = written.host, written.port
                socket.create_connection((host, port), timeout=5).close()  # TCPStore would retry for the whole timeout
                store = TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
                if store.get(NONCE_KEY).decode() == written.nonce:  # else another launch's store
                    store.set(f"toolkit/joined/{rank}", "1")
                    return store
        time.sleep(RETRY_S)
    raise ToolkitError(
        f"rank {rank}: rank 0 has not written {path} within {timeout.total_seconds():.0f} s; is the folder shared by "
        "all nodes (another one: set TOOLKIT_RUNS), and does rank 0 run?"
    )


def _served(address: str, world_size: int, timeout: timedelta) -> TCPStore:
    """Return a store that listens on ``address`` alone. torch's own socket would listen on every address."""
    with network.listen(address) as listener:
        port = listener.getsockname()[1]
        return older_torch.serve_store(network.reachable_at(address), port, listener.detach(), timeout, world_size)
