"""Reads ``/proc/PID/stat``. Fields have the numbers of proc_pid_stat(5)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class ProcessStat(NamedTuple):
    """What the kernel tells of one process."""

    name: str
    rest: list[str]  #: the fields after the name, from the third on

    def number(self, field: int) -> int:
        """Return a field that is a number."""
        return int(self.rest[field - 3])

    @property
    def state(self) -> str:
        """Return the state: ``Z`` and ``X`` are those of a process that has ended."""
        return self.rest[0]

    @property
    def parent(self) -> int:
        """Return the parent's pid; 0 for one outside of our pid namespace."""
        return self.number(4)

    @property
    def has_ended(self) -> bool:
        """True for a process that only waits to be reaped."""
        return self.state in "ZX"

    @property
    def session(self) -> int:
        """Return the pid of the leader of its session."""
        return self.number(6)

    def handles(self, number: int) -> bool:
        """True if the process has a handler for a signal, one up to 31."""
        return bool(self.number(34) >> (number - 1) & 1)

    @property
    def cpu_s(self) -> float:
        """Return the time on a CPU, utime and stime."""
        return (self.number(14) + self.number(15)) * TICK_S

    @property
    def family_cpu_s(self) -> float:
        """Return the time on a CPU with that of its ended children, cutime and cstime."""
        return self.cpu_s + (self.number(16) + self.number(17)) * TICK_S

    @property
    def started_ticks(self) -> int:
        """Return its start in ticks since the machine's start. It tells two processes with one pid apart."""
        return self.number(22)

    @property
    def started_s(self) -> float:
        """Return when it was started, in seconds since the machine's start."""
        return self.started_ticks * TICK_S


def parse(text: str) -> ProcessStat | None:
    """Return the content of a ``stat`` file. None for an empty text, as of a process that is gone.

    The name in parentheses may hold spaces and parentheses, so the last one ends it.
    """
    start, _, end = text.rpartition(")")
    rest = end.split()
    return ProcessStat(start.partition("(")[2], rest) if rest else None


def read(pid: int | str, proc: Path = Path("/proc")) -> ProcessStat | None:
    """Return the stat of a process. None if it is gone, or is another user's and hidden."""
    try:
        # The monitor reads those of all processes: through Path each takes more than twice as long.
        with open(f"{proc}/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123
            return parse(file.read().decode(errors="replace"))
    except OSError:
        return None
