"""Finds the versions of the programs and packages that a run uses on this machine.

They are read from files and packages: torch itself is not loaded.
"""

from __future__ import annotations

import platform
from importlib import metadata

from toolkit import __version__
from toolkit.devices import installed

_PACKAGES = ("torch", "torchvision", "submitit", "numpy", "mpi4py", "tensorboard")


def versions() -> dict[str, str]:
    """Return the version of each program and package that is installed here."""
    found = {
        "toolkit": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}",
    }
    found |= {name: version for name in _PACKAGES if (version := _package(name))}
    return found | installed.versions()


def _package(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
