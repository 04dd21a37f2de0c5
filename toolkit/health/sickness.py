"""Finds what is wrong with one node while ranks work, for the monitor.

A problem either stays (memory that has failed) or has lasted for minutes, because every node is hot now and then.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from toolkit.health.nvml import HW_POWER_BRAKE, HW_SLOWDOWN, HW_THERMAL, Condition, Nvml

LOOK_EVERY_S = 30.0
#: The driver, whose locks each question takes, is asked at every second look.
LOOKS_PER_GPU_LOOK = 2
#: Heat, slow GPUs and links must be seen for five minutes, a full disk for one, without a break: this many looks.
HOT_LOOKS, SLOW_GPU_LOOKS, FULL_LOOKS = 10, 5, 2
#: A disk with less room than this is full.
LEAST_FREE_BYTES = 16 << 20
#: What a GPU needs before it works again, nvmlDeviceGpuRecoveryAction_t. After an action that is not listed it is told
#: by its number. The headers disagree on 5: in nvidia-ml-py 13.580 it is a reset of the bus, in 13.615 that is 6.
RECOVERY_ACTIONS = {
    1: "needs a reset",
    2: "needs a reboot of the node",
    3: "must be drained of peer traffic",
    4: "must be drained and reset",
    5: "needs its IMEX domain recovered, or a reset of its bus, by the driver's version",
    6: "needs a reset of its bus",
    7: "needs a reboot of the system",
}
#: Xid errors that lie with the GPU, its memory, its links or its firmware. Most others are the fault of a program
#: (13, 31, 43, 45, 69), or are seen by another figure here (63: a row to be remapped, 154: an action). From NVIDIA's
#: catalogue of Xid errors.
XIDS = {
    48: "uncorrected memory error",
    62: "internal micro-controller halted",
    64: "memory row could not be remapped",
    74: "NVLink error",
    79: "fallen off the bus",
    95: "uncontained memory error",
    119: "firmware does not answer",
    120: "firmware error",
    140: "unrecovered memory error",
}


class Sickness:
    """What is wrong with this node, found look by look.

    ``root`` is the folder in which ``sys`` and ``tmp`` lie, ``nvml`` tells of the GPUs, if there are any.
    """

    def __init__(self, root: Path = Path("/"), nvml: Nvml | None = None) -> None:
        self._root, self._nvml = root, nvml
        self._looks = 0
        self._first: dict[str, int] = {}  #: the first value of each counter of errors
        self._throttled = 0
        self._seen: Counter[str] = Counter()  #: by finding, the looks without a break that have seen it
        self._reported: set[str] = set()

    def look(self) -> list[str]:
        """Look once, ``LOOK_EVERY_S`` after the last time; return what is new."""
        problems = [*self._memory()]
        # Intel's counters count each time a core or package is too hot (Linux, therm_throt.c).
        files = self._root.glob("sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/*_throttle_count")
        before, self._throttled = self._throttled, sum(_number(file) or 0 for file in files)
        if self._lasts("heat", self._looks > 0 and self._throttled > before, HOT_LOOKS):
            problems.append("processors throttled for heat")
        folder = self._root / "tmp"
        with contextlib.suppress(OSError):
            disk = os.statvfs(folder)
            if self._lasts("disk", disk.f_bavail * disk.f_frsize < LEAST_FREE_BYTES, FULL_LOOKS):
                problems.append(f"no room on {folder}")
        if self._looks % LOOKS_PER_GPU_LOOK == 0:
            problems += self._gpus()
        self._looks += 1
        new = [text for text in problems if text not in self._reported]
        self._reported |= {*new}
        return new

    def _memory(self) -> Iterator[str]:
        """Yield uncorrected memory errors; corrected ones are harmless.

        Source: Linux, Documentation/driver-api/edac.rst.
        """
        for file in sorted(self._root.glob("sys/devices/system/edac/mc/mc*/ue_count")):
            if self._has_risen(str(file), _number(file)):
                yield f"uncorrected memory errors ({file.parent.name} of EDAC)"

    def _gpus(self) -> Iterator[str]:
        if self._nvml is None:
            return
        for index, number in self._nvml.xids():
            if number in XIDS:
                yield f"GPU {index}: {XIDS[number]} (Xid {number})"
        for gpu in self._nvml.gpus:
            name = f"GPU {gpu.index}"
            condition = self._nvml.condition(gpu)
            if condition.is_lost:
                yield f"{name} is lost: the driver cannot reach it"
                continue
            yield from self._errors(name, condition)
            reasons = condition.slow_reasons or 0
            if self._lasts(name, bool(reasons & (HW_SLOWDOWN | HW_THERMAL | HW_POWER_BRAKE)), SLOW_GPU_LOOKS):
                yield f"{name} slowed down by heat or power"
            # An idle GPU saves power by a slower link, so its generation says something only at work.
            load = self._nvml.load(gpu)
            if self._lasts(f"{name} lanes", _is_below(condition.link_width, condition.most_link_width), SLOW_GPU_LOOKS):
                yield f"{name} has {condition.link_width} of its {condition.most_link_width} PCIe lanes"
            is_slow = bool(load.busy) and _is_below(condition.link_generation, condition.most_link_generation)
            if self._lasts(f"{name} link", is_slow, SLOW_GPU_LOOKS):
                yield (
                    f"{name} is linked by PCIe {condition.link_generation} and not "
                    f"{condition.most_link_generation} while it works"
                )

    def _errors(self, name: str, condition: Condition) -> Iterator[str]:
        """Yield new errors of a GPU's memory, and the recovery action that the driver names."""
        if condition.recovery_action:
            action = condition.recovery_action
            yield f"{name} {RECOVERY_ACTIONS.get(action, f'needs recovery action {action}')}"
        if self._has_risen(name, condition.uncorrected_errors):
            yield f"uncorrected memory errors (ECC of {name})"
        # A row that waits for a reset was lost by an earlier job: the GPU works, and must not be left for it.
        if self._has_risen(f"{name} rows", condition.remapped_rows):
            yield f"{name} has remapped rows of its memory after uncorrected errors"
        if condition.has_remap_failed:
            yield f"{name} has memory rows that could not be remapped"

    def _has_risen(self, counter: str, value: int | None) -> bool:
        return value is not None and value > self._first.setdefault(counter, value)

    def _lasts(self, what: str, is_so: bool, looks: int) -> bool:
        self._seen[what] = self._seen[what] + 1 if is_so else 0
        return self._seen[what] >= looks


def _is_below(value: int | None, most: int | None) -> bool:
    return value is not None and most is not None and value < most


def _number(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text())
    return None
