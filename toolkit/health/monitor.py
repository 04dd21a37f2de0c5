"""Watches one node while ranks work: a child of the node's agent, started with ``MONITOR_COMMAND``.

It prints lines of JSON: ``{"usage": ...}`` at each sample of what the job uses, ``{"sick": "..."}`` for each problem of
the node, once. A problem either stays (memory that has failed) or has lasted for minutes, because every node is hot now
and then. It is a process of its own because a faulty disk or driver lets a reader wait for ever, and the agent must not
wait. It needs only Python's standard library, and starts without the site's packages.
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

from toolkit.health import bare_python, usage
from toolkit.health.nvml import HW_POWER_BRAKE, HW_SLOWDOWN, HW_THERMAL, Condition, Nvml, NvmlError

MONITOR_COMMAND = bare_python("toolkit.health.monitor")
#: Seconds between two samples. The first ones come sooner: a job may be short.
FIRST_SAMPLE_S, SAMPLE_EVERY_S, RAREST_SAMPLE_S = 1.0, 15.0, 120.0
#: Samples may use at most this share of one CPU, counted as if CREDIT_S had passed before the first one.
MOST_COST, CREDIT_S = 0.0008, 150.0
#: The first look at the node's health comes late enough not to delay the first ranks.
FIRST_LOOK_S = 10.0


def wait_s(number: int, cost_s: float, elapsed_s: float) -> float:
    """Return the seconds from sample ``number``, counted from 0, to the next.

    All samples so far have taken ``cost_s`` on a processor, within ``elapsed_s``.
    """
    usual_s = min(FIRST_SAMPLE_S * 2.0 ** min(number, 9), SAMPLE_EVERY_S)
    return min(max(usual_s, cost_s / MOST_COST - CREDIT_S - elapsed_s), RAREST_SAMPLE_S)


def main() -> None:
    """Write samples and findings until the agent dies: the kernel then kills this process."""
    # Without a driver that works, everything but the GPUs is still watched.
    nvml = None
    try:
        if Path("/dev/nvidiactl").exists():
            nvml = Nvml(os.environ.get("CUDA_VISIBLE_DEVICES"))
    except NvmlError as error:
        _show(log=f"the GPUs are not watched: {error}")
    sampler = usage.NodeSampler(usage.JobProcesses(os.getppid(), os.environ), nvml)
    health, number, cost_s = Sickness(nvml=nvml), 0, 0.0
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
