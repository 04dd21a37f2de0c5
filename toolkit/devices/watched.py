"""How much the GPUs of a node work, and how well they are, for those who watch it.

The readers of each maker's figures are in `toolkit.plugins.node_watch`. Who watches starts without site-packages: they
use the standard library only. What a GPU or a driver does not support is None. A call may wait for ever for a lost GPU:
only a process of its own may make it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


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
