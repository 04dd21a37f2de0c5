"""Loops of other libraries, by at most ten changed lines: see docs/integrations.md.

    from toolkit.plugins.integrations import LightningCallback

Importing this package loads no library. Each name below loads its own on first use.
"""

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from toolkit.base.errors import ConfigError

__all__ = ["AccelerateRun", "LightningCallback", "TransformersCallback"]

if TYPE_CHECKING:
    from toolkit.plugins.integrations.accelerate import AccelerateRun
    from toolkit.plugins.integrations.lightning import LightningCallback
    from toolkit.plugins.integrations.transformers import TransformersCallback

#: The library that each name needs, and the oldest version that it works with.
_LIBRARIES = {
    "AccelerateRun": ("accelerate", (1, 10)),
    "LightningCallback": ("lightning", (2, 6)),
    "TransformersCallback": ("transformers", (5, 0)),
}


def __getattr__(name: str) -> Any:
    if name not in _LIBRARIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import metadata

    library, oldest = _LIBRARIES[name]
    needed = ".".join(map(str, oldest))
    try:
        version = metadata.version(library)
    except metadata.PackageNotFoundError:
        version = "none"
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < oldest:
        raise ConfigError(
            f"{name} needs {library} {needed} or newer, and {version} is installed: "
            "pip install 'slurm-batch-toolkit[integrations]'"
        )
    return getattr(import_module(f"toolkit.plugins.integrations.{library}"), name)
