"""``python -m toolkit.nodes.agent.zygote FD FOR LEARNT ROOM``: import what ranks import, and fork them.

A forked rank makes its first step 0.07 s after the order, a fresh interpreter 2.9 s. A fork must be as good as a fresh
interpreter. So this process has one Python thread, no CUDA context, no OpenMP pool, and no open files but its end of
the agent's socket pair. Where this does not hold it reports why, and the ranks are started as fresh programs.

The agent sends a :class:`ForkOrder` as a line of JSON and reads ``{"pid"}`` back, or ``{"error"}``. It sends an empty
object to have what the file ``LEARNT`` names imported (:mod:`.preimports`), and reads ``{"ready"}`` back, as after the
start. ``FOR`` is ``ranks``, or ``store`` where only an attempt's store is forked: then it imports less.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import io
import json
import os
import random
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypedDict

from toolkit.base import procfs
from toolkit.nodes.agent import preimports
from toolkit.nodes.agent.die_with_parent import SIGNALS, die_with, ignore_signals

#: What one of the toolkit's ranks imports before its first step, and what the store does. A user's own modules are
#: never imported before the fork: each rank runs them itself.
MODULES = {
    "ranks": (
        "torch",
        "torch.distributed",
        "torch.nn.parallel",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.utils.tensorboard",
        "toolkit.run.rank.main",
        "toolkit.train.job",
        "toolkit.train.user_loop",
        "toolkit.cli.main",
        "toolkit.cli.commands.run",
        "toolkit.plugins.report.stragglers",
        "toolkit.train.profile",
        "toolkit.plugins.node_watch.efficiency",
    ),
    "store": ("toolkit.ranks.store_host",),
}
#: A variable of this process that makes room for those of a rank, see :func:`set_process_title`.
ROOM_VARIABLE = "TOOLKIT_ROOM"
ROOM_BYTES = 1 << 13
#: The interpreter's exit code where the last of its output could not be written.
EXIT_UNWRITTEN = 120


class ForkOrder(TypedDict):
    """A process to start: its module and arguments, its files and CPUs, its ``ps`` title."""

    module: list[str]  #: empty: a program is to be started instead
    command: list[str]
    environ: dict[str, str]
    files: list[str]  #: for standard input, output and error
    cpus: list[int] | None
    agent: int  #: the parent that it gets, and with which it dies


def main() -> None:
    """Serve the agent. In each fork, become the rank that was ordered."""
    die_with(os.getppid(), signal.SIGKILL)
    ignore_signals()
    agent = socket.socket(fileno=int(sys.argv[1]))
    set_process_title([*sys.orig_argv[:-1]], {})
    os.environ.pop(ROOM_VARIABLE, None)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else is_available() makes a context that no fork survives
    began, waited_s = time.monotonic(), _waited_s()
    # Import once what every fork needs. Searches for garbage would take a quarter of the time, and what they free would
    # leave holes in pages that forks share, see the documentation of gc.freeze(). Forks search again.
    gc.disable()
    for name in MODULES[sys.argv[2]]:
        preimports.import_quietly(name)
    waited_s = _waited_s() - waited_s
    varying: set[str] = set()  # the variables in which ranks differ
    with agent.makefile("rw") as lines:
        _learn(lines, varying, began, waited_s)
        for line in lines:
            order: ForkOrder | None = json.loads(line) or None
            if order is None:
                _learn(lines, varying, time.monotonic())
                continue
            environ = order["environ"]
            varying |= {
                name for name in environ.keys() | os.environ.keys() if environ.get(name) != os.environ.get(name)
            }
            try:
                with opened(order["files"]) as files:
                    # In the fork, leave the loop with the rank's files in place; in the zygote, report the pid.
                    pid = _fork()
                    if pid == 0:
                        for target, file in enumerate(files):
                            os.dup2(file, target)
            except OSError as error:
                _send(lines, {"error": str(error)})
                continue
            if pid == 0:
                break
            _send(lines, {"pid": pid})
        else:
            os._exit(0)  # the agent has ended; torch's exit would take half a second
    agent.close()
    assert order is not None
    _become(order)


def _waited_s() -> float:
    """Return for how long this process has waited for files; 0 where the kernel lacks CONFIG_SCHED_INFO."""
    try:
        ready_ns = int(Path("/proc/self/schedstat").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0.0
    return time.monotonic() - time.process_time() - ready_ns / 1e9


def _learn(lines: Any, varying: Collection[str], began: float, waited_s: float = 0.0) -> None:
    """Import what there is to learn, and report that forks can be made now."""
    path = sys.argv[3]
    modules = preimports.import_recorded(Path(path), varying) if path else []
    gc.freeze()  # a collection in a rank would touch, and so copy, every shared page
    preimports.inherited = frozenset(sys.modules)
    # Say why a fork would not be as good as a fresh interpreter; None where it would.
    unclean = "an import has opened the GPU" if preimports.fork_breaks_gpu() else None
    others = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if others:
        unclean = f"an import has started threads: {', '.join(others)}"
    took = {"import_s": time.monotonic() - began, "waited_s": max(0.0, waited_s)}
    answer = {**took, "learnt": len(modules), "unclean": unclean, "has_torch": "torch" in sys.modules}
    _send(lines, {"ready": answer})


def _send(lines: Any, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message) + "\n")
    lines.flush()


def _fork() -> int:
    """Fork twice: the rank becomes the agent's child, and dies with it. Return its pid, 0 in it. Raises OSError."""
    reading, writing = os.pipe()
    try:
        middle = os.fork()
    except OSError:
        os.close(reading)
        os.close(writing)
        raise
    # The process in between ends at once, so that the agent, its subreaper, becomes the rank's parent.
    if middle == 0:
        try:
            pid = os.fork()
        except OSError as error:
            os.write(writing, str(error).encode())
            os._exit(1)
        if pid == 0:
            os.close(reading)
            os.close(writing)
            return 0
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(middle, 0)
    if not text.isdigit():
        raise OSError(text)
    return int(text)


def _become(order: ForkOrder) -> None:
    """Make this process like a fresh interpreter, and run the module that the order names."""
    # The agent becomes the parent as soon as the process between has ended.
    agent = order["agent"]
    while os.getppid() != agent:
        try:
            os.kill(agent, 0)
        except ProcessLookupError:
            os._exit(1)
        time.sleep(0.0005)
    die_with(agent, signal.SIGKILL)
    os.setsid()
    if order["cpus"] is not None:
        os.sched_setaffinity(0, order["cpus"])
    gc.enable()
    module, *arguments = order["module"]
    changed = {name: value for name, value in order["environ"].items() if os.environ.get(name) != value}
    set_process_title(order["command"], changed)
    os.environ.clear()
    os.environ.update(order["environ"])
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # as multiprocessing does in its forks
    # Else all ranks of a node would draw the same random numbers.
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    tempfile.tempdir = None  # an import has asked for it, before the rank's TMPDIR was there
    sys.argv = [module, *arguments]
    sys.orig_argv = list(order["command"])
    for number in SIGNALS:  # last: the module installs its own first of all
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    reset_main_module()
    sys.modules.pop(module, None)  # which is run a second time, as `__main__`; runpy would warn of it
    try:
        runpy._run_module_as_main(module)  # type: ignore[attr-defined]  # what `python -m` itself calls
        code = 0
    except SystemExit as ended:
        # What the interpreter's handle_system_exit() does: a text is printed, and means 1.
        if ended.code is None or isinstance(ended.code, int):
            code = (ended.code or 0) & 0xFF
        else:
            print(ended.code, file=sys.stderr)
            code = 1
    except BaseException:
        gc.unfreeze()  # frozen objects are not freed at the interpreter's end, and libraries print that they leak
        raise
    _end(code)


def _end(code: int) -> NoReturn:
    """End as the interpreter does (Py_FinalizeEx), but do not free what all ranks share.

    Freeing it would copy it first: 1.2 s of CPU time for each rank. What the program has made is freed, so that files
    which it has left open are written.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    inherited = preimports.inherited or ()
    for name in [name for name in sys.modules if name == "__main__" or name not in inherited]:
        del sys.modules[name]
    gc.collect()
    # Open files that are still referenced are flushed here.
    for stream in [thing for thing in gc.get_objects() if isinstance(thing, io.IOBase)]:
        with contextlib.suppress(Exception):  # it is closed, or of a library with a flush() of its own
            stream.flush()
    # An output that cannot be written changes the exit code, as in the interpreter.
    for output in (sys.stdout, sys.stderr):
        try:
            if output is not None and not output.closed:
                output.flush()
        except OSError:
            code = EXIT_UNWRITTEN
    ctypes.CDLL(None).fflush(None)
    os._exit(code)


def reset_main_module() -> ModuleType:
    """Replace ``__main__`` by what a fresh interpreter has there before it runs anything."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    return main


@contextmanager
def opened(paths: Sequence[str]) -> Iterator[list[int]]:
    """Open the paths as standard input, output and error; close them at the end."""
    files: list[int] = []
    try:
        for path in paths:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if files else os.O_RDONLY
            files.append(os.open(path, flags | os.O_CLOEXEC, 0o600))
        yield files
    finally:
        for file in files:
            os.close(file)


def set_process_title(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Have ``ps``, ``pgrep -f`` and ``/proc/PID/environ`` show this command, and also these variables.

    The kernel shows the memory in which a program has received its arguments and variables. The last argument and
    ``ROOM_VARIABLE`` only make room there. From proc_pid_cmdline(5): where the last byte of the arguments is not null,
    all up to the first null byte is the title.
    """
    stat = procfs.read("self")
    if stat is None:
        return
    arguments, arguments_end, variables, variables_end = map(stat.number, range(48, 52))
    if not arguments:  # this kernel does not tell
        return
    size = arguments_end - arguments
    title = " ".join(command).encode(errors="surrogateescape")[: size - 2]
    ctypes.memmove(arguments, title.ljust(size - 1, b"\0") + b" ", size)
    # The variables are written into the room, in front of those that an earlier call has put there.
    prefix = f"{ROOM_VARIABLE}=".encode()
    block = ctypes.string_at(variables, variables_end - variables)
    start = block.find(prefix) + len(prefix)
    if start >= len(prefix):
        room = block[start : start + ROOM_BYTES]
        known = [] if room.startswith(b"-") else [room.strip(b"\0")]
        entries = [f"{name}={value}".encode(errors="surrogateescape") for name, value in environ.items()]
        text = b"\0" + b"\0".join([*entries, *known])
        ctypes.memmove(variables + start, text[: ROOM_BYTES - 1].ljust(ROOM_BYTES, b"\0"), ROOM_BYTES)


if __name__ == "__main__":
    main()
