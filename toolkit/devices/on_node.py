"""The GPUs of a node that this process may use, the CPUs near each, and how much and how well they work.

What the drivers show in /proc and /sys is read, by the standard library only; no GPU is opened. Drivers of NVIDIA
before 590 wake a GPU up before they tell which one it is, and for a lost GPU a read may wait for ever: only a process
of its own may do it, such as :func:`main`, which the node's agent starts. What a GPU or a driver does not support is
None. The readers of each maker's figures are in `toolkit.plugins.node_watch`.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from toolkit.devices.kinds import CUDA, GPUS, ROCM, XPU, DeviceKind, contradiction, visible_words

DRIVER = Path("/proc/driver/nvidia/gpus")
#: AMD's driver lists CPUs and GPUs here, in the order in which ROCm numbers them (amdkfd, kfd_topology.c).
KFD = Path("/sys/class/kfd/kfd/topology/nodes")
DRM = Path("/sys/class/drm")
_PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True)
class NodeGpu:
    """A GPU that the device cgroup of this process allows."""

    kind: DeviceKind
    index: int  #: the runtime's number of it, before variables hide any
    address: str  #: on the PCI bus, such as 0000:c1:00.0
    model: str = ""  #: by which unequal GPUs can be told
    uuid: str = ""  #: by which a variable may name it; empty where there is none
    number: str = ""  #: the driver's own, by which it lists the processes on it
    tiles: int = 1  #: parts that may be devices of their own


def has_gpus(root: Path = Path("/")) -> bool:
    """True if a driver of GPUs is loaded. It costs one look at some folders, and no GPU is woken up."""
    return _in(root, DRIVER).is_dir() or any((root / "dev/dri").glob("renderD*"))


def device_files(root: Path = Path("/")) -> int:
    """Return how many device files of GPUs there are, for a node whose driver tells nothing else."""
    return max(len([*(root / "dev").glob(pattern)]) for pattern in ("nvidia[0-9]*", "dri/renderD*"))


def allowed(root: Path = Path("/")) -> list[NodeGpu]:
    """Return the node's GPUs, of the first maker that has some here.

    ``root`` is the folder in which ``dev``, ``proc`` and ``sys`` lie. Raises OSError, LookupError or ValueError where a
    driver's files are not as documented.
    """
    for read in (_nvidia, _amd, _intel):
        if gpus := [replace(gpu, index=index) for index, gpu in enumerate(read(root))]:
            return gpus
    return []


def _nvidia(root: Path) -> Iterator[NodeGpu]:
    folder = _in(root, DRIVER)
    for gpu in sorted(folder.iterdir()) if folder.is_dir() else ():  # named by PCI addresses
        fields = _fields(gpu / "information", ":")
        if _may_open(root / f"dev/nvidia{fields['Device Minor']}"):
            yield NodeGpu(CUDA, 0, gpu.name, fields["Model"], fields["GPU UUID"])


def _amd(root: Path) -> Iterator[NodeGpu]:
    folder = _in(root, KFD)
    for node in sorted(folder.iterdir(), key=lambda path: int(path.name)) if folder.is_dir() else ():
        try:
            fields = _fields(node / "properties", " ")
        except PermissionError:  # of a GPU that the cgroup hides
            continue
        if int(fields.get("simd_count", "0")) and _may_open(root / f"dev/dri/renderD{fields['drm_render_minor']}"):
            place = int(fields["location_id"])
            bus, slot = place >> 8 & 0xFF, place >> 3 & 0x1F
            address = f"{int(fields.get('domain', '0')):04x}:{bus:02x}:{slot:02x}.{place & 7}"
            if not (_in(root, _PCI) / address).exists():  # of a partition the function is its number
                address = f"{address[:-1]}0"
            unique = int(fields.get("unique_id", "0"))
            uuid, number = f"GPU-{unique:016x}" if unique else "", _text(node / "gpu_id")
            yield NodeGpu(ROCM, 0, address, fields.get("device_id", ""), uuid, number)


def _intel(root: Path) -> Iterator[NodeGpu]:
    found = []
    for render in _in(root, DRM).glob("renderD*"):
        device = render / "device"
        if _text(device / "vendor") == XPU.vendor and _may_open(root / f"dev/dri/{render.name}"):
            address = _fields(device / "uevent", "=")["PCI_SLOT_NAME"]
            # A tile is a folder of the card with drivers before Xe's, and one of the device with Xe's.
            tiles = len([*device.glob("drm/card*/gt/gt*")]) or len([*device.glob("tile*")])
            found.append(NodeGpu(XPU, 0, address, _text(device / "device"), tiles=max(tiles, 1)))
    yield from sorted(found, key=lambda gpu: gpu.address)


def visible(environ: Mapping[str, str], root: Path = Path("/")) -> list[NodeGpu]:
    """Return the GPUs that the variables leave, in the order in which torch numbers them.

    Raises OSError, LookupError or ValueError where that is not certain: a part of a GPU (MIG), variables that
    contradict each other, unequal GPUs, which CUDA orders by their speed, and the other runtimes among each other.
    """
    # Since 2023 Intel's runtime makes a device of each tile, unless configured otherwise.
    by_tile = environ.get("ZE_FLAT_DEVICE_HIERARCHY", "FLAT") != "COMPOSITE"
    devices: list[NodeGpu] = []
    for gpu in allowed(root):
        devices += [gpu] * (gpu.tiles if by_tile else 1)
    if not devices:
        return []
    kind = devices[0].kind
    if wrong := contradiction(kind, environ):
        raise ValueError(wrong)
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({device.model for device in devices}) > 1:
        raise ValueError(f"{kind.name} numbers unequal GPUs in an order of its own")
    for _, words in visible_words(kind, environ):
        devices = [_named(word, devices) for word in words]
    return devices


def _named(word: str, devices: Sequence[NodeGpu]) -> NodeGpu:
    """Return the device that a word of a variable names: a number, or the beginning of a UUID."""
    if word.startswith("GPU-"):
        [found] = [device for device in devices if device.uuid.lower().startswith(word.lower())]
        return found
    if not word.isdigit():
        raise ValueError(f"{word} may be a part of a GPU, or none")
    return devices[int(word)]


def described(environ: Mapping[str, str], root: Path = Path("/")) -> str:
    """Return which GPUs this node has, and what hides them, for a message to someone whose torch sees none."""
    try:
        gpus = allowed(root)
    except (OSError, LookupError, ValueError) as error:
        return f"what drivers say about the node's GPUs cannot be read: {error!r}"
    has = f"{len(gpus)} for {gpus[0].kind.name}" if gpus else "no GPU that a driver shows this process"
    names = dict.fromkeys(name for kind in GPUS for level in kind.visible for name in level if name in environ)
    wrong = contradiction(gpus[0].kind, environ) if gpus else None
    hidden = [f"{name}={environ[name]!r}" for name in names]
    return ", ".join([f"the node has {has}", *hidden, *([wrong] if wrong else [])])


def apptainer_options(root: Path = Path("/")) -> list[str]:
    """Return Apptainer's options for the GPUs of this node, and of all makers where it shows none: others have them."""
    # By the drivers alone: the supervisor calls this, and to read about a lost GPU may take for ever.
    for driver, kind in ((DRIVER, CUDA), (KFD, ROCM)):
        if _in(root, driver).is_dir():
            return [kind.apptainer]
    return [kind.apptainer for kind in GPUS if kind.apptainer]


def near_cpus(environ: Mapping[str, str], root: Path = Path("/")) -> list[list[int]]:
    """Return the CPUs of each visible GPU's NUMA node, in the order in which torch numbers the GPUs.

    Raises as :func:`visible` does, also where a GPU belongs to no NUMA node (-1). Sources: CUDA's programming guide
    (``CUDA_VISIBLE_DEVICES``, ``CUDA_DEVICE_ORDER``), ROCm's guide on GPU isolation, and Linux,
    ABI/testing/sysfs-bus-pci.
    """
    near = []
    for gpu in visible(environ, root):
        node = int(_text(_in(root, _PCI) / gpu.address / "numa_node"))
        near.append(parse_cpulist((root / f"sys/devices/system/node/node{node}/cpulist").read_text()))
    return near


def parse_cpulist(cpulist: str) -> list[int]:
    """Return the CPUs of a list in Linux's format: ``0-3,8``. Raises ValueError, also for an empty one."""
    ends = [[int(end) for end in part.split("-")] for part in cpulist.split(",")]
    return [cpu for first, *last in ends for cpu in range(first, (last or [first])[0] + 1)]


def _in(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _fields(file: Path, between: str) -> dict[str, str]:
    parts = (line.partition(between) for line in file.read_text().splitlines())
    return {key.strip(): value.strip() for key, _, value in parts}


def _text(path: Path) -> str:
    return path.read_text().strip()


def _may_open(file: Path) -> bool:
    """Ask the device cgroup, which Slurm's ConstrainDevices sets, by access(2): it does not open the device."""
    return os.access(file, os.R_OK | os.W_OK)


def main() -> None:
    """Print the CPUs near each GPU as JSON; nothing where that is not certain."""
    with contextlib.suppress(OSError, LookupError, ValueError):
        print(json.dumps(near_cpus(os.environ)))


class GpusError(Exception):
    """The GPUs of this node cannot be watched."""


@dataclass(frozen=True)
class WatchedGpu:
    """A GPU that this process may use. ``index`` is its place among all of the node."""

    index: int
    handle: Any  #: by which the vendor's library knows it
    model: str = ""  #: such as NVIDIA H100 80GB HBM3; empty where the driver does not tell
    devices: int = 1  #: which the runtime makes of it: tiles, partitions


@dataclass(frozen=True)
class Load:
    """How much a GPU works now. ``energy_j`` is counted since the driver was loaded."""

    busy: float | None  #: the share of the last second or less in which a kernel ran
    memory_bytes: int | None
    power_w: float | None
    energy_j: float | None
    total_memory_bytes: int | None = None


@dataclass(frozen=True)
class GpuHealth:
    """How well a GPU is."""

    is_lost: bool = False  #: it answers no more, or only after a reset
    needs: str | None = None  #: what has to be done before it works again, such as "needs a reset"
    uncorrected_errors: int | None = None  #: of its memory, since the driver was loaded
    remapped_rows: int | None = None  #: of its memory, after uncorrected errors
    has_remap_failed: bool | None = None
    is_slowed: bool = False  #: by a fault of its cooling or power supply
    link_width: int | None = None  #: lanes of PCIe, now and at most
    most_link_width: int | None = None
    link_generation: int | None = None
    most_link_generation: int | None = None


class Gpus(Protocol):
    """The GPUs of this node that the job may use."""

    cannot_tell: str  #: what the driver of these GPUs does not tell, for users to read; empty: it tells all

    @property
    def gpus(self) -> Sequence[WatchedGpu]:
        """Return the GPUs, always the same."""

    def utilization(self, gpu: WatchedGpu) -> Load: ...

    def health(self, gpu: WatchedGpu) -> GpuHealth: ...

    def link(self, gpu: WatchedGpu) -> tuple[int, int]:
        """Return the generation and the number of lanes of the PCIe link now. 0: it is not known."""

    def processes(self, gpu: WatchedGpu) -> Iterable[int]:
        """Return the processes that have memory there, as far as this process may see them."""

    def faults(self) -> Iterable[str]:
        """Return the faults of the hardware that the driver has reported since the last call, each with its GPU."""
