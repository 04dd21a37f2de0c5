"""The Python stacks of ranks whose script has not prepared for it. The attempt is to end.

py-spy reads them without disturbing the process, where it is installed and the system permits it. Else the process gets
SIGABRT, which kills it: ``PYTHONFAULTHANDLER``, which `toolkit exec` sets, has Python write its stacks before. The file
holds what the kernel reports of each process in any case. Its format is that of :mod:`toolkit.hang.stacks`.
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

from toolkit import fsio
from toolkit.hang import stacks
from toolkit.rundir import RunDir

#: Ranks that are read at the same time, and the most processes of each.
AT_ONCE, MOST_PROCESSES = 16, 8
PY_SPY_LIMIT_S = 5.0
#: A process that got SIGABRT writes within milliseconds, unless the disk of its log is slow.
ABORT_LIMIT_S, QUIET_S, LOOK_EVERY_S = 1.5, 0.2, 0.02
#: Where Python waits for a program that it has started: that program does the rank's work.
_LAUNCHERS = ("/subprocess.py", "/torch/distributed/elastic/")


def write(run: RunDir, attempt: int, ranks: Mapping[int, Sequence[int]]) -> None:
    """Write the stacks of each rank's processes, which are given oldest first. This may end Python processes."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda rank: _write_rank(run, attempt, rank, ranks[rank]), ranks))


def _write_rank(run: RunDir, attempt: int, rank: int, pids: Sequence[int]) -> None:
    notes = [f"# process {pid}: {_kernel_words(pid)}\n" for pid in pids]
    pythons = [pid for pid in pids if _is_python(pid)][:MOST_PROCESSES]
    texts = {pid: text for pid in pythons if (text := _by_py_spy(pid))}
    parents = {pid: _parent(pid) for pid in pythons}
    # Only those that py-spy could not read are ended for their stacks.
    if unread := [pid for pid in pythons if pid not in texts]:
        texts |= _by_abort(unread, pids, run.rank_log(attempt, rank))
    read = [pid for pid in pythons if pid in texts]
    # The rank's own file gets the stack of its script; the other processes get files of their own.
    main = _script_of(read, texts, parents)
    folder = run.attempt_logs(attempt)
    with contextlib.suppress(OSError):  # a full disk
        for pid in read:
            if pid != main:
                _put(folder / f"stack-{rank}-process-{pid}.txt", texts[pid])
        own = "" if main is None else f"# process {main}\n{texts[main]}"
        _put(stacks.stack_path(folder, rank), "".join(notes) + own + stacks.ANSWERED)


def _put(path: Path, text: str) -> None:
    with os.fdopen(fsio.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # else the supervisor's node would not see it over NFS


def _kernel_words(pid: int) -> str:
    """Return name, state and the kernel function it waits in; no arguments, which may hold a password."""
    words: list[str] = []
    for name in ("comm", "status", "wchan"):
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/{name}").read_text(errors="replace").strip()
            words += re.findall(r"^State:\s*(.+)$", text, re.MULTILINE) if name == "status" else [text]
    return ", ".join(words)


def _is_python(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "python" in Path(f"/proc/{pid}/exe").readlink().name
    return False


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return 0


def _script_of(pids: Sequence[int], texts: Mapping[int, str], parents: Mapping[int, int]) -> int | None:
    """Return the process that is the rank's script, and neither a launcher nor started by a script.

    Of several, as under torchrun, it is the first that waits for no other; None where there is no Python.
    """
    innermost = {pid: stack[0] for pid in pids if (stack := stacks.main_stack(texts[pid]))}
    launchers = {pid for pid, frame in innermost.items() if any(part in frame.filename for part in _LAUNCHERS)}
    # A process that a script has started is no script itself.
    scripts = [pid for pid in innermost if pid not in launchers and parents[pid] not in {*innermost} - launchers]
    waiting = [pid for pid in scripts if "/torch/distributed/" in innermost[pid].filename]
    return next(iter([pid for pid in scripts if pid not in waiting] + scripts + list(pids)), None)


# ----------------------------------------------------------------------------------------------------------- two ways


def _by_py_spy(pid: int) -> str:
    """Return the stacks that py-spy reads; empty where there is no py-spy, or the system forbids it."""
    program = shutil.which(
        "py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
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


def _by_abort(pythons: Sequence[int], rank: Sequence[int], log: Path) -> dict[int, str]:
    """End the Python processes, the youngest first; return what each wrote before.

    All processes of the rank are stopped first. A Python process may react to its child's end, and its stack would be
    another one then. A shell would go on with its next line as if the script had finished.
    """
    for pid in rank:
        _send(pid, signal.SIGSTOP)
    texts = {pid: _abort(pid, log) for pid in reversed(pythons)}
    return {pid: text for pid, text in texts.items() if text}


def _abort(pid: int, log: Path) -> str:
    """End a process; return the stacks that it writes before, empty if it writes none."""
    _forbid_core(pid)
    try:
        file = _output(pid, log).open("rb")
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


def _output(pid: int, log: Path) -> Path:
    """Return where its standard error goes, or else the rank's log. It may go to the log, a file of its own, or a pipe
    to a process that writes the log."""
    own = Path(f"/proc/{pid}/fd/2")
    with contextlib.suppress(OSError):
        if stat.S_ISREG(own.stat().st_mode):
            return own
    return log


def _forbid_core(pid: int) -> None:
    """Forbid a core dump: the cores of all ranks, with all their memory, would fill a disk."""
    with contextlib.suppress(OSError, ValueError):
        Path(f"/proc/{pid}/coredump_filter").write_text("0")
        resource.prlimit(pid, resource.RLIMIT_CORE, (0, resource.prlimit(pid, resource.RLIMIT_CORE)[1]))


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _is_gone(pid: int) -> bool:
    """True for a process that has ended, whether its parent has reaped it or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
