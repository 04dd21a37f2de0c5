"""Finds the versions of the programs and packages that a run uses on this machine.

They are read from files and packages: torch itself is not loaded.
"""

from __future__ import annotations

import platform
import re
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from toolkit import __version__

#: The NVIDIA driver's own file about its version.
DRIVER = Path("/proc/driver/nvidia/version")
_PACKAGES = ("torch", "torchvision", "submitit", "numpy", "mpi4py", "tensorboard")


def versions() -> dict[str, str]:
    """Return the version of each program and package that is installed here."""
    found = {
        "toolkit": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
    }
    found |= {name: version for name in _PACKAGES if (version := _package(name))}
    # A CUDA build of torch brings its libraries as packages, whose names end with CUDA's main version.
    nccl = next(
        (v for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11") if (v := _package(name))), ""
    )
    # The version of CUDA that torch was built for, from its file of versions.
    spec = find_spec("torch") if "torch" not in sys.modules else sys.modules["torch"].__spec__
    text = _text(Path(spec.origin).with_name("version.py")) if spec and spec.origin else ""
    cuda = re.search(r"""^cuda\b.*?=\s*['"]([\d.]+)['"]""", text, re.MULTILINE)
    driver = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _text(DRIVER))
    more = {"cuda": cuda and cuda[1], "nccl": nccl, "driver": driver and driver[1]}
    return found | {name: version for name, version in more.items() if version}


def _package(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
