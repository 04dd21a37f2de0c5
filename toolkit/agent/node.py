"""The agent of one node: ``python -m toolkit.agent.node SECRET_FILE LOGS HOST PORT [NAME]``.

It lives as long as the job. It starts the ranks of each attempt and the attempt's store when the supervisor says so, by
forks of a zygote or as fresh programs, sends them signals, and says at once how each has ended. All ranks of the node
report to it, also those that srun has started; see :mod:`toolkit.agent.progress`. It has one thread and needs no torch.

When the supervisor has died it connects again, to the one that is started in its place, and tells it once more what it
has told of the attempt: the ranks go on. It ends them where no supervisor comes. When it dies they die with it.

What it is told (``do``) and what it tells (``is``):

* ``warm``: have a zygote ready.
* ``check``: run the checks of the node. Then ``checked``, with the line that they have printed.
* ``connections``: say to which addresses connections are ``unanswered``.
* ``start``: processes of an attempt, the store or ranks. Then ``ended`` of each, or ``not_started``.
* ``signal``: to all ranks of an attempt. ``tell``: text for the store's standard input, nothing for its end.
  ``end_store``: kill it. What the store prints is ``said``.
* ``watch``: the command that looks after the batch host when the supervisor is silent or gone, and the node's turn.
* ``stacks``: what the ranks of the node do, by the stacks that they write. Then ``answer``.
* ``hear_ranks``: pass on what they have reported. Then ``answer``.
* ``leave``: end.

It says that it is ``alive`` every second, with a digest of the ranks' progress. It says at once which ranks are
``reporting`` for the first time, and passes every ``report`` of rank 0 on. It says once of each thing that makes its
node ``sick``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path

from toolkit import fsio, logs
from toolkit.agent import connections, cpus, learnt, progress, sickness, state_memory
from toolkit.agent.link import HEARTBEAT_S, SILENT_S, Link, Message, StrangerError
from toolkit.agent.progress import NodeProgress, Standing
from toolkit.agent.reports import Inbox, address, token_of
from toolkit.agent.tether import SIGNALS, die_with
from toolkit.agent.zygote import ROOM_BYTES, ROOM_VARIABLE, Order, opened

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
CONNECT_S = 30.0
#: A supervisor that has not confirmed what it was sent for so long is gone; a network may be away for half a minute.
GONE_S = 120
#: A supervisor that is started in the place of one that has died speaks within this time.
TAKE_OVER_S = 10.0
#: An agent of this job that the supervisor has given up needs a moment to notice it, and leaves its name free then.
INBOX_PATIENCE_S = 10.0
#: Agents begin one after the other to look after the batch host: where the first one does, the others need not.
TURN_S = 10.0
#: Ranks have made their first step by then, or the zygote is asked to learn from them later, see toolkit.agent.learnt.
LEARN_AFTER_S = 20.0
#: What looks after the node's health, see toolkit.agent.sickness. It comes late enough not to delay the first ranks.
HEALTH_COMMAND = (sys.executable, "-I", "-S", sickness.__file__)
HEALTH_AFTER_S = 10.0
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
    """Serves one supervisor, and each that takes over from it."""

    def __init__(
        self, connect: Callable[[], socket.socket], secret: bytes, name: str, inbox: Inbox, imports: Path | None
    ) -> None:
        """``connect`` connects to the supervisor. ``imports``: see :mod:`toolkit.agent.learnt`."""
        self._connect, self._secret, self._name = connect, secret, name
        self._attempt: int | None = None  #: the last one of which something was started here
        self._ranks = 0  #: of that attempt that were to start here
        self._told: list[Message] = []  #: of that attempt, and of the node
        self._told_by_main: dict[str, Message] = {}  #: the last that rank 0 said of the run, and of its result
        self._give_up_at = math.inf  #: when the supervisor must have spoken
        self._inbox, self._progress = inbox, NodeProgress()
        self._children: dict[int, _Child] = {}  #: by pid, of those that live
        self._waiting: list[Message] = []  #: orders that wait for the zygote
        self._zygote: _Zygote | None = None
        self._imports = imports  #: the file of what is to be learnt; None once that has spoiled a zygote
        self._ranks_since = self._learn_at = math.inf
        self._heard = time.monotonic()  #: when the supervisor last said something, or was lost
        self._memory = state_memory.NodeFiles()
        self._is_alone = False  #: the supervisor is lost for good
        self._watch_order: Message | None = None
        self._watcher: int | None = None  #: the pid of what looks after the batch host
        self._helpers: set[int] = set()  #: the pids of what looks at the node for us
        self._selector = selectors.DefaultSelector()
        self._is_over = False

    def serve(self) -> None:
        """Until the supervisor says so, or is gone. Every rank has been ended then."""
        waker, woken = socket.socketpair()
        for end in (waker, woken):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(woken, selectors.EVENT_READ, lambda: woken.recv(4096))
        self._selector.register(self._inbox, selectors.EVENT_READ, self._hear_ranks)
        self._open_connection(again=False)
        next_heartbeat, health_at = 0.0, time.monotonic() + HEALTH_AFTER_S
        try:
            while not self._is_over:
                for key, _ in self._selector.select(HEARTBEAT_S):
                    key.data()
                self._reap()
                if time.monotonic() >= self._give_up_at:
                    self._be_alone()
                self._watch_the_batch_host()
                if time.monotonic() >= next_heartbeat:
                    next_heartbeat = time.monotonic() + HEARTBEAT_S
                    digest = self._progress.digest()
                    self._say({"is": "alive", "progress": None if digest is None else asdict(digest)})
                    self._learn()
                if time.monotonic() >= health_at:
                    health_at = math.inf
                    self._start_helper(HEALTH_COMMAND, self._hear_of_health)
        finally:
            self._end_children()

    def _end_children(self) -> None:
        for pid in self._children:
            _signal_session(pid, signal.SIGKILL)
        if self._zygote is not None:
            self._zygote.end()

    def _open_connection(self, *, again: bool) -> None:
        """Connect, and tell what a supervisor must know that was not there before. Raises OSError."""
        self._connection, self._link = self._connect(), Link(self._secret, "agent")
        self._selector.register(self._connection, selectors.EVENT_READ, self._hear)
        self._connection.sendall(self._link.greeting)
        of_attempt = {"attempt": self._attempt, "ranks": self._ranks, "lives": bool(self._children)}
        self._say({"is": "here", "host": self._name, "again": again, **of_attempt})
        for message in [*self._told, *self._told_by_main.values()]:
            self._say(message)

    def _say(self, message: Message) -> None:
        if not self._is_alone:
            try:
                self._connection.sendall(self._link.send(message))
            except OSError:
                self._lose_supervisor()

    def _tell(self, message: Message) -> None:
        """Say ``message``, and say it again to a supervisor that takes over."""
        self._told.append(message)
        self._say(message)

    def _hear(self) -> None:
        try:
            data = self._connection.recv(1 << 16)
            orders, answer = self._link.receive(data)
            if answer:
                self._connection.sendall(answer)
        except OSError:
            data = b""
        if not data:
            self._lose_supervisor()
            return
        if self._link.is_genuine:
            self._heard, self._give_up_at = time.monotonic(), math.inf
        for order in orders:
            self._obey(order)

    def _obey(self, order: Message) -> None:
        match order["do"]:
            case "warm":
                self._warm()
            case "check":
                self._check(order)
            case "connections":
                self._answer(order, addresses=sorted(connections.unanswered()))
            case "start" if order["module"] is not None and self._warm().is_importing:
                self._waiting.append(order)
            case "start":
                self._start(order)
            case "signal":
                self._signal(order["attempt"], signal.Signals(order["number"]))
            case "tell":
                self._write_to_store(order["attempt"], order["text"])
            case "end_store":
                self._end_store(order["attempt"])
            case "stacks":
                self._digest_stacks(order)
            case "hear_ranks":
                self._hear_ranks()
                self._answer(order)
            case "watch":
                self._watch_order = order
            case "leave":
                self._is_over = True

    # ----------------------------------------------------------------------------------------------- the supervisor

    def _lose_supervisor(self) -> None:
        """Connect again. Where its guard is gone, too, nobody listens any more."""
        if self._is_alone:
            return
        self._selector.unregister(self._connection)
        self._connection.close()
        if not self._link.is_genuine:  # it was the one that was to take over
            self._be_alone()
            return
        log.warning("the supervisor is gone: looking for another one")
        try:
            self._open_connection(again=True)
            self._heard = time.monotonic()
            self._give_up_at = self._heard + TAKE_OVER_S
        except OSError as error:
            log.warning("there is none: %s", error)
            self._be_alone()

    def _be_alone(self) -> None:
        """End the ranks. Without an order to watch there is nothing else to do here."""
        if not self._is_alone:
            log.warning("no supervisor is left: ending the ranks")
            self._is_alone, self._give_up_at = True, math.inf
            if self._connection.fileno() >= 0:
                self._selector.unregister(self._connection)
                self._connection.close()
            self._end_children()
            self._selector.unregister(self._inbox)
            self._inbox.close()  # ranks that srun has started end by themselves
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

    # --------------------------------------------------------------------------------------------------- the helpers

    def _start_helper(self, command: Sequence[str], hear: Callable[[bytes], bool], given: bytes = b"") -> None:
        """Start a process of our own that reads ``given`` and ends with us. What it prints goes to ``hear``.

        ``hear`` gets nothing at its end, and returns whether it wants more. A process of its own may wait for ever for
        a disk, a file server or a driver; the agent must not. Raises OSError.
        """
        agent = os.getpid()
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=lambda: die_with(agent, signal.SIGKILL),
        )
        process.returncode = 0  # we reap it ourselves
        self._helpers.add(process.pid)
        assert process.stdin is not None
        assert process.stdout is not None
        output = process.stdout
        with contextlib.suppress(OSError), process.stdin as asked:
            asked.write(given)

        def read() -> None:
            data = os.read(output.fileno(), 1 << 16)
            if not hear(data) or not data:
                self._selector.unregister(output)
                output.close()

        self._selector.register(output, selectors.EVENT_READ, read)

    def _hear_of_health(self, data: bytes) -> bool:
        for line in data.decode(errors="replace").splitlines():
            self._tell({"is": "sick", "what": line})
        return True

    def _answer(self, order: Message, **words: object) -> None:
        self._say({"is": "answer", "request": order["request"], **words})

    def _check(self, order: Message) -> None:
        began, text = time.time(), bytearray()

        def hear(data: bytes) -> bool:
            """Take its line, and not its end, for which a thread in the kernel may have to be waited."""
            text.extend(data)
            if data and not text.endswith(b"\n"):
                return True
            answer = text.decode(errors="replace")
            self._answer(order, text=answer, began=began, ended=time.time())
            return False

        try:
            self._start_helper(order["command"], hear)
        except OSError as error:
            self._answer(order, text=f"they cannot be started: {error}", began=began, ended=began)

    # ---------------------------------------------------------------------------------------------------- starting

    def _warm(self) -> _Zygote:
        """Return the zygote. One that died after it had been of use is replaced."""
        if self._zygote is None or (self._zygote.has_ended and self._zygote.was_ready):
            self._zygote = _Zygote(self._imports)
            self._selector.register(self._zygote.socket, selectors.EVENT_READ, self._hear_zygote)
        return self._zygote

    def _learn(self) -> None:
        """Have the zygote import what the ranks had to, once these have trained for a while."""
        zygote = self._zygote
        if self._imports and zygote and zygote.can_fork and self._children and time.monotonic() >= self._learn_at:
            now = time.monotonic()
            self._learn_at = now + (now - self._ranks_since)  # a first step may take long to compile
            zygote.learn()

    def _hear_zygote(self) -> None:
        zygote = self._zygote
        assert zygote is not None
        if not zygote.hear():
            self._selector.unregister(zygote.socket)
        if not zygote.can_fork and self._imports and zygote.has_learnt:
            log.warning("importing what the ranks import has failed: another zygote does without")
            if not zygote.has_ended:
                self._selector.unregister(zygote.socket)
                zygote.end()
            self._imports = self._zygote = None
            self._warm()
            return
        waiting, self._waiting = self._waiting, []
        for order in waiting:
            self._start(order)

    def _start(self, order: Message) -> None:
        ranks = sum(process["rank"] is not None for process in order["processes"])
        if order["attempt"] != self._attempt:
            self._attempt, self._ranks = order["attempt"], 0
            self._told = [message for message in self._told if "attempt" not in message]
            self._told_by_main.clear()
        self._ranks += ranks
        memory = self._memory.hold(ranks) if ranks else ""
        if ranks:
            self._ranks_since = time.monotonic()
            self._learn_at = self._ranks_since + LEARN_AFTER_S
        sets = cpus.for_tasks(len(order["processes"]), order["cpus_per_task"])
        for process, own_cpus in zip(order["processes"], sets, strict=True):
            child = _Child(order["attempt"], process["rank"], _oom_kills())
            environ = {**os.environ, **order["environ"], **process["environ"]}
            for name in order["unset"]:
                environ.pop(name, None)
            if child.rank is not None:
                environ[state_memory.VARIABLE] = memory
            files = [os.devnull, process["log"], process["log"]]
            theirs: list[int] = []
            if child.rank is None:
                theirs = _make_pipes(child, files)
            try:
                fsio.make_dir(Path(process["log"]).parent, parents=1)
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
                self._tell({"is": "not_started", "attempt": child.attempt, "rank": child.rank, "why": str(error)})
                continue
            finally:
                for file in theirs:
                    os.close(file)
            self._children[pid] = child
            if child.stdout is not None:
                self._selector.register(child.stdout, selectors.EVENT_READ, self._relay(child))

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
                self._tell({"is": "said", "attempt": child.attempt, "text": data.decode(errors="replace")})
            else:
                self._selector.unregister(child.stdout)
                os.close(child.stdout)
                child.stdout = None

        return read

    def _write_to_store(self, attempt: int, text: str) -> None:
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

    # ----------------------------------------------------------------------------------------------------- the ranks

    def _hear_ranks(self) -> None:
        """Take what ranks have reported, and pass on what cannot wait for the next digest."""
        first: dict[int, list[int]] = {}
        for text in [] if self._is_alone else self._inbox.take():
            report = progress.parse(text)
            if report is None:
                log.warning("a report that is none was ignored: %.80r", text)
                continue
            if self._progress.hear(report):
                first.setdefault(report.attempt, []).append(report.rank)
            if report.rank == 0:
                message: Message = {"is": "report", "text": text.decode()}
                self._told_by_main |= {
                    kind: message for kind in ("fields", "result") if getattr(report, kind) is not None
                }
                self._say(message)
        for attempt, ranks in first.items():
            self._tell({"is": "reporting", "attempt": attempt, "ranks": ranks})

    def _digest_stacks(self, order: Message) -> None:
        """Have the stacks of ranks read by a process of its own: a file server may not answer."""
        given = [Standing(*standing) for standing in order["standings"]]
        standings = [self._progress.standing(order["attempt"], rank.rank) or rank for rank in given]
        asked, text = {**order, "standings": [astuple(rank) for rank in standings]}, bytearray()

        def hear(data: bytes) -> bool:
            text.extend(data)
            if not data:
                with contextlib.suppress(ValueError):  # it has failed: see our log
                    self._answer(order, groups=json.loads(text))
            return True

        self._start_helper([sys.executable, "-P", "-m", "toolkit.agent.stack_digest"], hear, json.dumps(asked).encode())

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
            self._helpers.discard(pid)
            if pid in self._children:
                self._note_end(pid, status)
            elif pid == self._watcher:
                self._watcher, self._heard = None, time.monotonic()  # one that failed is started again
                self._is_over = status == 0

    def _note_end(self, pid: int, status: int) -> None:
        child = self._children.pop(pid)
        self._hear_ranks()  # what it has told is said before that it has ended
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
        own = {self._zygote and self._zygote.pid, *self._helpers}
        with contextlib.suppress(OSError):
            for pid in map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()):
                if pid not in own:
                    os.kill(pid, signal.SIGKILL)

    def _say_ended(self, attempt: int, rank: int | None, code: int, *, no_memory: bool) -> None:
        how = {"attempt": attempt, "rank": rank, "code": code, "out_of_memory": no_memory}
        self._tell({"is": "ended", **how, "time": time.time()})

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

    def __init__(self, imports: Path | None) -> None:
        self.socket, other = socket.socketpair()
        room = {ROOM_VARIABLE: "-" * ROOM_BYTES}
        with other:
            arguments = [str(other.fileno()), str(imports or ""), "-" * TITLE_BYTES]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "toolkit.agent.zygote", *arguments],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **room},
            )
        self.pid = self._process.pid
        self._lines = self.socket.makefile("rw")
        self.can_fork, self.is_importing, self.was_ready, self.has_ended = False, True, False, False
        self.has_learnt = imports is not None  #: it may have imported what the ranks did

    def hear(self) -> bool:
        """Take its word that it has imported; False when it has ended."""
        line, self.is_importing = self._lines.readline(), False
        if not line:
            self.can_fork, self.has_ended = False, True
            log.warning("the zygote has ended: ranks start as fresh interpreters")
            return False
        ready = json.loads(line)["ready"]
        is_first, self.was_ready = not self.was_ready, True
        self.can_fork = ready["unclean"] is None
        self.has_learnt = ready["learnt"] > 0 or (self.has_learnt and not is_first)
        if not self.can_fork:
            log.warning("ranks start as fresh interpreters: %s", ready["unclean"])
        elif is_first:
            log.info("ranks are forked from a process that has imported torch in %.1f s", ready["import_s"])
        elif ready["learnt"]:
            log.info("imported %d modules more that ranks import, in %.1f s", ready["learnt"], ready["import_s"])
        return True

    def learn(self) -> None:
        """Have it import what ranks have imported since they were forked."""
        with contextlib.suppress(OSError):  # its end is heard
            self._lines.write("{}\n")
            self._lines.flush()
            self.is_importing = True

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
    connection = socket.create_connection((host, port), timeout=CONNECT_S)
    connection.settimeout(None)
    connections.notice_death(connection, GONE_S)
    return connection


def _redirect_output(path: Path) -> None:
    """Write the log, and what the zygote says, to ``path``; nowhere on a node where that cannot be written to.

    Not by srun's --output: Slurm starts nothing on such a node, and the reason would not be known.
    """
    try:
        file = fsio.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        print(f"{path}: {error.strerror}", file=sys.stderr)
        file = os.open(os.devnull, os.O_WRONLY)
    for output in (1, 2):
        os.dup2(file, output)
    os.close(file)


def main(arguments: Sequence[str]) -> None:
    """Connect, and serve."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # Slurm sends them to all; the supervisor decides what ends
    os.umask(0o077)
    secret_file, logs_dir, host, port = arguments[:4]
    name = arguments[4] if len(arguments) > 4 else os.environ.get("SLURMD_NODENAME", socket.gethostname())
    try:
        secret = Path(secret_file).read_bytes()
    except OSError as error:
        sys.exit(f"{secret_file}: {error.strerror}: have the file system of the run folder mounted anew on {name}")
    _redirect_output(Path(logs_dir) / f"agent-{name}.log")
    logs.setup(f"agent {name}")
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)  # ranks come from two forks below the zygote
    host = host or os.environ["SLURM_LAUNCH_NODE_IPADDR"]  # where srun runs, so does the supervisor
    try:
        inbox, imports = Inbox(address(token_of(secret)), INBOX_PATIENCE_S), Path(secret_file).parent / learnt.NAME
        Agent(partial(_connect, host, int(port)), secret, name, inbox, imports).serve()
    except StrangerError as error:
        sys.exit(f"{host}:{port} is not the supervisor: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
