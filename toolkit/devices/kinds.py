"""The kinds of devices on which ranks train, as torch and the makers' runtimes call them. Needs no torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path


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


def single_gpu_variables(environ: Mapping[str, str], place: int) -> dict[str, str]:
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


_RUNTIME = "(?:CUDA|HIP|XPU)"

#: A text is about some device, whatever it says.
OF_DEVICES = r"cuda|\bhip\b|\bxpu\b|level_zero"
#: A device has no memory left. torch's own exception has one name for all kinds.
DEVICE_OUT_OF_MEMORY = re.compile(
    rf"OutOfMemory|{_RUNTIME} out of memory|{_RUNTIME} (?:driver )?error: out of memory|'out of memory'"
    r"|(?:CUDA|HIP)_ERROR_OUT_OF_MEMORY|(?:cuda|hip)ErrorMemoryAllocation|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY"
)
#: This node's devices or their drivers are at fault. A failed assertion in a kernel, a wrong argument and lack of
#: memory are the program's fault, and ncclRemoteError is about some other node.
DEVICE_ERROR = re.compile(
    rf"{_RUNTIME} error: (?!device-side assert|invalid (?:argument|configuration|device function|value|resource)"
    r"|no kernel image|out of memory|operation not)"
    r"|uncorrectable ECC|\bXid\b|GPU is lost|fallen off the bus|No (?:CUDA|HIP) GPUs are available|CUDA unknown error"
    r"|No XPU devices are available|CUDA driver initialization failed|Unexpected error from (?:cuda|hip)GetDeviceCount"
    r"|(?:UR|ZE)_RESULT_ERROR_DEVICE_LOST|ncclSystemError|ncclUnhandledCudaError"
)


#: Folders and files of a Python environment that nodes without GPUs do not read.
GPU_FOLDERS, GPU_FILES = ("nvidia", "triton", "cupy"), ("libtorch_cuda", "libtorch_hip")
#: The packages that bring NCCL. Their names end with CUDA's main version.
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


def versions(root: Path = Path("/")) -> dict[str, str]:
    """Return the versions of what torch was built for, of NCCL, and of the node's driver, as far as they are there."""
    from importlib import metadata  # a fifth of the modules of a node's checks, which do not ask

    spec = find_spec("torch") if "torch" not in sys.modules else sys.modules["torch"].__spec__
    text = _text(Path(spec.origin).with_name("version.py")) if spec and spec.origin else ""
    build = re.compile(r"""^(cuda|hip|xpu)\b.*?=\s*['"]([\d.]+[^'"]*)['"]""", re.MULTILINE)
    found = {"rocm" if name == "hip" else name: version for name, version in build.findall(text)}
    for name in _NCCL:
        with suppress(metadata.PackageNotFoundError):
            found.setdefault("nccl", metadata.version(name))
    nvidia = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _text(root / "proc/driver/nvidia/version"))
    amd = _text(root / "sys/module/amdgpu/version").strip()
    if driver := nvidia[1] if nvidia else amd:
        found["driver"] = driver
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
