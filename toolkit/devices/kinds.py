"""The kinds of devices on which ranks train, as torch and the makers' runtimes call them. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class DeviceKind:
    """A kind of device. Other packages may bring more: ``devices`` in `toolkit.registry`."""

    name: str  #: in messages
    type: str  #: of its `torch.device`; ROCm's torch calls its GPUs cuda
    backend: str  #: the process group that ``dist.backend: auto`` takes
    #: Variables that hide devices from a process. Each counts among those that the one before it leaves.
    visible: tuple[tuple[str, ...], ...] = ()
    vendor: str = ""  #: PCI's number of the maker, as in /sys
    apptainer: str = ""  #: Apptainer's option for them; without one it shows all of /dev, which is enough


CUDA = DeviceKind("CUDA", "cuda", "nccl", (("CUDA_VISIBLE_DEVICES",),), "0x10de", "--nv")
#: The second level is HIP's. It takes CUDA's variable where its own is empty (clr, rocdevice.cpp).
ROCM = DeviceKind(
    *("ROCm", "cuda", "nccl"),
    visible=(("ROCR_VISIBLE_DEVICES",), ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
    vendor="0x1002",
    apptainer="--rocm",
)
XPU = DeviceKind("XPU", "xpu", "xccl", (("ZE_AFFINITY_MASK",),), "0x8086")
CPU = DeviceKind("CPU", "cpu", "gloo")
GPUS = (CUDA, ROCM, XPU)
HIDING = frozenset(name for kind in GPUS for level in kind.visible for name in level)

#: How a variable names a part of a GPU (MIG).
PART = "MIG-"


def is_of_devices(backend: str) -> bool:
    """True if a process group of this backend serves no tensors in host memory, and only enqueues its collectives."""
    return backend.startswith(("nccl", "xccl"))


def visible_words(kind: DeviceKind, environ: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    """Return each variable that hides devices, with the devices that it names, in the order in which they count."""
    found = []
    for names in kind.visible:
        set_ones = [name for name in names if name in environ]
        # An empty one counts only if no other of its level says more.
        name = next((name for name in set_ones if environ[name].strip()), next(iter(set_ones), None))
        if name is not None:
            found.append((name, [word.strip() for word in environ[name].split(",") if word.strip()]))
    return found


def one_visible(environ: Mapping[str, str], place: int) -> dict[str, str]:
    """Return the variables that show a process one GPU, as its device 0: the one at this place of those it would see.

    A script that takes device 0, or its local rank modulo the number of devices, then has the right one.
    """
    levels = [found[-1] for kind in GPUS if (found := visible_words(kind, environ))]
    one = {name: devices[place % len(devices)] for name, devices in levels if devices}
    return one if levels else {"CUDA_VISIBLE_DEVICES": str(place)}


def contradiction(kind: DeviceKind, environ: Mapping[str, str]) -> str | None:
    """Return what is wrong with variables that hide devices from each other; None if nothing is.

    A Slurm that sets the variables of all makers names the same numbers in each. HIP counts them among the devices that
    ROCm's own variable leaves: of ROCR_VISIBLE_DEVICES=2,3 and CUDA_VISIBLE_DEVICES=2,3 nothing is left.
    """
    levels = visible_words(kind, environ)
    for (outer, given), (inner, wanted) in pairwise(levels):
        lost = [word for word in wanted if word.isdigit() and int(word) >= len(given)]
        if lost:
            return (
                f"{inner}={environ[inner]} counts among the {len(given)} devices that {outer}={environ[outer]} leaves, "
                f"and there is no number {lost[0]}: unset {inner}"
            )
    return None
