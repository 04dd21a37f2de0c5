"""How much the GPUs of a node work, and how well they are, for those who watch it.

The GPUs of another maker are a class with the members of :class:`Gpus`, and a case in :func:`open_gpus`. Who watches
starts without site-packages: such a class uses the standard library only. What a GPU or a driver does not support is
None. A call may wait for ever for a lost GPU: only a process of its own may make it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from toolkit.devices import on_node
from toolkit.devices.kinds import ROCM


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
class Condition:
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

    cannot_tell: str
    """What the driver of these GPUs does not tell, for users to read; empty: it tells all."""

    @property
    def gpus(self) -> Sequence[WatchedGpu]:
        """Return the GPUs, always the same."""

    def load(self, gpu: WatchedGpu) -> Load:
        """Return how much ``gpu`` works."""

    def condition(self, gpu: WatchedGpu) -> Condition:
        """Return how well ``gpu`` is."""

    def link(self, gpu: WatchedGpu) -> tuple[int, int]:
        """Return the generation and the number of lanes of the PCIe link now. 0: it is not known."""

    def processes(self, gpu: WatchedGpu) -> Iterable[int]:
        """Return the processes that have memory there, as far as this process may see them."""

    def faults(self) -> Iterable[str]:
        """Return the faults of the hardware that the driver has reported since the last call, each with its GPU."""


def open_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> Gpus | None:
    """Return the GPUs that this process may use; None on a node without any. Raises GpusError."""
    from toolkit.devices.nvml import Nvml

    try:
        return Nvml(environ.get("CUDA_VISIBLE_DEVICES"))
    except GpusError:
        if (root / "dev/nvidiactl").exists():
            raise
    from toolkit.devices.sysfs import AmdGpus, IntelGpus

    try:
        gpus = on_node.allowed(root)
        if not gpus:
            return None
        # Those that a variable hides are another process's. In doubt all are watched.
        with contextlib.suppress(LookupError, ValueError):
            gpus = on_node.visible(environ, root)
    except (OSError, LookupError, ValueError) as error:
        raise GpusError(f"the driver's files cannot be read: {error!r}") from error
    return AmdGpus(gpus, root) if gpus[0].kind is ROCM else IntelGpus(gpus, root)
