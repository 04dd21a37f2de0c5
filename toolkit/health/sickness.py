"""Finds what is wrong with one node while ranks work, for the monitor.

A problem either stays (memory that has failed) or has lasted for minutes, because every node is hot now and then.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

LOOK_EVERY_S = 30.0
#: nvidia-smi, which takes the driver's locks, is started at every second look.
LOOKS_PER_GPU_LOOK = 2
#: Heat and slow GPUs must be seen for five minutes, a full disk for one, without a break: this many looks.
HOT_LOOKS, SLOW_GPU_LOOKS, FULL_LOOKS = 10, 5, 2
#: A disk with less room than this is full.
LEAST_FREE_BYTES = 16 << 20
#: From ``nvidia-smi --help-query-gpu``. Drivers since 535 write "event" for "throttle" and know both names.
GPU_FIELDS = "index,ecc.errors.uncorrected.volatile.total,clocks_throttle_reasons.hw_slowdown"


class Sickness:
    """What is wrong with this node, found look by look.

    ``root`` is the folder in which ``sys`` and ``tmp`` lie, ``ask_gpus`` returns nvidia-smi's lines of ``GPU_FIELDS``.
    """

    def __init__(self, root: Path = Path("/"), ask_gpus: Callable[[], list[str]] | None = None) -> None:
        self._root, self._ask_gpus = root, ask_gpus or ask_smi
        self._looks = 0
        self._first: dict[str, int] = {}  #: the first value of each counter of errors
        self._throttled = 0
        self._seen: Counter[str] = Counter()  #: by finding, the looks without a break that have seen it
        self._reported: set[str] = set()

    def look(self) -> list[str]:
        """Look once, ``LOOK_EVERY_S`` after the last time; return what is new."""
        problems = [*self._memory(), *self._heat(), *self._disk()]
        if self._looks % LOOKS_PER_GPU_LOOK == 0:
            problems += self._gpus()
        self._looks += 1
        new = [text for text in problems if text not in self._reported]
        self._reported |= {*new}
        return new

    def _memory(self) -> Iterator[str]:
        """Yield uncorrected memory errors; corrected ones are harmless. From Linux,
        Documentation/driver-api/edac.rst."""
        for file in sorted(self._root.glob("sys/devices/system/edac/mc/mc*/ue_count")):
            if self._has_risen(str(file), _number(file)):
                yield f"uncorrected memory errors ({file.parent.name} of EDAC)"

    def _heat(self) -> Iterator[str]:
        """Yield heat, by Intel's counters. They count each time a core or package is too hot (Linux, therm_throt.c)."""
        files = self._root.glob("sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/*_throttle_count")
        before, self._throttled = self._throttled, sum(_number(file) or 0 for file in files)
        is_hot = self._looks > 0 and self._throttled > before
        if self._lasts("heat", is_hot, HOT_LOOKS):
            yield "processors throttled for heat"

    def _disk(self) -> Iterator[str]:
        folder = self._root / "tmp"
        with contextlib.suppress(OSError):
            disk = os.statvfs(folder)
            if self._lasts("disk", disk.f_bavail * disk.f_frsize < LEAST_FREE_BYTES, FULL_LOOKS):
                yield f"no room on {folder}"

    def _gpus(self) -> Iterator[str]:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            for line in self._ask_gpus():
                index, errors, slowdown = (field.strip() for field in line.split(","))
                if self._has_risen(f"GPU {index}", int(errors) if errors.isdigit() else None):
                    yield f"uncorrected memory errors (ECC of GPU {index})"
                if self._lasts(f"GPU {index}", slowdown == "Active", SLOW_GPU_LOOKS):
                    yield f"GPU {index} slowed down by heat or power"

    def _has_risen(self, counter: str, value: int | None) -> bool:
        return value is not None and value > self._first.setdefault(counter, value)

    def _lasts(self, what: str, is_so: bool, looks: int) -> bool:
        self._seen[what] = self._seen[what] + 1 if is_so else 0
        return self._seen[what] >= looks


def ask_smi() -> list[str]:
    """Return nvidia-smi's lines. Raises OSError or subprocess.SubprocessError if it is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _number(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return None
