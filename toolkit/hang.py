"""Hangs: how each rank says what it does, and the stacks that it writes when it hangs.

When the supervisor sends a rank SIGURG, faulthandler writes the stacks of all its threads from inside the signal
handler, so also if the main thread never comes back from C. A thread then does what a handler can't, and ends the file
with ``ANSWERED``. The file is made before anything slow is imported: a rank without one has not started. SIGURG,
because programs that don't know it ignore it: user scripts, shells, programs that a job starts.

An attempt counts as hung by what its ranks report. One rank's progress is enough, since the others may wait for it. So
a rank that hangs is noticed when the others have reached the point where they wait for it.

Time is counted in looks of the supervisor. If the supervisor itself was stopped, by ``scontrol suspend`` or a disk that
did not answer, that time does not count: the reports of that time are still in its queue.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from toolkit.base import fsio
from toolkit.files import rundir
from toolkit.nodes.agent.reports import LONGEST_LOOK_S, ProgressSummary

STUCK_SHARE = 0.5
#: Until the first step of an attempt has ended: imports from a cold disk and opening the network take long and show no
#: progress. A rank that compiles shows it by its use of the CPU, see toolkit.ranks.report. Below 1, or torch's own
#: timeout would come first, and tell less: that a collective timed out, but not on which rank it waited.
START_SHARE = 0.8


class Watchdog:
    """Watches one attempt of ranks whose process group times out after ``timeout_s``."""

    def __init__(self, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._clock, self._looked = timeout_s, clock, clock()
        self._now = self._progress = 0.0
        self._has_begun = False
        self.nodes: dict[str, ProgressSummary] = {}  #: the last digest of each node

    def on_report(self, host: str, digest: ProgressSummary) -> None:
        """Take a node's digest of its ranks, whether it has anything new or not."""
        self._pass_time()
        known = self.nodes.get(host)
        # A node that reports for the first time counts as progress, too.
        if known is None or known.moves != digest.moves:
            self._progress = self._now
        self._has_begun |= digest.most is not None
        self.nodes[host] = digest

    def is_stuck(self) -> bool:
        """True if there was no progress for too long. To be called more often than every ``LONGEST_LOOK_S``."""
        self._pass_time()
        return self._now - self._progress > self.stall_limit_s

    @property
    def stall_limit_s(self) -> float:
        return self._timeout_s * (STUCK_SHARE if self._has_begun else START_SHARE)

    @property
    def stalled_s(self) -> float:
        return self._now - self._progress

    def _pass_time(self) -> None:
        now = self._clock()
        self._now += min(now - self._looked, LONGEST_LOOK_S)
        self._looked = now


#: Phases as the user reads them: "rank 13 on node07: waiting for data, 212 s".
SETTING_UP = "setting up"
PRIMING = "priming"
LOADING = "loading a checkpoint"
WAITING_FOR_DATA = "waiting for data"
IN_STEP = "in a step"
AT_BOUNDARY = "between two steps"
LOGGING = "reading the loss"
EVALUATING = "evaluating"
SAVING = "saving a checkpoint"
FINISHING = "finishing"
OWN_CODE = "in the loop's own code"


class Activity:
    """A rank's phase, step and count. A plain assignment writes each, in some 10 ns and without a lock.

    For the supervisor a change of any of the three is progress. A rank of which none changes for half of
    ``dist.timeout_s`` counts as stuck once that is true of every other rank as well. So any long work that is neither a
    step nor known to end soon moves ``count``: each batch of an evaluation, piece of a checkpoint, or retry.
    """

    __slots__ = ("count", "phase", "step")

    def __init__(self) -> None:
        self.phase = SETTING_UP
        #: Steps done; None until the first one of this attempt has ended.
        self.step: int | None = None
        self.count = 0

    def note_progress(self) -> None:
        self.count += 1


#: The signal that asks a rank for its stacks, and the last line of a complete answer.
ASK = signal.SIGURG
ANSWERED = "# answered\n"


def stack_path(folder: Path, rank: int | str, worker: int | str | None = None) -> Path:
    """Return the file for the stacks of a rank or its data worker in an attempt's logs. Numbers may be globs."""
    return folder / (f"stack-{rank}.txt" if worker is None else f"stack-{rank}-worker-{worker}.txt")


def flight_path(folder: Path, rank: int | str) -> Path:
    """Return the file for the flight recorder's dump, for torch's ``torchfrtrace --prefix flight- FOLDER``."""
    return folder / f"flight-{rank}"


def install_stack_dump(rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """Answer ``ASK`` from now on, if this rank has a supervisor. Call it in the main thread, as early as possible."""
    folder = _folder(environ)
    if folder is None:
        return
    try:
        fd = _open(stack_path(folder, rank))
    except OSError:  # a full disk: the rank has no stacks to show then, and the signal is ignored
        return
    reader, writer = os.pipe()
    # A full pipe must not block the signal handler.
    os.set_blocking(writer, False)
    signal.signal(ASK, lambda *_: None)  # Python's own handler wakes the thread; faulthandler's calls it next
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    faulthandler.register(ASK, fd, all_threads=True, chain=True)
    follow_up = threading.Thread(target=_follow_up, args=(reader, fd, folder, rank), name="toolkit-stacks", daemon=True)
    follow_up.start()


def install_worker_dump(worker: int, environ: Mapping[str, str] = os.environ) -> None:
    """Answer ``ASK`` in a forked data worker, in another file: it and its rank would tear each other's lines."""
    folder = _folder(environ)
    if folder is not None:
        with contextlib.suppress(OSError):
            faulthandler.register(ASK, _open(stack_path(folder, environ["RANK"], worker)), all_threads=True)


def _folder(environ: Mapping[str, str]) -> Path | None:
    if environ.get("TOOLKIT_SUPERVISED") != "1":
        return None
    return rundir.RunDir(Path(environ[rundir.RUN_DIR_VARIABLE])).attempt_logs(int(environ["TOOLKIT_ATTEMPT"]))


def _open(path: Path) -> int:
    return fsio.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _follow_up(reader: int, fd: int, folder: Path, rank: int) -> None:
    """Complete each answer. The signals of this process come in the pipe; after ``ASK`` the stacks are in the file."""
    while True:
        if ASK not in os.read(reader, 1):
            continue
        for child in children():  # Slurm's cgroup plugin signals the ranks and not what they have forked
            with contextlib.suppress(OSError):
                os.kill(child, ASK)
        with contextlib.suppress(OSError):
            _dump_flight_recorder(flight_path(folder, rank))
        # Without fsync the supervisor's node would not see the files over NFS before this process has ended.
        with contextlib.suppress(OSError):
            for path in folder.glob(stack_path(Path(), rank, "*").name):
                with fsio.open_file(path) as file:
                    os.fsync(file.fileno())
            os.write(fd, ANSWERED.encode())
            os.fsync(fd)


def remove_unused(folder: Path) -> None:
    """Remove the stack files of an ended attempt that were never written to."""
    for path in folder.glob("stack-*.txt"):
        with contextlib.suppress(OSError):
            if path.stat().st_size == 0:
                path.unlink()


def children(pid: int | str = "self") -> Iterator[int]:
    """Yield the processes that a process has started and that still run."""
    with contextlib.suppress(FileNotFoundError):  # it has ended
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has ended
                yield from map(int, (task / "children").read_text().split())


#: Backends with their own recorder. torch 2.15's ``nccl`` is a new backend, nccl2, which feeds the one of its own name.
_RECORDED = ("nccl2", "nccl", "nccl-lazy", "gloo")


def _dump_flight_recorder(path: Path) -> None:
    """Write what torch has recorded of the last collectives. Nothing if no process group is open."""
    dist, c10d = sys.modules.get("torch.distributed"), sys.modules.get("torch._C._distributed_c10d")
    if dist is None or c10d is None or not dist.is_initialized():
        return
    # The recorders that a torch may have: the old NCCL backend's, and since 2.15 one for each backend.
    calls: list[tuple[str, dict[str, str]]] = [("_dump_nccl_trace", {})]
    calls += [("_dump_fr_trace", {"backend": name}) for name in _RECORDED]
    calls.append(("_dump_fr_trace", {}))
    dumps: list[bytes] = []
    for function, arguments in calls:
        with contextlib.suppress(AttributeError, TypeError):  # each version of torch has, and takes, something else
            dumps.append(getattr(c10d, function)(**arguments))
    # Several recorders may exist and one be in use: prefer one that has entries.
    filled = (dump for dump in dumps if pickle.loads(dump).get("entries"))
    if dumps:
        with os.fdopen(fsio.open_private(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(next(filled, dumps[-1]))


def debug_environment(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make each rank's torch and NCCL write dumps and logs into an attempt's log folder.

    Variables that the user has set are left out. ``TORCH_NCCL_DUMP_ON_TIMEOUT`` is off by default on torch 2.11.
    """
    ours = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in environ:  # the older name of the next one
        ours["TORCH_FR_DUMP_TEMP_FILE"] = str(flight_path(folder, ""))
    if "NCCL_DEBUG" in environ:
        ours["NCCL_DEBUG_FILE"] = str(folder / "nccl-%h-%p.log")
    return {name: value for name, value in ours.items() if name not in environ}
