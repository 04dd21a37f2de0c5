"""The signs that a node is sick, looked for while ranks work.

A problem either stays (memory that has failed) or has lasted for minutes, because every node is hot now and then.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from toolkit.devices.watched import Condition, Gpus
from toolkit.plugins.node_watch.sysfs import number_in

#: Seconds between two looks.
LOOK_EVERY_S = 30.0
#: The driver, whose locks each question takes, is asked at every second look.
LOOKS_PER_GPU_LOOK = 2
#: Heat, slow GPUs and links must be seen for five minutes, a full disk for one, without a break: this many looks.
HOT_LOOKS, SLOW_GPU_LOOKS, FULL_LOOKS = 10, 5, 2
#: A disk with less room than this is full.
LEAST_FREE_BYTES = 16 << 20


class Sickness:
    """What is wrong with this node, found look by look.

    ``root`` is the folder in which ``sys`` and ``tmp`` lie, ``gpus`` tells of the GPUs, if there are any.
    """

    def __init__(self, root: Path = Path("/"), gpus: Gpus | None = None) -> None:
        self._root, self._gpus = root, gpus
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
        before, self._throttled = self._throttled, sum(number_in(file) or 0 for file in files)
        if self._lasts("heat", self._looks > 0 and self._throttled > before, HOT_LOOKS):
            problems.append("processors throttled for heat")
        folder = self._root / "tmp"
        with contextlib.suppress(OSError):
            disk = os.statvfs(folder)
            if self._lasts("disk", disk.f_bavail * disk.f_frsize < LEAST_FREE_BYTES, FULL_LOOKS):
                problems.append(f"no room on {folder}")
        if self._looks % LOOKS_PER_GPU_LOOK == 0:
            problems += self._of_gpus()
        self._looks += 1
        new = [text for text in problems if text not in self._reported]
        self._reported |= {*new}
        return new

    def _memory(self) -> Iterator[str]:
        """Yield uncorrected memory errors; corrected ones are harmless.

        Source: Linux, Documentation/driver-api/edac.rst.
        """
        for file in sorted(self._root.glob("sys/devices/system/edac/mc/mc*/ue_count")):
            if self._has_risen(str(file), number_in(file)):
                yield f"uncorrected memory errors ({file.parent.name} of EDAC)"

    def _of_gpus(self) -> Iterator[str]:
        if self._gpus is None:
            return
        yield from self._gpus.faults()
        for gpu in self._gpus.gpus:
            name = f"GPU {gpu.index}"
            condition = self._gpus.condition(gpu)
            if condition.is_lost:
                yield f"{name} is lost: the driver cannot reach it"
                continue
            yield from self._errors(name, condition)
            if self._lasts(name, condition.is_slowed, SLOW_GPU_LOOKS):
                yield f"{name} slowed down by heat or power"
            # An idle GPU saves power by a slower link, so its generation says something only at work.
            load = self._gpus.load(gpu)
            if self._lasts(f"{name} lanes", _is_below(condition.link_width, condition.most_link_width), SLOW_GPU_LOOKS):
                yield f"{name} has {condition.link_width} of its {condition.most_link_width} PCIe lanes"
            is_slow = bool(load.busy) and _is_below(condition.link_generation, condition.most_link_generation)
            if self._lasts(f"{name} link", is_slow, SLOW_GPU_LOOKS):
                yield (
                    f"{name} is linked by PCIe {condition.link_generation} and not "
                    f"{condition.most_link_generation} while it works"
                )

    def _errors(self, name: str, condition: Condition) -> Iterator[str]:
        """Yield new errors of a GPU's memory, and what the driver says that it needs."""
        if condition.needs:
            yield f"{name} {condition.needs}"
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
