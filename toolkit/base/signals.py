"""Notes the signals that ask a job to stop soon, and keeps them from the processes that a rank starts.

Slurm, a site or a person sends them. A handler runs between any two instructions of the main thread. If it saves, logs
or takes a lock, it hangs or corrupts what it interrupted. So this one only notes the signal and passes the request on
to something reentrant.

A rank's children have the handlers that they would have without this one, and their parent may end them by any signal.
Elsewhere Slurm sends the signals to every process of a job (``ProctrackType=proctrack/linuxproc``), or a launcher sends
them to a rank's group. The death of a data worker would end the step that the ranks are to save. There a rank's
children have these signals blocked. Both fork and exec inherit that, and a library that installs a handler in its
worker, as torch's DataLoader does, does not change it.
"""

from __future__ import annotations

import _posixsubprocess
import functools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

#: Each may come more than once, to some ranks first, and in any order.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
#: With what a terminal sends. Under a supervisor that asks for a stop, too; elsewhere it ends the program.
END_SIGNALS = (*STOP_SIGNALS, signal.SIGINT, signal.SIGHUP)
#: A variable of ranks with a supervisor: 1 where Slurm sends its signals also to their children.
ALL_VARIABLE = "TOOLKIT_SIGNALS_ALL"


class StopSignals:
    """The handler of this process's stop signals. It keeps signals that come before there is a listener."""

    def __init__(self) -> None:
        self.first: float | None = None  #: when the first signal came, in seconds since the epoch
        self.earlier: dict[int, Callable[[int, FrameType | None], Any]] = {}  #: handlers that this one has replaced
        self._seen: list[int] = []
        self._listener: Callable[[], None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.first is None:
            self.first = time.time()
        self._seen.append(number)
        if self._listener is not None:
            self._listener()

    def listen(self, listener: Callable[[], None] | None) -> None:
        """Call ``listener`` for each signal, and at once if one was noted. It must be safe in a signal handler."""
        self._listener = listener
        if listener is not None and self.first is not None:
            listener()

    def replace(self, handler: Any, number: int) -> None:
        """Take the role of ``handler`` for a signal. What another object of this class has noted is kept."""
        if isinstance(handler, StopSignals):
            self.first, self._seen, self.earlier = handler.first, handler._seen, {**handler.earlier, **self.earlier}
        elif callable(handler) and handler is not signal.default_int_handler:
            self.earlier[number] = handler

    def call_previous(self) -> None:
        """Call the handlers that this one has replaced, for the signals that came. They may end the process."""
        for number in dict.fromkeys(self._seen):
            if number in self.earlier:
                self.earlier[number](number, None)


def install() -> StopSignals:
    """Return this process's handler, and install it if there is none. The signal table itself stores it."""
    current = signal.getsignal(signal.SIGTERM)
    if isinstance(current, StopSignals):
        return current
    handler = StopSignals()
    if threading.current_thread() is threading.main_thread():  # handlers can be set only there
        for number in _taken():
            handler.replace(signal.getsignal(number), number)
            signal.signal(number, handler)
        if os.environ.get("TOOLKIT_SUPERVISED") == "1" and os.environ.get(ALL_VARIABLE) != "1":
            _restore_in_forks()
        else:
            _keep_from_children()
    return handler


def ignore() -> None:
    """Ignore the stop signals from now on.

    A process that has ended well must not be killed on its way out. While the interpreter shuts down it restores the
    default action, which is to die, for every handler of ours. A signal that is ignored stays ignored.
    """
    if threading.current_thread() is threading.main_thread():
        for number in _taken():
            signal.signal(number, signal.SIG_IGN)


def chain_to_previous() -> None:
    """Ignore the stop signals, and then call the handlers that were there before ours, such as submitit's.

    Call it when a stop has been saved. An earlier handler that requeues the job does so now, with nothing lost.
    """
    handler = signal.getsignal(signal.SIGTERM)
    ignore()
    if isinstance(handler, StopSignals):
        handler.call_previous()


def _taken() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to stop."""
    return END_SIGNALS if os.environ.get("TOOLKIT_SUPERVISED") == "1" else STOP_SIGNALS


# ------------------------------------------------------------------------------------------------- a process's children


@contextmanager
def kept_from_children(numbers: Collection[int]) -> Iterator[None]:
    """Block signals in this thread. A process that it starts meanwhile has them blocked for as long as it lives."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _at_forks(
    blocked: Callable[[], Collection[int]], change: Callable[[], None], *, stay_blocked_in_child: bool = False
) -> None:
    """Have each fork block signals until it is done, and call ``change`` in the child."""
    own = threading.local()  # the mask of the thread that forks

    def before_fork() -> None:
        own.mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked())

    def in_parent() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, own.mask)

    def in_child() -> None:
        change()
        signal.set_wakeup_fd(-1)  # shared with the rank, which would take a child's signals for its own
        if not stay_blocked_in_child:
            in_parent()

    os.register_at_fork(before=before_fork, after_in_parent=in_parent, after_in_child=in_child)


@functools.cache
def _restore_in_forks() -> None:
    """Have each fork of this process handle the stop signals as it would without a :class:`StopSignals` here."""

    def restore() -> None:
        for number in END_SIGNALS:
            handler = signal.getsignal(number)
            if isinstance(handler, StopSignals):
                default = signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL
                signal.signal(number, handler.earlier.get(number, default))

    _at_forks(lambda: END_SIGNALS, restore)


@functools.cache
def _keep_from_children() -> None:
    """Have each process that this one starts from now on keep blocked what a :class:`StopSignals` here handles.

    ``Popen.terminate()`` and ``Process.terminate()`` kill such a child. A handler that a user sets here later takes its
    signal back, also for children.
    """
    from multiprocessing import popen_fork  # not on the login node

    kept_here: set[signal.Signals] = set()  # in a fork: what it has inherited

    def kept() -> set[signal.Signals]:
        return kept_here | {number for number in _taken() if isinstance(signal.getsignal(number), StopSignals)}

    def ignore_kept() -> None:
        kept_here.update(kept())
        for number in kept_here:
            signal.signal(number, signal.SIG_IGN)

    def fork_exec(argv: Sequence[Any], files: Sequence[bytes], *others: Any) -> int:
        numbers = kept()
        with kept_from_children(numbers):
            return plain_exec(*(_ignored_by_shell(argv, files, numbers) if numbers else (argv, files)), *others)

    def spawn(start: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(start)
        def kept_spawn(*args: Any, **options: Any) -> int:
            with kept_from_children(kept()):
                return start(*args, **options)

        return kept_spawn

    def system(command: Any) -> int:
        numbers = kept()
        with kept_from_children(numbers):
            return plain_system(f"{_trap(numbers)}\n{os.fsdecode(command)}" if numbers else command)

    _at_forks(kept, ignore_kept, stay_blocked_in_child=True)
    # These start programs without a fork in Python.
    plain_system, os.system = os.system, system
    os.posix_spawn, os.posix_spawnp = spawn(os.posix_spawn), spawn(os.posix_spawnp)
    plain_exec = _posixsubprocess.fork_exec
    _posixsubprocess.fork_exec = subprocess._fork_exec = fork_exec  # type: ignore[assignment, attr-defined]
    for kind, name in ((subprocess.Popen, "send_signal"), (popen_fork.Popen, "_send_signal")):
        _kill_the_deaf(kind, name, kept)


#: Shells that unblock all signals before they wait for a program. A signal that they are told to ignore stays ignored.
_UNBLOCKING = {"sh", "dash", "ash", "busybox"}


def _ignored_by_shell(
    argv: Sequence[Any], files: Sequence[bytes], numbers: Collection[signal.Signals]
) -> tuple[Sequence[Any], Sequence[bytes]]:
    """Return the arguments and the places of a program. If a plain shell runs it, have one ignore the signals first."""
    for file in files:
        program = Path(os.fsdecode(file))
        if program.is_file() and os.access(program, os.X_OK):
            with suppress(OSError), program.open("rb") as script:
                if script.read(2) == b"#!":
                    program = Path(os.fsdecode((script.readline(256).split() or [b""])[0]))
            if program.name not in _UNBLOCKING:
                break
            return [b"sh", b"-c", f'{_trap(numbers)}; exec "$0" "$@"'.encode(), file, *argv[1:]], [b"/bin/sh"]
    return argv, files


def _trap(numbers: Collection[signal.Signals]) -> str:
    return f"trap '' {' '.join(number.name.removeprefix('SIG') for number in numbers)}"


def _kill_the_deaf(kind: Any, name: str, kept: Callable[[], Collection[int]]) -> None:
    """Have ``terminate()``, which calls ``name``, kill a child that was born with the signal blocked, and still is."""
    init, send_signal = kind.__init__, getattr(kind, name)

    @functools.wraps(init)
    def begun(self: Any, *args: Any, **options: Any) -> None:
        self.is_born_deaf = signal.SIGTERM in kept()
        init(self, *args, **options)

    @functools.wraps(send_signal)
    def sent(self: Any, number: int) -> None:
        # Asked before it is sent: a child that has unblocked it may ignore further ones while it cleans up.
        is_born_deaf = number == signal.SIGTERM and getattr(self, "is_born_deaf", False)
        is_deaf = is_born_deaf and self.returncode is None and _is_deaf(self.pid, number)
        send_signal(self, number)
        if is_deaf:
            send_signal(self, signal.SIGKILL)

    kind.__init__ = begun
    setattr(kind, name, sent)


def _is_deaf(pid: int, number: int) -> bool:
    """True if the process has the signal blocked, or ignores it."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk:", "SigIgn:"))]
        return any(mask >> (number - 1) & 1 for mask in masks)
    return False
