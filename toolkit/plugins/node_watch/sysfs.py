"""Asks AMD's and Intel's drivers about GPUs, by their files in /sys. Needs no root, no library, and opens no GPU.

Sources: Linux, gpu/amdgpu/driver-misc.rst, gpu/amdgpu/ras.rst and gpu/amdgpu/thermal.rst;
ABI/testing/sysfs-driver-intel-i915-hwmon and -xe-hwmon; ABI/testing/sysfs-bus-pci.

The driver that answers is asked. The GPUs of another maker are a class with the members of
:class:`toolkit.devices.on_node.Gpus`, and a case in :func:`open_gpus`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from toolkit.devices import on_node
from toolkit.devices.kinds import CUDA, ROCM
from toolkit.devices.on_node import GpuHealth, Gpus, GpusError, Load, NodeGpu, WatchedGpu
from toolkit.plugins.node_watch.nvml import Nvml

#: The speed of a lane by the generation of PCIe, as Linux writes it (drivers/pci/probe.c).
GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}


class _SysfsGpus:
    """What the files of PCI devices and of hwmon tell of the GPUs of any maker."""

    def __init__(self, gpus: Sequence[NodeGpu], root: Path = Path("/")) -> None:
        """Take the GPUs that the job may use. ``root`` is the folder in which ``sys`` lies."""
        self._root = root
        # Parts of one GPU (partitions, tiles) have one address, and one set of files.
        self._parts: dict[str, list[NodeGpu]] = {}
        for gpu in gpus:
            self._parts.setdefault(gpu.address, []).append(gpu)
        pci = root / "sys/bus/pci/devices"
        self.gpus = [
            WatchedGpu(parts[0].index, pci / address, _model(pci / address), len(parts))
            for address, parts in self._parts.items()
        ]

    def utilization(self, gpu: WatchedGpu) -> Load:
        microjoules = _first(gpu.handle, "hwmon/hwmon*/energy1_input")
        microwatts = _first(gpu.handle, "hwmon/hwmon*/power1_average", "hwmon/hwmon*/power1_input")
        return Load(
            None,
            None,
            None if microwatts is None else microwatts / 1e6,
            None if microjoules is None else microjoules / 1e6,
        )

    def health(self, gpu: WatchedGpu) -> GpuHealth:
        if not gpu.handle.is_dir():
            return GpuHealth(is_lost=True)
        return GpuHealth(
            link_width=number_in(gpu.handle / "current_link_width"),
            most_link_width=number_in(gpu.handle / "max_link_width"),
            link_generation=_generation(gpu.handle / "current_link_speed"),
            most_link_generation=_generation(gpu.handle / "max_link_speed"),
        )

    def link(self, gpu: WatchedGpu) -> tuple[int, int]:
        """Return the generation and the number of lanes of the PCIe link now. 0: it is not known."""
        generation, lanes = _generation(gpu.handle / "current_link_speed"), number_in(gpu.handle / "current_link_width")
        return generation or 0, lanes or 0

    def processes(self, gpu: WatchedGpu) -> Iterator[int]:
        """Yield nothing: these drivers do not tell."""
        yield from ()

    def faults(self) -> Iterator[str]:
        """Yield nothing: faults stand in the kernel's log, which needs root."""
        yield from ()


class AmdGpus(_SysfsGpus):
    """AMD's GPUs: :class:`toolkit.devices.on_node.Gpus`."""

    cannot_tell = "AMD's driver counts no energy, and only root reads its faults (dmesg)"

    def utilization(self, gpu: WatchedGpu) -> Load:
        """Return how much ``gpu`` works. Energy is not told; power is that of the package, for both of its halves."""
        percent = number_in(gpu.handle / "gpu_busy_percent")
        return replace(
            super().utilization(gpu),
            busy=None if percent is None else percent / 100,
            memory_bytes=number_in(gpu.handle / "mem_info_vram_used"),
            total_memory_bytes=number_in(gpu.handle / "mem_info_vram_total"),
        )

    def health(self, gpu: WatchedGpu) -> GpuHealth:
        """Return how well ``gpu`` is, with the uncorrected errors of its memory since the driver was loaded."""
        errors = None
        with suppress(OSError, AttributeError):  # "ue: 0", then the corrected ones
            found = re.search(r"^ue: (\d+)", (gpu.handle / "ras/umc_err_count").read_text(), re.MULTILINE)
            errors = int(found[1]) if found else None
        return replace(super().health(gpu), uncorrected_errors=errors)

    def processes(self, gpu: WatchedGpu) -> Iterator[int]:
        """Yield the processes with memory on ``gpu``, of every user (amdkfd, kfd_process.c)."""
        for part in self._parts[gpu.handle.name]:
            for file in (self._root / "sys/class/kfd/kfd/proc").glob(f"*/vram_{part.number}"):
                if number_in(file):
                    yield int(file.parent.name)


class IntelGpus(_SysfsGpus):
    """Intel's GPUs: :class:`toolkit.devices.on_node.Gpus`."""

    cannot_tell = "Intel's driver reports neither GPU nor memory use here, and only root reads its faults"


def _model(device: Path) -> str:
    with suppress(OSError):
        if name := (device / "product_name").read_text().strip():
            return name
    with suppress(OSError):
        return " ".join((device / name).read_text().strip() for name in ("vendor", "device"))
    return ""


def _first(device: Path, *patterns: str) -> int | None:
    files = (file for pattern in patterns for file in sorted(device.glob(pattern)))
    return next((value for file in files if (value := number_in(file)) is not None), None)


def number_in(file: Path) -> int | None:
    """Return the whole number in a file; None where it cannot be read, or has another text."""
    with suppress(OSError, ValueError):
        return int(file.read_text())
    return None


def _generation(file: Path) -> int | None:
    """Return the generation of a link whose speed reads ``16.0 GT/s PCIe``; None where it is not known."""
    with suppress(OSError):
        return GENERATIONS.get(file.read_text().split(" ")[0])
    return None


def open_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> Gpus | None:
    """Return the GPUs that this process may use; None on a node without any. Raises GpusError."""
    try:
        return Nvml(environ.get("CUDA_VISIBLE_DEVICES"))
    except GpusError as error:
        # Without the library nothing is known, and nothing need be wrong: a container may lack it.
        if (root / "dev/nvidiactl").exists() and not isinstance(error.__cause__, OSError):
            raise
    try:
        gpus = on_node.allowed(root)
        if not gpus:
            return None
        # Those that a variable hides are another process's. In doubt all are watched.
        with contextlib.suppress(LookupError, ValueError):
            gpus = on_node.visible(environ, root)
    except (OSError, LookupError, ValueError) as error:
        raise GpusError(f"the driver's files cannot be read: {error!r}") from error
    if not gpus or gpus[0].kind is CUDA:
        return None
    return AmdGpus(gpus, root) if gpus[0].kind is ROCM else IntelGpus(gpus, root)
