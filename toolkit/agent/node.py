"""The agent of one node: ``python -m toolkit.agent.node SECRET_FILE HOST PORT [NAME]``.

It lives as long as the job. It starts the ranks of each attempt and the attempt's store when the supervisor says so, by
forks of a zygote or as fresh programs, sends them signals, and says at once how each has ended. When it has lost the
supervisor it ends them, and when it dies they die with it. It has one thread and needs no torch.

What it is told (``do``) and what it tells (``is``):

* ``warm``: have a zygote ready.
* ``start``: processes of an attempt, the store or ranks. Then ``ended`` of each, or ``not_started``.
* ``signal``: to all ranks of an attempt. ``tell``: text for the store's standard input, nothing for its end.
  ``end_store``: kill it. What the store prints is ``said``.
* ``watch``: the command that looks after the batch host when the supervisor is silent or gone, and the node's turn.
* ``leave``: end.

Each says that it is ``alive`` every second.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit import fsio, logs
from toolkit.agent import cpus
from toolkit.agent.link import HEARTBEAT_S, SILENT_S, Link, Message, StrangerError
from toolkit.agent.tether import SIGNALS, die_with
from toolkit.agent.zygote import ROOM_BYTES, ROOM_VARIABLE, Order, opened

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
#: A supervisor that has not confirmed what it was sent for so long is gone; a network may be away for half a minute.
GONE_S = 120
#: Agents begin one after the other to look after the batch host: where the first one does, the others need not.
TURN_S = 10.0
#: Tells a rank where it may keep its state, see toolkit.checkpoint.memory.
STATE_MEMORY = "TOOLKIT_STATE_MEMORY"
#: Room for what ``ps`` shows of a rank.
TITLE_BYTES = 1024

log = logs.get(__name__)


@dataclass
class _Child:
    attempt: int
    rank: int | None  #: None: the attempt's store
    ooms: int  #: kills for want of memory that the node's control group had counted when it started
    stdin: int | None = None
    stdout: int | None = None


class Agent:
    """Serves one connection to the supervisor."""

    def __init__(self, connection: socket.socket, link: Link, name: str) -> None:
        self._connection, self._link, self._name = connection, link, name
        self._children: dict[int, _Child] = {}  #: by pid, of those that live
        self._waiting: list[Message] = []  #: orders that wait for the zygote
        self._zygote: _Zygote | None = None
        self._heard = time.monotonic()  #: when the supervisor last said something, or was lost
        self._memory: dict[int, tuple[int, int]] = {}  #: two files in memory for the state of each rank
        self._is_alone = False  #: the supervisor is lost for good
        self._watch_order: Message | None = None
        self._watcher: int | None = None  #: the pid of what looks after the batch host
        self._selector = selectors.DefaultSelector()
        self._is_over = False

    def serve(self) -> None:
        """Until the supervisor says so, or is gone. Every rank has been ended then."""
        waker, woken = socket.socketpair()
        for end in (waker, woken):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(self._connection, selectors.EVENT_READ, self._hear)
        self._selector.register(woken, selectors.EVENT_READ, lambda: woken.recv(4096))
        self._connection.sendall(self._link.greeting)
        self._say({"is": "here", "host": self._name, "pid": os.getpid()})
        next_heartbeat = 0.0
        try:
            while not self._is_over:
                for key, _ in self._selector.select(HEARTBEAT_S):
                    key.data()
                self._reap()
                self._watch_the_batch_host()
                if time.monotonic() >= next_heartbeat:
                    next_heartbeat = time.monotonic() + HEARTBEAT_S
                    self._say({"is": "alive"})
        finally:
            self._end_children()

    def _end_children(self) -> None:
        for pid in self._children:
            _signal_session(pid, signal.SIGKILL)
        if self._zygote is not None:
            self._zygote.end()

    def _say(self, message: Message) -> None:
        if not self._is_alone:
            try:
                self._connection.sendall(self._link.send(message))
            except OSError:
                self._lose_supervisor()

    def _hear(self) -> None:
        try:
            data = self._connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._lose_supervisor()
            return
        self._heard = time.monotonic()
        orders, answer = self._link.receive(data)
        if answer:
            self._connection.sendall(answer)
        for order in orders:
            self._obey(order)

    def _obey(self, order: Message) -> None:
        match order["do"]:
            case "warm":
                self._warm()
            case "start" if order["module"] is not None and self._warm().is_importing:
                self._waiting.append(order)
            case "start":
                self._start(order)
            case "signal":
                self._signal(order["attempt"], signal.Signals(order["number"]))
            case "tell":
                self._tell(order["attempt"], order["text"])
            case "end_store":
                self._end_store(order["attempt"])
            case "watch":
                self._watch_order = order
            case "leave":
                self._is_over = True

    # ----------------------------------------------------------------------------------------------- the supervisor

    def _lose_supervisor(self) -> None:
        """End the ranks. Without an order to watch there is nothing else to do here."""
        if not self._is_alone:
            log.warning("the supervisor is gone: ending the ranks")
            self._is_alone, self._heard = True, time.monotonic()
            self._selector.unregister(self._connection)
            self._end_children()
            self._is_over = self._watch_order is None

    def _watch_the_batch_host(self) -> None:
        """Have it looked after while the supervisor is silent or gone."""
        order = self._watch_order
        if order is None:
            return
        silent_s = time.monotonic() - self._heard
        is_silent = self._is_alone or silent_s > SILENT_S
        if self._watcher is not None and not is_silent:
            os.kill(self._watcher, signal.SIGKILL)
            self._watcher = None
        elif self._watcher is None and is_silent and silent_s > SILENT_S + order["turn"] * TURN_S:
            log.warning("the supervisor has been silent for %.0f s: looking after the batch host", silent_s)
            agent = os.getpid()
            process = subprocess.Popen(order["command"], preexec_fn=lambda: die_with(agent, signal.SIGKILL))
            process.returncode = 0  # we reap it ourselves
            self._watcher = process.pid

    # ---------------------------------------------------------------------------------------------------- starting

    def _warm(self) -> _Zygote:
        """Return the zygote. One that died after it had been of use is replaced."""
        if self._zygote is None or (self._zygote.has_ended and self._zygote.was_ready):
            self._zygote = _Zygote()
            self._selector.register(self._zygote.socket, selectors.EVENT_READ, self._hear_zygote)
        return self._zygote

    def _hear_zygote(self) -> None:
        zygote = self._zygote
        assert zygote is not None
        if not zygote.hear():
            self._selector.unregister(zygote.socket)
        waiting, self._waiting = self._waiting, []
        for order in waiting:
            self._start(order)

    def _start(self, order: Message) -> None:
        ranks = [process["rank"] for process in order["processes"] if process["rank"] is not None]
        self._hold_memory(ranks)
        sets = cpus.for_tasks(len(order["processes"]), order["cpus_per_task"])
        for process, own_cpus in zip(order["processes"], sets, strict=True):
            child = _Child(order["attempt"], process["rank"], _oom_kills())
            environ = {**os.environ, **order["environ"], **process["environ"]}
            for name in order["unset"]:
                environ.pop(name, None)
            if child.rank is not None:
                held = (*self._memory[child.rank], *self._memory[ranks[0]])
                environ[STATE_MEMORY] = ":".join(f"/proc/{os.getpid()}/fd/{file}" for file in held)
            files = [os.devnull, process["log"], process["log"]]
            theirs: list[int] = []
            if child.rank is None:
                theirs = _make_pipes(child, files)
            try:
                fsio.make_dir(Path(process["log"]).parent)
                pid = self._start_one(
                    Order(
                        module=order["module"],
                        command=order["command"],
                        environ=environ,
                        files=files,
                        cpus=own_cpus,
                        agent=os.getpid(),
                    )
                )
            except OSError as error:
                self._say({"is": "not_started", "attempt": child.attempt, "rank": child.rank, "why": str(error)})
                continue
            finally:
                for file in theirs:
                    os.close(file)
            self._children[pid] = child
            if child.stdout is not None:
                self._selector.register(child.stdout, selectors.EVENT_READ, self._relay(child))

    def _hold_memory(self, ranks: Sequence[int]) -> None:
        """Hold two empty files in memory for each of ``ranks`` that has none; see toolkit.checkpoint.memory.

        They cost nothing until a rank writes there. Those of ranks that are elsewhere now are given back.
        """
        for rank in self._memory.keys() - set(ranks) if ranks else ():
            for file in self._memory.pop(rank):
                os.close(file)
        for rank in ranks:
            if rank not in self._memory:
                self._memory[rank] = (os.memfd_create(f"state-{rank}"), os.memfd_create(f"state-{rank}"))

    def _start_one(self, order: Order) -> int:
        if order["module"] is not None and self._zygote is not None and self._zygote.can_fork:
            pid = self._zygote.fork(order)
            if pid is not None:
                return pid

        def prepare() -> None:  # safe: this process has one thread
            die_with(order["agent"], signal.SIGKILL)
            if order["cpus"] is not None:
                os.sched_setaffinity(0, order["cpus"])
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)

        with opened(order["files"]) as (stdin, stdout, stderr):
            process = subprocess.Popen(
                order["command"],
                env=order["environ"],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=prepare,
            )
        process.returncode = 0  # we reap it ourselves
        return process.pid

    # ----------------------------------------------------------------------------------------------------- the store

    def _relay(self, child: _Child) -> Callable[[], None]:
        def read() -> None:
            assert child.stdout is not None
            data = os.read(child.stdout, 1 << 16)
            if data:
                self._say({"is": "said", "attempt": child.attempt, "text": data.decode(errors="replace")})
            else:
                self._selector.unregister(child.stdout)
                os.close(child.stdout)
                child.stdout = None

        return read

    def _tell(self, attempt: int, text: str) -> None:
        for child in self._stores(attempt).values():
            if child.stdin is None:
                continue
            with contextlib.suppress(OSError):  # its end is told a moment later
                os.write(child.stdin, text.encode())
            if not text:
                os.close(child.stdin)
                child.stdin = None

    def _end_store(self, attempt: int) -> None:
        self._waiting = [o for o in self._waiting if o["attempt"] != attempt or o["processes"][0]["rank"] is not None]
        for pid in self._stores(attempt):
            _signal_session(pid, signal.SIGKILL)

    def _stores(self, attempt: int) -> dict[int, _Child]:
        return {pid: child for pid, child in self._children.items() if child.attempt == attempt and child.rank is None}

    # ------------------------------------------------------------------------------------------------------- the end

    def _reap(self) -> None:
        """Also of processes that a rank has left behind: they become ours."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._children:
                self._note_end(pid, status)
            elif pid == self._watcher:
                self._watcher, self._heard = None, time.monotonic()  # one that failed is started again
                self._is_over = status == 0

    def _note_end(self, pid: int, status: int) -> None:
        child = self._children.pop(pid)
        _signal_session(pid, signal.SIGKILL)  # data loader workers that a killed rank left behind
        if child.stdout is not None:
            self._drain(child)
        if child.stdin is not None:
            os.close(child.stdin)
        code = os.waitstatus_to_exitcode(status)
        no_memory = code == -signal.SIGKILL and _oom_kills() > child.ooms
        self._say_ended(child.attempt, child.rank, code, no_memory=no_memory)
        if not self._children:
            self._end_strays()

    def _drain(self, child: _Child) -> None:
        os.set_blocking(child.stdout or 0, False)
        with contextlib.suppress(BlockingIOError):
            while child.stdout is not None:
                self._relay(child)()
        if child.stdout is not None:  # a process that it has left holds the other end
            self._selector.unregister(child.stdout)
            os.close(child.stdout)

    def _end_strays(self) -> None:
        """Kill what ranks have left in sessions of its own: with its parents gone it is our child now."""
        zygote = None if self._zygote is None else self._zygote.pid
        with contextlib.suppress(OSError):
            for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
                if pid != zygote:
                    os.kill(pid, signal.SIGKILL)

    def _say_ended(self, attempt: int, rank: int | None, code: int, *, no_memory: bool) -> None:
        how = {"attempt": attempt, "rank": rank, "code": code, "out_of_memory": no_memory}
        self._say({"is": "ended", **how, "time": time.time()})

    def _signal(self, attempt: int, number: signal.Signals) -> None:
        if number is signal.SIGKILL:
            for order in [order for order in self._waiting if order["attempt"] == attempt]:
                if order["processes"][0]["rank"] is not None:
                    self._waiting.remove(order)
                    for rank in order["processes"]:
                        self._say_ended(attempt, rank["rank"], -number, no_memory=False)
        for pid, child in self._children.items():
            if child.attempt == attempt and child.rank is not None:
                _signal_session(pid, number)


class _Zygote:
    """The agent's side of the zygote."""

    def __init__(self) -> None:
        self.socket, other = socket.socketpair()
        room = {ROOM_VARIABLE: "-" * ROOM_BYTES}
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "toolkit.agent.zygote", str(other.fileno()), "-" * TITLE_BYTES],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **room},
            )
        self.pid = self._process.pid
        self._lines = self.socket.makefile("rw")
        self.can_fork, self.is_importing, self.was_ready, self.has_ended = False, True, False, False

    def hear(self) -> bool:
        """Take its first word; False when it has ended."""
        line, self.is_importing = self._lines.readline(), False
        if not line:
            self.can_fork, self.has_ended = False, True
            log.warning("the zygote has ended: ranks start as fresh interpreters")
            return False
        ready = json.loads(line)["ready"]
        self.was_ready = True
        self.can_fork = ready["unclean"] is None
        if self.can_fork:
            log.info("ranks are forked from a process that has imported torch in %.1f s", ready["import_s"])
        else:
            log.warning("ranks start as fresh interpreters: %s", ready["unclean"])
        return True

    def fork(self, order: Order) -> int | None:
        """Return the pid of a new rank, our child; None where the zygote has died. Raises OSError for bad files."""
        line = ""
        with contextlib.suppress(OSError):
            self._lines.write(json.dumps(order) + "\n")
            self._lines.flush()
            line = self._lines.readline()
        if not line:
            self.can_fork = False
            return None
        answer = json.loads(line)
        if "error" in answer:
            raise OSError(answer["error"])
        return int(answer["pid"])

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


def _make_pipes(child: _Child, files: list[str]) -> list[int]:
    """Give ``child`` our ends of pipes for its standard input and output, and ``files`` the others as paths, by which
    also a fork of the zygote can open them. Returns these, to be closed once it has."""
    reading, child.stdin = os.pipe()
    child.stdout, writing = os.pipe()
    files[:2] = [f"/proc/{os.getpid()}/fd/{reading}", f"/proc/{os.getpid()}/fd/{writing}"]
    return [reading, writing]


def _signal_session(leader: int, number: signal.Signals) -> None:
    """Until a fork has its session it has no group of its own."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader, number)
    except PermissionError:
        pass


def _oom_kills() -> int:
    """How many processes of our control group the kernel has killed for want of memory; 0 where nothing tells."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        group = next(
            line[3:].strip() for line in Path("/proc/self/cgroup").read_text().splitlines() if line[:3] == "0::"
        )
        for line in Path(f"/sys/fs/cgroup{group}/memory.events").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _connect(host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=30)
    connection.settimeout(None)
    for level, option, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_S * 1000),  # also bounds the keepalives, see tcp(7)
    ):
        connection.setsockopt(level, option, value)
    return connection


def main(arguments: Sequence[str]) -> None:
    """Connect, and serve."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # Slurm sends them to all; the supervisor decides what ends
    os.umask(0o077)
    secret, host, port = arguments[:3]
    name = arguments[3] if len(arguments) > 3 else os.environ.get("SLURMD_NODENAME", socket.gethostname())
    logs.setup(f"agent {name}")
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)  # ranks come from two forks below the zygote
    host = host or os.environ["SLURM_LAUNCH_NODE_IPADDR"]  # where srun runs, so does the supervisor
    connection = _connect(host, int(port))
    try:
        Agent(connection, Link(Path(secret).read_bytes(), "agent"), name).serve()
    except StrangerError as error:
        sys.exit(f"{host}:{port} is not the supervisor: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
