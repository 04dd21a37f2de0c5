"""Processes as /proc shows them: who they are, also after a reboot, and what they do.

A process is told from every other one, on any machine: a pid names many processes in the course of time, and a host's
name may change or be that of several machines. The kernel's id of the boot, the pid namespace and the start time do
not.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Liveness(IntEnum):
    """What can be seen of a process from here."""

    ALIVE = auto()
    UNSEEN = auto()  #: it is, or was, on another machine or in another container
    ENDED = auto()


@dataclass(frozen=True)
class ProcessIdentity:
    """A process. As text: host, pid and birth, in one line."""

    host: str
    pid: int
    birth: str = ""  #: boot id, pid namespace and start in ticks; empty in a file with host and pid alone

    @staticmethod
    def of(pid: int) -> ProcessIdentity:
        """Return the identity of a process of this machine."""
        stat = read(pid)
        return ProcessIdentity(socket.gethostname(), pid, f"{_here()}:{stat.started_ticks if stat else 'ended'}")

    @staticmethod
    def parse(text: str) -> ProcessIdentity | None:
        """Return the process of a text; None for another text."""
        host, pid, birth = (*text.split(), "", "", "")[:3]
        return ProcessIdentity(host, int(pid), birth) if pid.isdecimal() else None

    def __str__(self) -> str:
        return f"{self.host} {self.pid} {self.birth}".strip()

    def life(self, seen: float = 0.0) -> Liveness:
        """Return whether it lives. ``seen`` is the last time at which it is known to have lived."""
        stat = read(self.pid)
        if stat is not None and stat.has_ended:
            stat = None
        place, _, started = self.birth.rpartition(":")
        if place == _here():
            return Liveness.ALIVE if stat and str(stat.started_ticks) == started else Liveness.ENDED
        if self.host != socket.gethostname():
            return Liveness.UNSEEN
        if not place:  # another process may have got the pid
            return Liveness.UNSEEN if stat else Liveness.ENDED
        # This machine was started again. Else it is another one of the same name, or another container on this one.
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        is_of_this_boot = place.partition(":")[0] == _here().partition(":")[0]
        return Liveness.ENDED if seen < booted and not is_of_this_boot else Liveness.UNSEEN


@cache
def _here() -> str:
    """Return this machine's boot and our pid namespace, in which alone a pid means a process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"


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

    def catches_signal(self, number: int) -> bool:
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
        """Return its start, in ticks since the machine's. Two processes with one pid differ in it."""
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


def pids(proc: Path = Path("/proc")) -> set[int]:
    """Return the pids of all processes."""
    return {int(entry.name) for entry in os.scandir(proc) if entry.name.isdigit()}


def read_all(proc: Path = Path("/proc"), some: Collection[int] | None = None) -> dict[int, ProcessStat]:
    """Return the stat of each process by its pid, of all or of ``some``. Zombies are among them."""
    return {pid: stat for pid in (pids(proc) if some is None else some) if (stat := read(pid, proc)) is not None}
