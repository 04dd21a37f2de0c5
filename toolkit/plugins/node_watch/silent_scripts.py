"""Watches the ranks of a script that reports nothing, from outside, by /proc and by what the GPUs' driver tells.

The agent of each node starts it when it is asked to, see :mod:`.node_monitor`. It is not part of the monitor, which a
faulty driver may stop. A rank is all processes that began with its mark in their environment, and all that these have
started. A rank is silent while, from one look to the next,

* its processes are the same,
* they used less than ``IDLE_SHARE`` of one core: libraries have threads that wake up now and then,
* they read and wrote nothing (files, pipes, output, most sockets) and fetched no page from a disk,
* and no GPU of this node was in use.

torchrun itself does a little of this all the time, so only what it starts counts. Changes are printed in lines of JSON:
``{"attempt": 1, "rank": 3, "state": "silent", "still_s": 301.5}`` once a rank has been silent for the whole bound, then
``moving`` again, ``ended``, or ``hidden`` where the activity of its processes cannot be seen from here.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

from toolkit.base import procfs
from toolkit.base.process_limits import limits
from toolkit.base.procfs import ProcessStat
from toolkit.devices.on_node import Gpus, GpusError
from toolkit.files.rundir import RANK_VARIABLE, RunDir
from toolkit.plugins.node_watch.sysfs import open_gpus

#: A share of one core. A rank that waits in a barrier of gloo uses 0.002; its data workers, a twentieth of that.
IDLE_SHARE = 0.01
#: The kernel counts in hundredths of a second.
CPU_GRAIN_S = 0.02
#: The states of a rank that are reported.
MOVING, SILENT, ENDED, HIDDEN = "moving", "silent", "ended", "hidden"
#: The field of the pages that a process has fetched from a disk, see `toolkit.base.procfs`.
MAJOR_FAULTS = 12
#: Looks in the time after which a rank counts as silent, and the bounds of the time between two looks.
LOOKS, SHORTEST_LOOK_S, LONGEST_LOOK_S = 30, 0.2, 10.0
#: A process that is younger than this may still become another program, with another environment.
YOUNG_S = 60.0


def look_every_s(bound_s: float) -> float:
    """Return the time between two looks."""
    return min(max(bound_s / LOOKS, SHORTEST_LOOK_S), LONGEST_LOOK_S)


@dataclass(frozen=True)
class Usage:
    """What one process has used since it began."""

    cpu_s: float
    #: Bytes read and written, and pages fetched from a disk; None where the activity cannot be seen.
    transfers: tuple[int, ...] | None


#: The usage of a process whose own activity is no sign of life.
NOTHING = Usage(0.0, ())
#: Modules and programs that start a script and look after it.
_AGENT_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
_AGENT_PROGRAMS = {"torchrun", "accelerate", "accelerate-launch"}
#: Programs whose work is done by processes outside the rank: on another node, or of a daemon.
_REMOTE = {"srun", "ssh", "docker", "kubectl"}
Usages: TypeAlias = dict[tuple[int, int], Usage]  #: by process id and start


class RankProcesses:
    """Finds the processes of the ranks on this node, and what each has used."""

    def __init__(self, run: RunDir, attempt: int, proc: Path = Path("/proc")) -> None:
        wanted = re.escape(run.rank_tag(attempt, "RANK")).replace("RANK", "([0-9]+)")
        self._mark = _variable(RANK_VARIABLE, wanted)
        node = os.environ.get("SLURMD_NODENAME")  # nodes of a test cluster may see each other's processes
        self._node = None if node is None else _variable("SLURMD_NODENAME", re.escape(node))
        self._proc = proc
        self._ranks: dict[tuple[int, int], int | None] = {}  #: by process whose environment has been read
        self._agents: dict[tuple[int, int], bool] = {}

    def read(self) -> dict[int, Usages]:
        """Return the living processes of each rank."""
        stats = {pid: stat for pid, stat in procfs.read_all(self._proc).items() if not stat.has_ended}
        alive = {(pid, stat.started_ticks) for pid, stat in stats.items()}
        self._ranks = {process: rank for process, rank in self._ranks.items() if process in alive}
        self._agents = {process: known for process, known in self._agents.items() if process in alive}
        uptime_s = float(self._text("uptime").split()[0])
        # The rank of each process, for this look. Process 0 ends the search for parents.
        ranks: dict[int, int | None] = {0: None}
        found: dict[int, Usages] = defaultdict(dict)
        for pid, stat in stats.items():
            rank = self._rank_of(pid, stats, ranks, uptime_s)
            if rank is None:
                continue
            usage = Usage(stat.cpu_s, self._transfers(pid, stat))
            # A launcher's own work is no sign of life.
            found[rank][pid, stat.started_ticks] = NOTHING if self._is_agent(pid, stat, uptime_s) else usage
        return dict(found)

    def pids(self) -> dict[int, list[int]]:
        """Return the processes of each rank, oldest first."""
        return {rank: [pid for pid, _ in sorted(usages, key=itemgetter(1))] for rank, usages in self.read().items()}

    def is_traced(self, pid: int) -> bool:
        """True if a debugger holds this process."""
        tracer = re.search(r"^TracerPid:\s*(\d+)", self._text(f"{pid}/status"), re.MULTILINE)
        return tracer is not None and tracer[1] != "0"

    def _rank_of(
        self, pid: int, stats: Mapping[int, ProcessStat], ranks: dict[int, int | None], uptime_s: float
    ) -> int | None:
        """Return the rank by the process's own mark, else its parent's. ``ranks`` caches the results of one look."""
        if pid in ranks or pid not in stats:
            return ranks.get(pid)
        ranks[pid] = None  # prevents a cycle, even if processes change during the look
        stat = stats[pid]
        rank = self._marked(pid, stat, uptime_s)
        ranks[pid] = self._rank_of(stat.parent, stats, ranks, uptime_s) if rank is None else rank
        return ranks[pid]

    def _marked(self, pid: int, stat: ProcessStat, uptime_s: float) -> int | None:
        process = (pid, stat.started_ticks)
        if process not in self._ranks:
            environ = self._bytes(f"{pid}/environ")
            match = self._mark.search(environ)
            rank = int(match[1]) if match and (self._node is None or self._node.search(environ)) else None
            if rank is None and self._is_young(stat, uptime_s):
                return None
            self._ranks[process] = rank
        return self._ranks[process]

    def _is_agent(self, pid: int, stat: ProcessStat, uptime_s: float) -> bool:
        process = (pid, stat.started_ticks)
        if process in self._agents:
            return self._agents[process]
        found = is_torchrun(self._text(f"{pid}/cmdline").split("\0"))
        if not self._is_young(stat, uptime_s):
            self._agents[process] = found
        return found

    def _is_young(self, stat: ProcessStat, uptime_s: float) -> bool:
        return uptime_s - stat.started_s < YOUNG_S

    def _transfers(self, pid: int, stat: ProcessStat) -> tuple[int, ...] | None:
        if stat.name in _REMOTE:
            return None
        counters = dict(re.findall(r"(\w+): (\d+)", self._text(f"{pid}/io")))
        names = ("rchar", "wchar", "read_bytes", "write_bytes")
        if not counters.keys() >= {*names}:
            return None
        return (*(int(counters[name]) for name in names), stat.number(MAJOR_FAULTS))

    def _text(self, name: str) -> str:
        return self._bytes(name).decode(errors="replace")

    def _bytes(self, name: str) -> bytes:
        """Return the content; empty if it cannot be read. The process may have ended, or be another user's."""
        try:
            return (self._proc / name).read_bytes()
        except OSError:
            return b""


def is_torchrun(words: Sequence[str]) -> bool:
    """True for the command line of torchrun or the like. A script with such a word as an argument is none."""
    for place, word in enumerate(words[1:], 1):
        # The first word that is no option is the program: the script, or the module after -m.
        if word == "-m":
            return words[place + 1 : place + 2] != [] and words[place + 1] in _AGENT_MODULES
        if word == "-c" or not word.startswith("-"):
            return Path(word).name in _AGENT_PROGRAMS
    return False


def _variable(name: str, value: str) -> re.Pattern[bytes]:
    """Return the pattern of a variable in ``/proc/PID/environ``; ``value`` is a pattern, too."""
    return re.compile(rf"(?:^|\0){name}={value}\0".encode())


def has_moved(before: Usages, after: Usages, elapsed_s: float) -> bool:
    """True if a rank's processes did anything in between, or may have."""
    if before.keys() != after.keys():
        return True
    used_s = 0.0
    for process, usage in after.items():
        if usage.transfers is None or usage.transfers != before[process].transfers:
            return True
        used_s += usage.cpu_s - before[process].cpu_s
    return used_s > IDLE_SHARE * elapsed_s + CPU_GRAIN_S


class GpuUse:
    """Asks the driver of the GPUs, in a thread: a faulty one does not answer."""

    def __init__(self, open_gpus: Callable[[Mapping[str, str]], Gpus | None] = open_gpus) -> None:
        self._open = open_gpus
        self._gpus: Gpus | None = None
        self._thread: threading.Thread | None = None
        self._is_busy = False

    def is_busy(self) -> bool:
        """True if a GPU that this node's ranks may use is busy now. False where that is not told."""
        if self._thread is None or not self._thread.is_alive():
            self._is_busy = False
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()
        self._thread.join(limits().gpu_answer_s)
        return self._is_busy

    def _look(self) -> None:
        with suppress(GpusError, OSError):
            self._gpus = self._gpus or self._open(os.environ)
            self._is_busy = self._gpus is not None and any(self._gpus.utilization(gpu).busy for gpu in self._gpus.gpus)


@dataclass
class _WatchedRank:
    usages: Usages = field(default_factory=dict)
    still_s: float = 0.0
    reported: str = MOVING


class SilentRankDetector:
    """Tells which ranks of this node have been silent for ``bound_s``. Time without a look does not count."""

    def __init__(
        self,
        processes: RankProcesses,
        bound_s: float,
        is_gpu_busy: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._processes, self._bound_s, self._is_gpu_busy = processes, bound_s, is_gpu_busy
        self._clock, self._looked = clock, clock()
        self._ranks: dict[int, _WatchedRank] = {}

    def look(self) -> list[dict[str, Any]]:
        """Look once; return the changes of each rank's state."""
        now, found = self._clock(), self._processes.read()
        elapsed_s = min(now - self._looked, 2 * look_every_s(self._bound_s))  # a suspended job stops this watch, too
        self._looked = now
        for rank in found.keys() - self._ranks.keys():
            self._ranks[rank] = _WatchedRank()
        for rank, known in self._ranks.items():
            usages = found.get(rank, {})
            known.still_s += elapsed_s
            if has_moved(known.usages, usages, elapsed_s):
                known.still_s = 0.0
            known.usages = usages
        # The driver is asked only when it matters. A busy GPU counts as a sign of life of all ranks.
        is_any_still = any(rank.usages and rank.still_s > self._bound_s / 2 for rank in self._ranks.values())
        if is_any_still and self._is_gpu_busy():
            for known in self._ranks.values():
                known.still_s = 0.0
        news = []
        for rank, known in sorted(self._ranks.items()):
            before, known.reported = known.reported, self._state(known)
            if known.reported != before:
                news.append({"rank": rank, "state": known.reported, "still_s": round(known.still_s, 1)})
        return news

    def _state(self, known: _WatchedRank) -> str:
        if not known.usages:
            return ENDED
        if any(usage.transfers is None for usage in known.usages.values()):
            return HIDDEN
        # A rank that a debugger holds is not silent.
        if known.still_s > self._bound_s and any(self._processes.is_traced(pid) for pid, _ in known.usages):
            known.still_s = 0.0
        return SILENT if known.still_s > self._bound_s else MOVING


def main() -> None:
    """Watch until the agent ends this process. Arguments: RUN_DIR ATTEMPT BOUND_S."""
    run_dir, attempt, bound_s = sys.argv[1:]
    watch = SilentRankDetector(RankProcesses(RunDir(Path(run_dir)), int(attempt)), float(bound_s), GpuUse().is_busy)
    while True:
        for change in watch.look():
            print(json.dumps({"attempt": int(attempt), **change}), flush=True)
        time.sleep(look_every_s(float(bound_s)))
