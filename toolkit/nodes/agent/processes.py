"""The processes of attempts on one node: ranks, and on the batch host the store.

A stop signal is not for every process of a rank. A rank may be more than one process: `bash train.sh`, `python train.py
| tee log`, `uv run`, a launcher. A signal for all of them would end what the one that saves still needs.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from toolkit.base import fsio, logs, procfs, staged, this_node
from toolkit.base.process_limits import limits
from toolkit.devices import kinds
from toolkit.nodes.agent import messages, state_memory
from toolkit.nodes.agent.die_with_parent import SIGNALS, ignore_signals
from toolkit.nodes.agent.helpers import parsed, start_child
from toolkit.nodes.agent.zygote import ROOM_BYTES, ROOM_VARIABLE, ForkOrder, opened

#: Ranks have made their first step by then, else the zygote learns from them later, see toolkit.nodes.agent.preimports.
LEARN_AFTER_S = 20.0
#: Room for what ``ps`` shows of a rank.
TITLE_BYTES = 1024
#: What served the processes that have saved, as a `tee`, ends with them, or this much later.
REST_S = 1.0
TOPOLOGY = Path("/sys/devices/system/cpu")

log = logs.get(__name__)


@dataclass
class _Child:
    attempt: int
    rank: int | None  #: None: the attempt's store
    ooms: int  #: out-of-memory kills that the node's control group had counted at its start
    gets_signals: bool  #: those that Slurm sends a job; else the agent passes them on
    asked: set[int] = field(default_factory=set)  #: the processes that SIGTERM has asked to end
    code: int | None = None  #: of its end; others of its session, which were asked, may still save
    no_memory: bool = False  #: it was ended for lack of memory
    end_by: float = math.inf  #: when to end what is left once all that were asked have ended
    stdin: int | None = None
    stdout: int | None = None

    def relay(self, selector: selectors.BaseSelector, send: Callable[[messages.Message], None]) -> None:
        """Send what the process has written; close its output at its end."""
        assert self.stdout is not None
        data = os.read(self.stdout, 1 << 16)
        if data:
            send(messages.StoreOutput(self.attempt, data.decode(errors="replace")))
        else:
            self.close_output(selector)

    def close_output(self, selector: selectors.BaseSelector) -> None:
        assert self.stdout is not None
        selector.unregister(self.stdout)
        os.close(self.stdout)
        self.stdout = None


class Processes:
    """Starts processes, as forks of a zygote or fresh programs, signals them and reports their ends."""

    def __init__(
        self, selector: selectors.BaseSelector, tell: Callable[[messages.Message], None], imports: Path | None
    ) -> None:
        """Take the file of what a zygote learns as ``imports``, see :mod:`toolkit.nodes.agent.preimports`."""
        self._selector, self._send = selector, tell
        self._imports = imports  #: None once its modules have spoiled a zygote
        self._children: dict[int, _Child] = {}  #: the living ones, by pid
        self._waiting: list[messages.StartOrder] = []  #: orders that wait for the zygote
        self._is_ending = False  #: Slurm has asked all to end
        self._zygote: ZygoteClient | None = None
        self._is_wanted = False  #: a zygote for ranks, as soon as nothing is held
        self.copies: dict[str, str] = {}  #: that processes are started with, see toolkit.base.staged
        self._held_until: float | None = None  #: nothing is started until then, see :meth:`defer_starts`
        self._memory = state_memory.NodeFiles()
        self._ranks_since = self._learn_at = float("inf")
        self.near_gpus: list[list[int]] = []  #: the CPUs near each GPU, once they are known

    def set_near_cpus(self, text: bytes) -> None:
        """Take what `toolkit.devices.on_node` has printed: the CPUs near each GPU, or nothing."""
        self.near_gpus = parsed(text or b"[]", list[list[int]]) or []

    def __contains__(self, pid: int) -> bool:
        return pid in self._children

    @property
    def live(self) -> bool:
        return bool(self._children)

    # ----------------------------------------------------------------------------------------------------- starting

    def warm(self) -> None:
        """Have a zygote ready, of the environment's copy if one is being made."""
        self._is_wanted = True
        if self._held_until is None:
            self._wanted_zygote()

    def _wanted_zygote(self) -> ZygoteClient:
        """Return the zygote; start one if none runs. One that died after it had been ready is replaced."""
        if self._zygote is None or (self._zygote.has_ended and self._zygote.was_ready):
            environ = staged.environment(self.copies, os.environ)
            # Where ranks gain nothing by a fork, the store alone is forked.
            forks, python = "ranks" if self._is_wanted else "store", self._program(sys.executable)
            self._zygote = zygote = ZygoteClient(self._imports, python, environ, forks=forks)
            self._selector.register(zygote.socket, selectors.EVENT_READ, lambda: self._receive_from_zygote(zygote))
        return self._zygote

    def _program(self, program: str) -> str:
        copy = staged.moved(Path(program), self.copies)
        return program if copy == Path(program) else str(copy)

    def defer_starts(self, wait_s: float) -> None:
        """Have nothing started until copies are there, or ``wait_s`` have passed."""
        self._held_until = time.monotonic() + wait_s

    def use_copies(self, copies: Mapping[str, str]) -> None:
        """Have what is started from now on use these copies. A zygote of another place has imported, and stays."""
        self.copies |= copies
        self._held_until = None
        if self._zygote and self._zygote.is_of_a_copy and self._program(sys.executable) == sys.executable:
            self._end_zygote()  # its copy has lost files
        if self._is_wanted:
            self._wanted_zygote()
        self._start_waiting()

    def check_timers(self) -> None:
        now, zygote = time.monotonic(), self._zygote
        self.report_ended()
        if self._held_until is not None and now >= self._held_until:
            self.use_copies({})
        if zygote and not zygote.has_ended:
            zygote.end_if_silent()
        # Have the zygote import what the ranks had to, once these have trained for a while.
        if self._imports and zygote and zygote.can_fork and self._children and now >= self._learn_at:
            self._learn_at = now + (now - self._ranks_since)  # a first step may take long to compile
            zygote.request_imports()

    def _receive_from_zygote(self, zygote: ZygoteClient) -> None:
        if zygote is not self._zygote:
            return  # it was ended after the selector had looked
        was_ready = zygote.was_ready
        if not zygote.receive():
            self._selector.unregister(zygote.socket)
            if zygote.is_of_a_copy and not was_ready:
                log.warning("a process of the copied environment cannot be started: starting one without copies")
                self.copies, self._zygote = {}, None
                self._wanted_zygote()
                return
        elif not was_ready:
            took = zygote.took
            self._send(messages.ZygoteReady(took["import_s"], took["waited_s"], zygote.is_of_a_copy, zygote.has_torch))
        # A module that a rank imported has spoiled the zygote: start another that learns nothing.
        if not zygote.can_fork and self._imports and zygote.has_learnt:
            log.warning("importing the ranks' modules has failed: starting a zygote without them")
            self._imports = None
            self._end_zygote()
            self._wanted_zygote()
            return
        self._start_waiting()

    def _end_zygote(self) -> None:
        if self._zygote is not None and not self._zygote.has_ended:
            self._selector.unregister(self._zygote.socket)
            self._zygote.end()
        self._zygote = None

    def _start_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for order in waiting:
            self.start(order)

    def start(self, order: messages.StartOrder) -> None:
        """Start the processes of an order, as soon as the zygote can fork them. Report each that cannot be started."""
        if self._held_until is not None or (order.module is not None and self._wanted_zygote().is_importing):
            self._waiting.append(order)
        else:
            self._start(order)

    def _start(self, order: messages.StartOrder) -> None:
        ranks = sum(process.rank is not None for process in order.processes)
        # The agent holds the memory files of the ranks' state, so that they outlive the ranks.
        memory = self._memory.hold(ranks) if ranks else ""
        if ranks:
            self._ranks_since = time.monotonic()
            self._learn_at = self._ranks_since + LEARN_AFTER_S
        sharing = order.tasks_per_gpu
        near_own = [near for near in self.near_gpus for _ in range(sharing)]
        sets = for_tasks(len(order.processes), order.cpus_per_task, near_own)
        for place, (process, own_cpus) in enumerate(zip(order.processes, sets, strict=True)):
            child = _Child(order.attempt, process.rank, this_node.oom_kills(), order.gets_signals)
            environ = {**os.environ, **order.environ, **process.environ}
            for name in order.unset:
                environ.pop(name, None)
            environ = staged.environment(self.copies, environ)
            if child.rank is not None:
                environ |= {state_memory.VARIABLE: memory, state_memory.PIXEL_FILE: self._memory.pixel_file}
            if sharing > 1:
                environ |= kinds.single_gpu_variables(environ, place // sharing)
            files = [os.devnull, process.log, process.log]
            theirs: list[int] = []
            try:
                if child.rank is None:
                    _make_pipes(child, files, theirs)
                fsio.make_dir(Path(process.log).parent, parents=1)
                wanted = ForkOrder(
                    module=[*(order.module or ())],
                    command=[*order.command],
                    environ=environ,
                    files=files,
                    cpus=own_cpus,
                    agent=os.getpid(),
                )
                pid = self._start_one(wanted)
            except OSError as error:
                for pipe in filter(None, (child.stdin, child.stdout)):
                    os.close(pipe)
                self._send(messages.ProcessNotStarted(child.attempt, child.rank, str(error)))
                continue
            finally:
                # The child has its ends of the pipes now; open here, they would hide its end.
                for file in theirs:
                    os.close(file)
            self._children[pid] = child
            if child.stdout is not None:
                relay = partial(child.relay, self._selector, self._send)
                self._selector.register(child.stdout, selectors.EVENT_READ, relay)

    def _start_one(self, order: ForkOrder) -> int:
        """Fork the zygote, or start a fresh program. Return the pid. Raises OSError."""
        if order["module"] and self._zygote is not None and self._zygote.can_fork:
            pid = self._zygote.fork(order)
            if pid is not None:
                return pid

        def prepare() -> None:
            if order["cpus"] is not None:
                os.sched_setaffinity(0, order["cpus"])
            for number in SIGNALS:
                signal.signal(number, signal.SIG_DFL)

        program, *arguments = order["command"]
        command = [self._program(program), *arguments]
        with opened(order["files"]) as (stdin, stdout, stderr):
            files = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
            return start_child(command, prepare, env=order["environ"], **files, start_new_session=True).pid

    # ----------------------------------------------------------------------------------------------------- the store

    def write_to_store(self, attempt: int, text: str) -> None:
        """Write ``text`` to the store's standard input; close it if ``text`` is empty."""
        for child in self._stores(attempt).values():
            if child.stdin is None:
                continue
            with contextlib.suppress(OSError):  # its end is reported a moment later
                os.write(child.stdin, text.encode())
            if not text:
                os.close(child.stdin)
                child.stdin = None

    def end_store(self, attempt: int) -> None:
        """Kill the store, also one that has not started."""
        self._waiting = [o for o in self._waiting if o.attempt != attempt or o.processes[0].rank is not None]
        for pid, child in self._stores(attempt).items():
            _kill(pid, child)

    def _stores(self, attempt: int) -> dict[int, _Child]:
        return {pid: child for pid, child in self._children.items() if child.attempt == attempt and child.rank is None}

    # ------------------------------------------------------------------------------------------------------- the end

    def pass_on(self, numbers: bytes) -> None:
        """Send the ranks the signals that Slurm has sent the agent. Skip ranks that get them from Slurm."""
        for number in [signal.Signals(number) for number in numbers if number in SIGNALS]:
            for pid, child in self._children.items():
                if child.rank is None or child.code is not None:
                    continue
                if number is signal.SIGTERM and child.gets_signals:
                    child.asked |= receivers(pid, number)
                elif not child.gets_signals:
                    log.info("rank %d gets %s, which Slurm has sent", child.rank, number.name)
                    _ask(pid, child, number)
            if number is signal.SIGTERM:
                self._is_ending = True
                self._send(messages.AgentSignalled())

    def signal(self, attempt: int, number: signal.Signals) -> None:
        """Send all ranks of an attempt a signal, see :class:`messages.SignalOrder`."""
        if number in messages.ENDING:
            for order in [order for order in self._waiting if order.attempt == attempt]:
                # An order that waits for the zygote has no processes: withdraw it, and report its ranks as killed.
                if order.processes[0].rank is not None:
                    self._waiting.remove(order)
                    for rank in order.processes:
                        self._send(messages.ProcessEnded(attempt, rank.rank, -number, False, time.time()))
        for pid, child in self._children.items():
            if child.attempt != attempt or child.rank is None:
                continue
            if number is signal.SIGKILL:
                _kill(pid, child)
            elif number is signal.SIGTERM:
                _ask(pid, child, number)
            else:
                _signal_session(pid, number)

    def end_attempt(self) -> None:
        """Kill all processes, and start none that waits. The zygote and the ranks' memory files stay.

        Where Slurm is ending the job, a shell around the supervisor dies first, and the supervisor with it. Ranks that
        were asked to end then have the time that Slurm leaves them: they may be saving.
        """
        self._waiting.clear()
        for pid, child in self._children.items():
            if not (self._is_ending and child.rank is not None and child.asked):
                _kill(pid, child)

    def end_all(self) -> None:
        self._is_ending = False
        self.end_attempt()
        if self._zygote is not None:
            self._zygote.end()

    def note_end(self, pid: int, status: int) -> None:
        """Take the wait status of a process. It is reported when those of its session that were asked to end have."""
        child = self._children[pid]
        child.code = os.waitstatus_to_exitcode(status)
        # SIGKILL and a new out-of-memory kill in the group: lack of memory is taken for the cause.
        child.no_memory = child.code == -signal.SIGKILL and this_node.oom_kills() > child.ooms
        if child.rank is not None and child.code == -signal.SIGTERM:  # perhaps sent to all by Slurm
            child.asked |= receivers(pid, signal.SIGTERM)
        self.report_ended()

    def report_ended(self) -> None:
        """Report the ranks of which all processes have ended that were asked to. What else they have left is killed."""
        for pid, child in list(self._children.items()):
            if child.code is None or any(stat and not stat.has_ended for stat in map(procfs.read, child.asked)):
                continue
            now = time.monotonic()
            child.end_by = min(child.end_by, now + (REST_S if child.asked - {pid} else 0.0))
            if now >= child.end_by or not _is_there(pid):
                self._report_end(pid, child)

    def _report_end(self, pid: int, child: _Child) -> None:
        del self._children[pid]
        assert child.code is not None
        _kill(pid, child)
        # Take the last that it has written; a process that it has left behind may hold the other end.
        if child.stdout is not None:
            os.set_blocking(child.stdout, False)
            with contextlib.suppress(BlockingIOError):
                while child.stdout is not None:
                    child.relay(self._selector, self._send)
            if child.stdout is not None:
                child.close_output(self._selector)
        if child.stdin is not None:
            os.close(child.stdin)
        ended = messages.ProcessEnded(child.attempt, child.rank, child.code, child.no_memory, time.time())
        self._send(ended)

    def end_strays(self, helpers: Collection[int]) -> bool:
        """Kill what ranks, once none lives, have left in other sessions. Return whether anything of it lives."""
        own = {*helpers, *([self._zygote.pid] if self._zygote else [])}
        strays = list[int]()
        with contextlib.suppress(OSError):
            children = map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
            strays = [pid for pid in children if pid not in own]
        for pid in [] if self._children else strays:
            with contextlib.suppress(PermissionError):  # it has become another user's, as by sudo
                os.kill(pid, signal.SIGKILL)
        return bool(strays)


def _make_pipes(child: _Child, files: list[str], theirs: list[int]) -> None:
    """Make pipes for a child's standard input and output. ``files`` gets paths that a fork of the zygote can open."""
    reading, child.stdin = os.pipe()
    theirs.append(reading)
    child.stdout, writing = os.pipe()
    theirs.append(writing)
    files[:2] = [f"/proc/{os.getpid()}/fd/{file}" for file in theirs]


def _ask(pid: int, child: _Child, number: signal.Signals) -> None:
    """Send a rank a signal. It gets only one SIGTERM: a second one ends some scripts at once."""
    if number is signal.SIGTERM and (child.asked or child.code is not None):
        return
    found = receivers(pid, number) or {pid}
    if number is signal.SIGTERM:
        child.asked = found
    for each in found:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, number)


def _kill(pid: int, child: _Child) -> None:
    """Kill the session of a process, and what else was asked to end with it."""
    if child.code is None or _is_there(pid):  # else the number may be another process's by now
        _signal_session(pid, signal.SIGKILL)
    for each in child.asked - {pid}:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)


def _is_there(leader: int) -> bool:
    """True if the group of a leader that has ended has a process."""
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _signal_session(leader: int, number: signal.Signals) -> None:
    """Signal the session, or only its leader. Until a fork has made its session it has no group of its own."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(leader, number)
    except PermissionError:
        pass


class ZygoteClient:
    """Starts a zygote, and has it fork ranks.

    ``can_fork``: it is clean. ``is_importing``: requests have to wait. ``was_ready``: it has been of use.
    ``has_torch``: torch could be imported. ``took``: how long its import has taken, and has waited for files.
    """

    def __init__(
        self,
        imports: Path | None,
        python: str = sys.executable,
        environ: Mapping[str, str] = os.environ,
        *,
        forks: str = "ranks",
    ) -> None:
        """Start a zygote that forks ranks, or only stores. ``python`` may be that of a copied environment."""
        self.is_of_a_copy = python != sys.executable
        self.took = {"import_s": 0.0, "waited_s": 0.0}
        self.socket, other = socket.socketpair()
        # Both placeholders make room for what ``ps`` and /proc show of a rank, see zygote.show().
        room = {ROOM_VARIABLE: "-" * ROOM_BYTES}
        with other:
            arguments = [str(other.fileno()), forks, str(imports or ""), "-" * TITLE_BYTES]
            self._process = subprocess.Popen(
                [python, "-P", "-m", "toolkit.nodes.agent.zygote", *arguments],
                pass_fds=[other.fileno()],
                stdin=subprocess.DEVNULL,
                preexec_fn=ignore_signals,  # safe: the agent has one thread
                env={**environ, **room},
            )
        self.pid = self._process.pid
        self._lines = self.socket.makefile("rw")
        self.socket.settimeout(limits().fork_s)
        self.can_fork, self.is_importing, self.was_ready, self.has_ended = False, True, False, False
        self.has_torch = False
        self.has_learnt = imports is not None  #: it may have imported what the ranks did
        self._awaited_since = time.monotonic()  #: the last import
        self._stopped_since: float | None = None

    def receive(self) -> bool:
        """Take the message that the zygote has imported; return False when it has ended."""
        line, self.is_importing = "", False
        with contextlib.suppress(OSError):  # it was given up
            line = self._lines.readline()
        if not line.endswith("\n"):  # it may have died in the middle of one
            self.can_fork, self.has_ended = False, True
            log.warning("the zygote has ended: ranks start as fresh interpreters")
            return False
        ready = json.loads(line)["ready"]
        is_first, self.was_ready = not self.was_ready, True
        self.has_torch = ready["has_torch"]
        if is_first:
            self.took = {name: ready[name] for name in self.took}
        self.can_fork = ready["unclean"] is None
        # Before the first answer the zygote counts as one that has learnt: a learnt module may be what ended it.
        self.has_learnt = ready["learnt"] > 0 or (self.has_learnt and not is_first)
        if not self.can_fork:
            log.warning("ranks start as fresh interpreters: %s", ready["unclean"])
        elif is_first:
            log.info("ranks are forked from a process that has imported torch in %.1f s", ready["import_s"])
        elif ready["learnt"]:
            log.info("imported %d modules more that ranks import, in %.1f s", ready["learnt"], ready["import_s"])
        return True

    def request_imports(self) -> None:
        with contextlib.suppress(OSError):  # its end is noticed by receive()
            self._lines.write("{}\n")
            self._lines.flush()
            self.is_importing, self._awaited_since = True, time.monotonic()

    def end_if_silent(self) -> None:
        """Kill a zygote that imports for too long, or is stopped. Its end is noticed by :meth:`receive`."""
        now, stat = time.monotonic(), procfs.read(self.pid)
        is_stopped = stat is not None and stat.state in "Tt"
        self._stopped_since = (self._stopped_since or now) if is_stopped else None
        is_late = self.is_importing and now - self._awaited_since > limits().zygote_imports_s
        if is_late or (self._stopped_since is not None and now - self._stopped_since > limits().zygote_answers_s):
            log.warning("the zygote is %s: it is killed", "stopped" if is_stopped else "still importing")
            self.end()

    def fork(self, order: ForkOrder) -> int | None:
        """Return the pid of a new rank, our child; None if the zygote has died. Raises OSError for bad files."""
        line = ""
        try:
            self._lines.write(json.dumps(order) + "\n")
            self._lines.flush()
            line = self._lines.readline()
        except TimeoutError:
            log.warning("the zygote has not forked a rank within %.0f s: it is killed", limits().fork_s)
            self.end()
        except OSError:  # it has died
            pass
        if not line.endswith("\n"):
            self.can_fork = False
            return None
        answer = json.loads(line)
        if "error" in answer:
            raise OSError(answer["error"])
        return int(answer["pid"])

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


def for_tasks(
    tasks: int, cpus_per_task: int | None, near_gpus: Sequence[Collection[int]] = (), topology: Path = TOPOLOGY
) -> list[list[int] | None]:
    """Return the CPUs of each of ``tasks``; None for all CPUs of this process, also where these are too few.

    ``near_gpus`` has the CPUs of each GPU's NUMA node. Each task takes those of its GPU, then others of the same
    package, then any that are left. Without ``near_gpus`` the tasks take the CPUs one after the other.
    """
    ours = os.sched_getaffinity(0)
    if cpus_per_task is None or tasks * cpus_per_task > len(ours):
        return [None] * tasks
    packages = {cpu: _package(cpu, topology) for cpu in ours}
    # For each GPU three choices, from near to far: its NUMA node, its package, all.
    choices = []
    for near in near_gpus or [ours]:
        package = _package(min(near), topology)
        choices.append((near, [cpu for cpu in ours if packages[cpu] == package], ours))
    left, sets = by_core(ours, topology), [list[int]() for _ in range(tasks)]
    for distance in range(3):  # every task takes near CPUs before any takes farther ones
        for task, own in enumerate(sets):
            choice = choices[task % len(choices)][distance]
            own += [cpu for cpu in left if cpu in choice][: cpus_per_task - len(own)]
            left = [cpu for cpu in left if cpu not in own]
    return [sorted(own) for own in sets]


def by_core(cpus: Iterable[int], topology: Path = TOPOLOGY) -> list[int]:
    """Order ``cpus`` by package, then core: Linux, Documentation/admin-guide/cputopology.rst."""

    def place(cpu: int) -> tuple[int, int, int]:
        # The lowest number of a core's CPUs tells the core: ``core_id`` is unique only within a package.
        return _package(cpu, topology), _first(cpu, "thread_siblings_list", topology, cpu), cpu

    return sorted(cpus, key=place)


def _package(cpu: int, topology: Path) -> int:
    return _first(cpu, "physical_package_id", topology, 0)


def _first(cpu: int, name: str, topology: Path, unknown: int) -> int:
    try:
        return int((topology / f"cpu{cpu}/topology/{name}").read_text().replace("-", ",").split(",")[0])
    except (OSError, ValueError):
        return unknown


#: A shell runs its trap only when the program has ended that it waits for: that one is to get the signal as well.
SHELLS = {"sh", "bash", "dash", "ash", "busybox", "zsh", "ksh", "fish"}


def receivers(leader: int, number: signal.Signals) -> set[int]:
    """Return the processes of a rank that are to get a signal: of the session of ``leader``, and below these.

    These are the ones that handle it, but not below another program that does: data workers, and what a launcher has
    started, are that program's. SIGTERM also ends the shells and wrappers above these. What would die of the signal
    while another process handles it does not get it, as a ``tee`` that is written to. If none handles it all get it.
    """
    stats = procfs.read_all()
    children = defaultdict[int, list[int]](list)
    for pid, stat in stats.items():
        parent = stats.get(stat.parent)
        # One whose parent has ended is the agent's child.
        is_orphan = stat.session == leader and (parent is None or parent.session != leader)
        if pid != leader:
            children[leader if is_orphan else stat.parent].append(pid)

    def below(pid: int) -> tuple[set[int], bool]:
        """Return the processes at ``pid`` and below that are to get it, and whether one of them handles it."""
        handles = pid in stats and stats[pid].catches_signal(number)
        if handles and not _is_shell(pid):
            return {pid}, True
        branches = [below(child) for child in children[pid]]
        branches = [branch for branch in branches if branch[1]] or branches
        return {pid}.union(*(pids for pids, _ in branches)), handles or any(handled for _, handled in branches)

    found, is_handled = below(leader)
    living = {pid for pid in found if pid in stats and not stats[pid].has_ended}
    if is_handled and number is not signal.SIGTERM:
        return {pid for pid in living if stats[pid].catches_signal(number)}
    return living


def _is_shell(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/exe").readlink().name in SHELLS
    except OSError:  # it has ended
        return False
