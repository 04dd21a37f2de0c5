"""Whose GPUs a node has: the driver that answers is asked.

The GPUs of another maker are a class with the members of :class:`toolkit.devices.watched.Gpus`, and a case in
:func:`open_gpus`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from toolkit.devices import on_node
from toolkit.devices.kinds import CUDA, ROCM
from toolkit.devices.watched import Gpus, GpusError
from toolkit.plugins.node_watch.nvml import Nvml
from toolkit.plugins.node_watch.sysfs import AmdGpus, IntelGpus


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
