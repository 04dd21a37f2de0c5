"""Asks NVIDIA's driver about GPUs, by its library NVML. Needs no root and makes no CUDA context.

Function names, structures and constants are those of ``nvml.h``, as in NVIDIA's own Python module (nvidia-ml-py). What
a GPU or a driver does not support is None. A call may wait for ever for a lost GPU: only a process of its own may make
it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import Structure, Union, byref, c_int, c_int64, c_uint, c_uint32, c_ulonglong, c_void_p
from dataclasses import dataclass
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
#: Return codes.
SUCCESS, GPU_IS_LOST, RESET_REQUIRED = 0, 15, 16
#: Kinds of memory errors, and their counter since the driver was loaded.
UNCORRECTED, VOLATILE = 1, 0
#: Bits of the reasons for a low clock that a fault of cooling or power supply explains. A software power cap, idleness
#: and clocks that an administrator has set are normal.
HW_SLOWDOWN, HW_THERMAL, HW_POWER_BRAKE = 0x08, 0x40, 0x80
#: Field of ``nvmlDeviceGetFieldValues``: what has to be done to make the GPU well again.
RECOVERY_ACTION = 230
XID_EVENT = 0x08
#: The most Xid events that are read at once.
MOST_EVENTS = 100


class _Utilization(Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class _GpuMemory(Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _Value(Union):
    _fields_ = (("unsigned", c_uint), ("large", c_ulonglong))


class _FieldValue(Structure):
    _fields_ = (
        ("field", c_uint32),
        ("scope", c_uint32),
        ("timestamp", c_int64),
        ("latency_us", c_int64),
        ("type", c_uint),
        ("code", c_uint),
        ("value", _Value),
    )


class _Event(Structure):
    _fields_ = (
        ("device", c_void_p),
        ("type", c_ulonglong),
        ("data", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    )


class NvmlError(Exception):
    """NVML cannot be used."""


@dataclass(frozen=True)
class NvidiaGpu:
    """A GPU that this process may use. ``index`` is its place among all that NVML shows."""

    index: int
    uuid: str
    handle: c_void_p
    model: str = ""  #: such as NVIDIA H100 80GB HBM3; empty where the driver does not tell


@dataclass(frozen=True)
class Load:
    """How much a GPU works now. ``energy_j`` is counted since the driver was loaded."""

    busy: float | None  #: the share of the last second or less in which a kernel ran
    memory_bytes: int | None
    power_w: float | None
    energy_j: float | None


@dataclass(frozen=True)
class Condition:
    """How well a GPU is."""

    is_lost: bool = False  #: it answers no more, or only after a reset
    recovery_action: int | None = None  #: 0 for none; nvmlDeviceGpuRecoveryAction_t
    uncorrected_errors: int | None = None  #: of its memory, since the driver was loaded
    remapped_rows: int | None = None  #: of its memory, after uncorrected errors
    has_remap_failed: bool | None = None
    slow_reasons: int | None = None
    link_width: int | None = None  #: lanes of PCIe, now and at most
    most_link_width: int | None = None
    link_generation: int | None = None
    most_link_generation: int | None = None


class Nvml:
    """The library, opened. ``visible`` is the value of CUDA_VISIBLE_DEVICES: other GPUs are another job's."""

    def __init__(self, visible: str | None, library: str = LIBRARY) -> None:
        """Open the library. Raises NvmlError where there is none, or no driver that works."""
        try:
            self._library = ctypes.CDLL(library)
            code = self._library.nvmlInit_v2()
        except (OSError, AttributeError) as error:
            raise NvmlError(str(error)) from error
        if code != SUCCESS:
            raise NvmlError(f"nvmlInit_v2 failed with code {code}")
        self.gpus = [gpu for gpu in self._all() if is_visible(gpu, visible)]
        self._events: c_void_p | None = c_void_p()
        if self._call("nvmlEventSetCreate", byref(self._events)) != SUCCESS:
            self._events = None
        for gpu in self.gpus if self._events is not None else ():
            self._call("nvmlDeviceRegisterEvents", gpu.handle, c_ulonglong(XID_EVENT), self._events)

    def _all(self) -> Iterator[NvidiaGpu]:
        count = c_uint()
        self._call("nvmlDeviceGetCount_v2", byref(count))
        for index in range(count.value):
            handle, uuid = c_void_p(), ctypes.create_string_buffer(96)
            if self._call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle)) != SUCCESS:
                continue
            self._call("nvmlDeviceGetUUID", handle, uuid, c_uint(len(uuid)))
            name = ctypes.create_string_buffer(96)
            self._call("nvmlDeviceGetName", handle, name, c_uint(len(name)))
            yield NvidiaGpu(index, uuid.value.decode(), handle, name.value.decode(errors="replace"))

    def load(self, gpu: NvidiaGpu) -> Load:
        """Return how much ``gpu`` works."""
        use = self._get("nvmlDeviceGetUtilizationRates", gpu, _Utilization)
        memory = self._get("nvmlDeviceGetMemoryInfo", gpu, _GpuMemory)
        milliwatts = self._number("nvmlDeviceGetPowerUsage", gpu, c_uint)
        millijoules = self._number("nvmlDeviceGetTotalEnergyConsumption", gpu, c_ulonglong)
        return Load(
            None if use is None else use.gpu / 100,
            None if memory is None else memory.used,
            None if milliwatts is None else milliwatts / 1000,
            None if millijoules is None else millijoules / 1000,
        )

    def condition(self, gpu: NvidiaGpu) -> Condition:
        """Return how well ``gpu`` is."""
        # This call's code also tells whether the GPU answers at all.
        errors = c_ulonglong()
        code = self._call("nvmlDeviceGetTotalEccErrors", gpu.handle, UNCORRECTED, VOLATILE, byref(errors))
        if code in (GPU_IS_LOST, RESET_REQUIRED):
            return Condition(is_lost=True)
        corrected, rows, is_pending, has_failed = c_uint(), c_uint(), c_uint(), c_uint()
        pointers = (byref(corrected), byref(rows), byref(is_pending), byref(has_failed))
        knows_rows = self._call("nvmlDeviceGetRemappedRows", gpu.handle, *pointers) == SUCCESS
        # Drivers before 535 know only the older name.
        reasons = self._number("nvmlDeviceGetCurrentClocksEventReasons", gpu, c_ulonglong)
        if reasons is None:
            reasons = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", gpu, c_ulonglong)
        action = _FieldValue(field=RECOVERY_ACTION)
        knows_action = self._call("nvmlDeviceGetFieldValues", gpu.handle, c_int(1), byref(action)) == SUCCESS
        return Condition(
            recovery_action=action.value.unsigned if knows_action and action.code == SUCCESS else None,
            uncorrected_errors=errors.value if code == SUCCESS else None,
            remapped_rows=rows.value if knows_rows else None,
            has_remap_failed=bool(has_failed.value) if knows_rows else None,
            slow_reasons=reasons,
            link_width=self._number("nvmlDeviceGetCurrPcieLinkWidth", gpu, c_uint),
            most_link_width=self._number("nvmlDeviceGetMaxPcieLinkWidth", gpu, c_uint),
            link_generation=self._number("nvmlDeviceGetCurrPcieLinkGeneration", gpu, c_uint),
            most_link_generation=self._number("nvmlDeviceGetMaxPcieLinkGeneration", gpu, c_uint),
        )

    def link(self, gpu: NvidiaGpu) -> tuple[int, int]:
        """Return the generation and the number of lanes of the PCIe link now. 0: it is not known."""
        names = ("nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth")
        generation, lanes = (self._number(name, gpu, c_uint) or 0 for name in names)
        return generation, lanes

    def xids(self) -> list[tuple[str, int]]:
        """Return the Xid errors since the last call, as GPU index and number. ``?``: an unknown GPU."""
        found: list[tuple[str, int]] = []
        event = _Event()
        while self._events is not None and len(found) < MOST_EVENTS:
            if self._call("nvmlEventSetWait_v2", self._events, byref(event), c_uint(0)) != SUCCESS:
                break
            index = next((str(gpu.index) for gpu in self.gpus if gpu.handle.value == event.device), "?")
            found.append((index, event.data))
        return found

    def _number(self, name: str, gpu: NvidiaGpu, kind: type[Any]) -> int | None:
        value = self._get(name, gpu, kind)
        return None if value is None else int(value.value)

    def _get(self, name: str, gpu: NvidiaGpu, kind: type[Any]) -> Any:
        value = kind()
        return value if self._call(name, gpu.handle, byref(value)) == SUCCESS else None

    def _call(self, name: str, *arguments: Any) -> int:
        """Call a function and return its code. -1: the library is too old to have it."""
        function = getattr(self._library, name, None)
        return -1 if function is None else int(function(*arguments))


def is_visible(gpu: NvidiaGpu, visible: str | None) -> bool:
    """True if CUDA_VISIBLE_DEVICES names the GPU. The name of a part of a GPU (MIG) does not tell of which."""
    if visible is None or "MIG" in visible:
        return True
    words = [word.strip() for word in visible.split(",")]
    return any(word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word)) for word in words)
