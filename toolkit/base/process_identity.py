"""Tells a process from every other one, on any machine.

A pid names many processes in the course of time, and a host's name may change or be that of several machines. The
kernel's id of the boot, the pid namespace and the start time do not.
"""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from enum import IntEnum, auto
from functools import cache
from pathlib import Path

from toolkit.base import proc_stat


class Life(IntEnum):
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
        stat = proc_stat.read(pid)
        return ProcessIdentity(socket.gethostname(), pid, f"{_here()}:{stat.started_ticks if stat else 'ended'}")

    @staticmethod
    def parse(text: str) -> ProcessIdentity | None:
        """Return the process of a text; None for another text."""
        host, pid, birth = (*text.split(), "", "", "")[:3]
        return ProcessIdentity(host, int(pid), birth) if pid.isdecimal() else None

    def __str__(self) -> str:
        return f"{self.host} {self.pid} {self.birth}".strip()

    def life(self, seen: float = 0.0) -> Life:
        """Return whether it lives. ``seen`` is the last time at which it is known to have lived."""
        stat = proc_stat.read(self.pid)
        is_there = stat is not None and stat.state not in "ZX"
        place, _, started = self.birth.rpartition(":")
        if place == _here():
            return Life.ALIVE if stat and is_there and str(stat.started_ticks) == started else Life.ENDED
        if self.host != socket.gethostname():
            return Life.UNSEEN
        if not place:  # another process may have got the pid
            return Life.UNSEEN if is_there else Life.ENDED
        # This machine was started again. Else it is another one of the same name, or another container on this one.
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        is_of_this_boot = place.partition(":")[0] == _here().partition(":")[0]
        return Life.ENDED if seen < booted and not is_of_this_boot else Life.UNSEEN


@cache
def _here() -> str:
    """Return this machine's boot and our pid namespace, in which alone a pid means a process."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"
