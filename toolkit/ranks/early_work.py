"""Counts a rank's work before its first step as progress: it compiles, or chooses kernels, and reports nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from toolkit.base import proc_stat
from toolkit.hang import activity
from toolkit.hang.activity import Activity

#: A rank that waits in gloo uses 0.002 of a core; one that compiles, or whose compilers are programs, most of one.
WORKING_SHARE = 0.05
#: The kernel counts in hundredths of a second.
LOOK_EVERY_S = 2.0
#: In the other phases a rank waits for something, which may keep a core busy: NCCL does.
COMPILES_IN = frozenset({activity.SETTING_UP, activity.PRIMING, activity.IN_STEP, activity.OWN_CODE})


class EarlyWork:
    """Moves the count of ``activity`` while the rank and its children use a CPU, until its first step has ended."""

    def __init__(
        self,
        activity: Activity,
        cpu_s: Callable[[], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._activity, self._cpu_s, self._clock = activity, cpu_s or family_cpu_s, clock
        self._since, self._used_s = clock(), self._cpu_s()

    def look(self) -> None:
        """Compare the use of the CPU with that of the last look. To be called every second or so; it is cheap."""
        now = self._clock()
        if self._activity.step is not None or now - self._since < LOOK_EVERY_S:
            return
        used_s = self._cpu_s()
        is_working = used_s - self._used_s >= WORKING_SHARE * (now - self._since)
        if is_working and self._activity.phase in COMPILES_IN:
            self._activity.note_progress()
        self._since, self._used_s = now, used_s


def family_cpu_s(pid: int | None = None) -> float:
    """Return the time on a CPU of a process, this one by default, of its children and of theirs."""
    name = str(pid or os.getpid())
    stat = proc_stat.read(name)
    if stat is None:
        return 0.0
    used_s = stat.family_cpu_s
    for children in Path(f"/proc/{name}/task").glob("*/children"):
        try:
            pids = children.read_text().split()
        except OSError:  # a thread that has ended
            continue
        used_s += sum(family_cpu_s(int(child)) for child in pids)
    return used_s
