"""Watches one node while ranks work: a child of the node's agent, see :mod:`toolkit.plugins.node_watch.node_monitor`.

It prints lines of JSON: ``{"usage": ...}`` at each sample of what the job uses, ``{"sick": "..."}`` for each problem of
the node, once. A problem either stays or has lasted for minutes, because every node is hot now and then. It is a
process of its own because a faulty disk or driver lets a reader wait for ever. It starts without the site's packages.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from toolkit.devices.on_node import GpuHealth, Gpus, GpusError
from toolkit.plugins.node_watch import usage
from toolkit.plugins.node_watch.sysfs import number_in, open_gpus

#: Seconds between two samples. The first ones come sooner: a job may be short.
FIRST_SAMPLE_S, SAMPLE_EVERY_S, RAREST_SAMPLE_S = 1.0, 15.0, 120.0
#: Samples may use at most this share of one CPU, counted as if CREDIT_S had passed before the first one.
MOST_COST, CREDIT_S = 0.0008, 150.0
#: The first look at the node's health comes late enough not to delay the first ranks.
FIRST_LOOK_S = 10.0


def wait_s(number: int, cost_s: float, elapsed_s: float) -> float:
    """Return the seconds from sample ``number``, from 0, to the next. All took ``cost_s`` of ``elapsed_s``."""
    usual_s = min(FIRST_SAMPLE_S * 2.0 ** min(number, 9), SAMPLE_EVERY_S)
    return min(max(usual_s, cost_s / MOST_COST - CREDIT_S - elapsed_s), RAREST_SAMPLE_S)


def main() -> None:
    """Write samples and findings until the agent dies: the kernel then kills this process."""
    # Without a driver that works, everything but the GPUs is still watched.
    gpus = None
    try:
        gpus = open_gpus(os.environ)
        if gpus is not None and gpus.cannot_tell:
            _show(log=f"some GPU metrics are unavailable: {gpus.cannot_tell}")
    except GpusError as error:
        _show(log=f"the GPUs are not monitored: {error}")
    sampler = usage.NodeSampler(usage.JobProcesses(os.getppid(), os.environ), gpus)
    health, number, cost_s = NodeHealthMonitor(gpus=gpus), 0, 0.0
    next_sample = began = time.monotonic()
    next_look = began + FIRST_LOOK_S
    while True:
        now = time.monotonic()
        # What all samples have cost so far decides how soon the next one may come, see MOST_COST.
        if now >= next_sample:
            used_s = time.process_time()
            _show(usage=asdict(sampler.sample()))
            cost_s += time.process_time() - used_s
            next_sample = now + wait_s(number, cost_s, now - began)
            number += 1
        if now >= next_look:
            next_look = now + LOOK_EVERY_S
            for finding in health.look():
                _show(sick=finding)
        time.sleep(max(0.0, min(next_sample, next_look) - time.monotonic()))


def _show(**message: object) -> None:
    print(json.dumps(message), flush=True)


#: Seconds between two looks.
LOOK_EVERY_S = 30.0
#: The driver, whose locks each question takes, is asked at every second look.
LOOKS_PER_GPU_LOOK = 2
#: Heat, slow GPUs and links must be seen for five minutes, a full disk for one, without a break: this many looks.
HOT_LOOKS, SLOW_GPU_LOOKS, FULL_LOOKS = 10, 5, 2
#: A disk with less room than this is full.
LEAST_FREE_BYTES = 16 << 20


class NodeHealthMonitor:
    """What is wrong with this node, found look by look. ``root`` is the folder in which ``sys`` and ``tmp`` lie."""

    def __init__(self, root: Path = Path("/"), gpus: Gpus | None = None) -> None:
        self._root, self._gpus = root, gpus
        self._looks = 0
        self._first: dict[str, int] = {}  #: the first value of each counter of errors
        self._throttled = 0
        self._seen: Counter[str] = Counter()  #: by finding, the looks without a break that have seen it
        self._reported: set[str] = set()

    def look(self) -> list[str]:
        """Look once, ``LOOK_EVERY_S`` after the last time; return what is new."""
        # Corrected errors are harmless: Linux, Documentation/driver-api/edac.rst.
        counts = sorted(self._root.glob("sys/devices/system/edac/mc/mc*/ue_count"))
        broken = (file.parent.name for file in counts if self._has_risen(str(file), number_in(file)))
        problems = [f"uncorrected memory errors ({name} of EDAC)" for name in broken]
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

    def _of_gpus(self) -> Iterator[str]:
        if self._gpus is None:
            return
        yield from self._gpus.faults()
        for gpu in self._gpus.gpus:
            name = f"GPU {gpu.index}"
            condition = self._gpus.health(gpu)
            if condition.is_lost:
                yield f"{name} is lost: the driver cannot reach it"
                continue
            yield from self._errors(name, condition)
            if self._lasts(name, condition.is_slowed, SLOW_GPU_LOOKS):
                yield f"{name} slowed down by heat or power"
            # An idle GPU saves power by a slower link, so its generation says something only at work.
            load = self._gpus.utilization(gpu)
            if self._lasts(f"{name} lanes", _is_below(condition.link_width, condition.most_link_width), SLOW_GPU_LOOKS):
                yield f"{name} has {condition.link_width} of its {condition.most_link_width} PCIe lanes"
            is_slow = bool(load.busy) and _is_below(condition.link_generation, condition.most_link_generation)
            if self._lasts(f"{name} link", is_slow, SLOW_GPU_LOOKS):
                yield (
                    f"{name} is linked by PCIe {condition.link_generation} and not "
                    f"{condition.most_link_generation} while it works"
                )

    def _errors(self, name: str, condition: GpuHealth) -> Iterator[str]:
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
