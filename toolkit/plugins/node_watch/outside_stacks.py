"""Reads the Python stacks of ranks whose script does not write them itself, in the format of :mod:`toolkit.hang`.

py-spy reads them without disturbing the process, where it is installed and the system permits it. Else, in an attempt
that is to end, the process gets SIGABRT, which kills it: ``PYTHONFAULTHANDLER``, which `toolkit exec` sets, has Python
write its stacks before.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from traceback import FrameSummary
from typing import TypeAlias

from toolkit import hang
from toolkit.base import fsio, procfs
from toolkit.files.rundir import RunDir

#: Ranks that are read at the same time, and the most processes of each.
AT_ONCE, MOST_PROCESSES = 16, 8
PY_SPY_LIMIT_S = 5.0
#: A process that got SIGABRT writes within milliseconds, unless the disk of its log is slow.
ABORT_LIMIT_S, QUIET_S, LOOK_EVERY_S = 1.5, 0.2, 0.02
#: Where Python waits for a program that it has started: that program does the rank's work.
_LAUNCHERS = ("/subprocess.py", "/torch/distributed/elastic/")


def dump_stacks(run: RunDir, attempt: int, ranks: Mapping[int, Sequence[int]], *, may_end: bool) -> None:
    """Write the stacks of each rank's processes, oldest first. ``may_end``: those that py-spy cannot read are ended."""

    def write_one(rank: int) -> None:
        pids = ranks[rank]
        notes = _notes(pids)
        parents = {pid: stat.parent for pid, stat in procfs.read_all(some=pids).items()}
        texts = {pid: _by_py_spy(pid) for pid in _pythons(pids)}
        # All processes of the rank are stopped before some are ended, the youngest first: a Python process
        # may react to its child's end, and its stack would be another one then. A shell would continue with its next
        # line as if the script had finished.
        unread = [pid for pid, text in texts.items() if not text and may_end]
        for pid in pids if unread else ():
            _send(pid, signal.SIGSTOP)
        for pid in reversed(unread):
            texts[pid] = _abort(pid, run.rank_log(attempt, rank))
        # The rank's script has its own file, and each other process, too.
        folder, read = run.attempt_logs(attempt), [pid for pid, text in texts.items() if text]
        main = _script_of(read, texts, parents)
        with contextlib.suppress(OSError):  # a full disk
            for pid in read:
                if pid != main:
                    _put(folder / f"stack-{rank}-process-{pid}.txt", texts[pid])
            of_main = "" if main is None else f"# process {main}\n{texts[main]}"
            _put(hang.stack_path(folder, rank), notes + of_main + hang.ANSWERED)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(write_one, ranks))


def _pythons(pids: Sequence[int]) -> list[int]:
    pythons: list[int] = []
    for pid in pids:
        with contextlib.suppress(OSError):  # it has just ended
            if "python" in Path(f"/proc/{pid}/exe").readlink().name:
                pythons.append(pid)
    return pythons[:MOST_PROCESSES]


def _notes(pids: Sequence[int]) -> str:
    """Return name, state and kernel function of each process. Arguments, which may hold a password, are left out."""
    notes = ""
    for pid in pids:
        words: list[str] = []
        for name in ("comm", "status", "wchan"):
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/{name}").read_text(errors="replace").strip()
                words += re.findall(r"^State:\s*(.+)$", text, re.MULTILINE) if name == "status" else [text]
        notes += f"# process {pid}: {', '.join(words)}\n"
    return notes


def _put(path: Path, text: str) -> None:
    with os.fdopen(fsio.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # else the supervisor's node would not see it over NFS


def _script_of(pids: Sequence[int], texts: Mapping[int, str], parents: Mapping[int, int]) -> int | None:
    """Return the process of the rank's script. It is no launcher, and no script has started it.

    Of several, as under torchrun, it is the first that waits for no other; None where there is no Python.
    """
    innermost = {pid: stack[0] for pid in pids if (stack := main_stack(texts[pid]))}
    others = {pid for pid, frame in innermost.items() if not any(part in frame.filename for part in _LAUNCHERS)}
    scripts = [pid for pid in innermost if pid in others and parents.get(pid) not in others]
    working = [pid for pid in scripts if "/torch/distributed/" not in innermost[pid].filename]
    return next(iter([*working, *scripts, *pids]), None)


def _by_py_spy(pid: int) -> str:
    """Return the stacks that py-spy reads. Empty where there is no py-spy, or the system forbids it."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    program = shutil.which("py-spy", path=os.pathsep.join(folders))
    if program is None:
        return ""
    command = [program, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PY_SPY_LIMIT_S)
        return from_py_spy(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        return ""


def from_py_spy(text: str) -> str:
    """Return py-spy's JSON in the format of faulthandler. Raises ValueError or KeyError for other text."""
    lines = []
    for thread in json.loads(text):
        lines.append(f"Thread 0x{thread['thread_id']:x} (most recent call first):\n")
        for frame in thread["frames"]:
            name = frame["name"].rpartition(".")[2]  # py-spy puts the class before it
            lines.append(f'  File "{frame["filename"]}", line {frame["line"]} in {name}\n')
    return "".join(lines)


def _abort(pid: int, log: Path) -> str:
    """Kill a process that SIGSTOP holds. Return the stacks that Python writes at SIGABRT, empty if it writes none.

    Its standard error is a file, the rank's ``log``, or a pipe to what writes the log. If that cannot be opened, it
    continues.
    """
    # Forbid a core dump: the cores of all ranks, with all their memory, would fill a disk.
    with contextlib.suppress(OSError, ValueError):
        Path(f"/proc/{pid}/coredump_filter").write_text("0")
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, resource.prlimit(pid, resource.RLIMIT_CORE)[1]))
    output = log
    # Where standard error is a pipe, another process writes what comes out of it into the rank's log.
    with contextlib.suppress(OSError):
        standard_error = Path(f"/proc/{pid}/fd/2")
        if stat.S_ISREG(standard_error.stat().st_mode):
            output = standard_error
    try:
        file = output.open("rb")
    except OSError:
        _send(pid, signal.SIGCONT)
        return ""
    with file:
        # Read what is appended to its output from now on, until it ends or has written nothing for a while.
        file.seek(0, os.SEEK_END)
        _send(pid, signal.SIGABRT)
        _send(pid, signal.SIGCONT)
        text, now = b"", time.monotonic()
        deadline, grew = now + ABORT_LIMIT_S, now
        while now < deadline:
            is_gone = _is_gone(pid)
            if piece := file.read():
                text, grew = text + piece, now
            elif is_gone or (text and now - grew > QUIET_S):
                break
            time.sleep(LOOK_EVERY_S)
            now = time.monotonic()
    begin = re.search(rb"^(Current thread|Thread) 0x", text, re.MULTILINE)
    return text[begin.start() :].decode(errors="replace") if begin else ""


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _is_gone(pid: int) -> bool:
    stat = procfs.read(pid)
    return stat is None or stat.has_ended


Stack: TypeAlias = Sequence[FrameSummary]  #: innermost frame first

_THREAD = re.compile(r"^(?:Current thread|Thread) 0x\w+", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
_OURS = f"{Path(__file__).parents[2]}/"
_LIBRARY = re.compile(r"^<|/(?:site|dist)-packages/|/lib/python3[\d.]*/")


def main_stack(text: str) -> Stack:
    """Return the main thread's stack in faulthandler's output: the last that ``threading`` has not started."""
    main: Stack = []
    for thread in _THREAD.split(text)[1:]:
        frames = [FrameSummary(file, int(line), name) for file, line, name in _FRAME.findall(thread)]
        if frames and frames[-1].name != "_bootstrap":
            main = frames
    return main


def is_in_toolkit(stack: Stack) -> bool:
    """True if the toolkit has called the library in which the rank is, or is there itself."""
    caller = next((frame.filename for frame in stack if frame.filename.startswith(_OURS) or not _is_library(frame)), "")
    return caller.startswith(_OURS)


def program_line(stack: Stack) -> str | None:
    """Return the innermost line of the user's program as ``train.py:12``; None where there is none."""
    own = (frame for frame in stack if not frame.filename.startswith(_OURS) and not _is_library(frame))
    return next((f"{Path(frame.filename).name}:{frame.lineno}" for frame in own), None)


def _is_library(frame: FrameSummary) -> bool:
    return _LIBRARY.search(frame.filename) is not None
