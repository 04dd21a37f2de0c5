"""What is installed for devices on this machine: drivers, and what torch was built for. No torch is imported."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

#: Folders and files of a Python environment that nodes without GPUs do not read.
GPU_FOLDERS, GPU_FILES = ("nvidia", "triton", "cupy"), ("libtorch_cuda", "libtorch_hip")
#: The packages that bring NCCL. Their names end with CUDA's main version.
_NCCL = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


def versions(root: Path = Path("/")) -> dict[str, str]:
    """Return the versions of what torch was built for, of NCCL, and of the node's driver, as far as they are there."""
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
