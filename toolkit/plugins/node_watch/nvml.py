"""Asks NVIDIA's driver about GPUs, by its library NVML. Needs no root and makes no CUDA context.

Function names, structures and constants are those of ``nvml.h``, as in NVIDIA's own Python module (nvidia-ml-py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import Structure, Union, byref, c_int, c_int64, c_uint, c_uint32, c_ulonglong, c_void_p, sizeof
from typing import Any

from toolkit.devices.on_node import GpuHealth, GpusError, Load, WatchedGpu

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
#: The most Xid events, and processes of a GPU, that are read at once.
MOST_EVENTS, MOST_PROCESSES = 100, 64
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


class _Utilization(Structure):
    _fields_ = (("gpu", c_uint), ("memory", c_uint))


class _GpuMemory(Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _GpuMemory2(Structure):
    _fields_ = (
        ("version", c_uint),
        ("total", c_ulonglong),
        ("reserved", c_ulonglong),
        ("free", c_ulonglong),
        ("used", c_ulonglong),
    )


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


class _GpuProcess(Structure):
    _fields_ = (("pid", c_uint), ("used", c_ulonglong), ("gpu_instance", c_uint), ("compute_instance", c_uint))


class _Event(Structure):
    _fields_ = (
        ("device", c_void_p),
        ("type", c_ulonglong),
        ("data", c_ulonglong),
        ("gpu_instance", c_uint),
        ("compute_instance", c_uint),
    )


class Nvml:
    """NVIDIA's GPUs that CUDA_VISIBLE_DEVICES names, as :class:`toolkit.devices.on_node.Gpus`."""

    cannot_tell = ""

    def __init__(self, visible: str | None, library: str = LIBRARY) -> None:
        """Open the library. Raises GpusError where there is none, or no driver that works."""
        try:
            self._library = ctypes.CDLL(library)
            code = self._library.nvmlInit_v2()
        except (OSError, AttributeError) as error:
            raise GpusError(str(error)) from error
        if code != SUCCESS:
            raise GpusError(f"nvmlInit_v2 failed with code {code}")
        self.gpus = [gpu for gpu, uuid in self._all() if is_visible(gpu.index, uuid, visible)]
        self._events: c_void_p | None = c_void_p()
        if self._call("nvmlEventSetCreate", byref(self._events)) != SUCCESS:
            self._events = None
        for gpu in self.gpus if self._events is not None else ():
            self._call("nvmlDeviceRegisterEvents", gpu.handle, c_ulonglong(XID_EVENT), self._events)

    def _all(self) -> Iterator[tuple[WatchedGpu, str]]:
        """Yield the GPUs that NVML shows, each with its UUID."""
        count = c_uint()
        self._call("nvmlDeviceGetCount_v2", byref(count))
        for index in range(count.value):
            handle, uuid = c_void_p(), ctypes.create_string_buffer(96)
            if self._call("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle)) != SUCCESS:
                continue
            self._call("nvmlDeviceGetUUID", handle, uuid, c_uint(len(uuid)))
            name = ctypes.create_string_buffer(96)
            self._call("nvmlDeviceGetName", handle, name, c_uint(len(name)))
            yield WatchedGpu(index, handle, name.value.decode(errors="replace")), uuid.value.decode()

    def utilization(self, gpu: WatchedGpu) -> Load:
        use = self._get("nvmlDeviceGetUtilizationRates", gpu, _Utilization)
        used, total = self._memory(gpu)
        milliwatts = self._number("nvmlDeviceGetPowerUsage", gpu, c_uint)
        millijoules = self._number("nvmlDeviceGetTotalEnergyConsumption", gpu, c_ulonglong)
        return Load(
            None if use is None else use.gpu / 100,
            used,
            None if milliwatts is None else milliwatts / 1000,
            None if millijoules is None else millijoules / 1000,
            total,
        )

    def _memory(self, gpu: WatchedGpu) -> tuple[int | None, int | None]:
        """Return the bytes in use and all bytes. What the driver keeps for itself counts as used in older drivers."""
        memory = _GpuMemory2(version=sizeof(_GpuMemory2) | 2 << 24)
        if self._call("nvmlDeviceGetMemoryInfo_v2", gpu.handle, byref(memory)) == SUCCESS:
            return memory.total - memory.reserved - memory.free, memory.total
        older = self._get("nvmlDeviceGetMemoryInfo", gpu, _GpuMemory)
        return (None, None) if older is None else (older.used, older.total)

    def health(self, gpu: WatchedGpu) -> GpuHealth:
        # This call's code also tells whether the GPU answers at all.
        errors = c_ulonglong()
        code = self._call("nvmlDeviceGetTotalEccErrors", gpu.handle, UNCORRECTED, VOLATILE, byref(errors))
        if code in (GPU_IS_LOST, RESET_REQUIRED):
            return GpuHealth(is_lost=True)
        corrected, rows, is_pending, has_failed = c_uint(), c_uint(), c_uint(), c_uint()
        pointers = (byref(corrected), byref(rows), byref(is_pending), byref(has_failed))
        knows_rows = self._call("nvmlDeviceGetRemappedRows", gpu.handle, *pointers) == SUCCESS
        # Drivers before 535 know only the older name.
        reasons = self._number("nvmlDeviceGetCurrentClocksEventReasons", gpu, c_ulonglong)
        if reasons is None:
            reasons = self._number("nvmlDeviceGetCurrentClocksThrottleReasons", gpu, c_ulonglong)
        action = _FieldValue(field=RECOVERY_ACTION)
        knows_action = self._call("nvmlDeviceGetFieldValues", gpu.handle, c_int(1), byref(action)) == SUCCESS
        number = action.value.unsigned if knows_action and action.code == SUCCESS else 0
        return GpuHealth(
            needs=RECOVERY_ACTIONS.get(number, f"needs recovery action {number}") if number else None,
            uncorrected_errors=errors.value if code == SUCCESS else None,
            remapped_rows=rows.value if knows_rows else None,
            has_remap_failed=bool(has_failed.value) if knows_rows else None,
            is_slowed=bool((reasons or 0) & (HW_SLOWDOWN | HW_THERMAL | HW_POWER_BRAKE)),
            link_width=self._number("nvmlDeviceGetCurrPcieLinkWidth", gpu, c_uint),
            most_link_width=self._number("nvmlDeviceGetMaxPcieLinkWidth", gpu, c_uint),
            link_generation=self._number("nvmlDeviceGetCurrPcieLinkGeneration", gpu, c_uint),
            most_link_generation=self._number("nvmlDeviceGetMaxPcieLinkGeneration", gpu, c_uint),
        )

    def link(self, gpu: WatchedGpu) -> tuple[int, int]:
        """Return the generation and the number of lanes of the PCIe link now. 0: it is not known."""
        names = ("nvmlDeviceGetCurrPcieLinkGeneration", "nvmlDeviceGetCurrPcieLinkWidth")
        generation, lanes = (self._number(name, gpu, c_uint) or 0 for name in names)
        return generation, lanes

    def processes(self, gpu: WatchedGpu) -> Iterator[int]:
        """Yield the processes with a context there. NVML hides those of other users' containers."""
        count, found = c_uint(MOST_PROCESSES), (_GpuProcess * MOST_PROCESSES)()
        code = self._call("nvmlDeviceGetComputeRunningProcesses_v3", gpu.handle, byref(count), found)
        if code == SUCCESS:
            yield from (process.pid for process in found[: count.value])

    def faults(self) -> Iterator[str]:
        """Yield the Xid errors of the hardware since the last call. ``GPU ?``: an unknown one."""
        event = _Event()
        for _ in range(MOST_EVENTS if self._events is not None else 0):
            if self._call("nvmlEventSetWait_v2", self._events, byref(event), c_uint(0)) != SUCCESS:
                break
            index = next((str(gpu.index) for gpu in self.gpus if gpu.handle.value == event.device), "?")
            if event.data in XIDS:
                yield f"GPU {index}: {XIDS[event.data]} (Xid {event.data})"

    def _number(self, name: str, gpu: WatchedGpu, kind: type[Any]) -> int | None:
        value = self._get(name, gpu, kind)
        return None if value is None else int(value.value)

    def _get(self, name: str, gpu: WatchedGpu, kind: type[Any]) -> Any:
        value = kind()
        return value if self._call(name, gpu.handle, byref(value)) == SUCCESS else None

    def _call(self, name: str, *arguments: Any) -> int:
        """Call a function and return its code. -1: the library is too old to have it."""
        function = getattr(self._library, name, None)
        return -1 if function is None else int(function(*arguments))


def is_visible(index: int, uuid: str, visible: str | None) -> bool:
    """True if CUDA_VISIBLE_DEVICES names the GPU. The name of a part of a GPU (MIG) does not tell of which."""
    if visible is None or "MIG" in visible:
        return True
    words = [word.strip() for word in visible.split(",")]
    return any(word == str(index) or (word.startswith("GPU-") and uuid.startswith(word)) for word in words)
