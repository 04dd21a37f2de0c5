"""Which parameters a loop trains. Scripts freeze and unfreeze layers at steps that a resume has passed already."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.base.errors import ConfigError, listing
from toolkit.ranks.state import Entry, Json, Replicated

#: Optional: checkpoints of older versions have none.
FROZEN = "update/frozen"


class Frozen:
    """The parameters without gradients: when a loop hands its models over, and now."""

    def __init__(self, parameters: Mapping[Tensor, str], modules: list[nn.Module]) -> None:
        """``parameters`` have names; ``modules`` are as they were handed over, in their wrappers."""
        self._parameters = parameters
        parts = [part for module in modules for part in module.modules()]
        self._in_ddp = {p for part in parts if isinstance(part, DistributedDataParallel) for p in part.parameters()}
        self._first = self._now()

    def entries(self) -> dict[str, Entry]:
        """Return what a checkpoint holds."""
        return {FROZEN: Replicated({"first": self._first, "now": self._now()})} if self._parameters else {}

    def loaded(self, values: Mapping[str, Json]) -> None:
        """Freeze and unfreeze as at the save. A script that now begins with other parameters frozen is left alone.

        Raises ConfigError for those that DDP was made without: their gradients would stay on each rank.
        """
        saved: Any = values.get(FROZEN)
        if saved is None or saved["first"] != self._first:
            return
        now = set(saved["now"])
        thawed = set(self._first) - now
        missed = [name for parameter, name in self._parameters.items() if parameter in self._in_ddp and name in thawed]
        if missed:
            raise ConfigError(
                f"run.resumable: {listing(missed, 3)} are trained since a later step, and DistributedDataParallel was "
                "made while they were frozen: hand over the model itself, and wrap it after run.resumable"
            )
        for parameter, name in self._parameters.items():
            parameter.requires_grad_(name not in now)

    def _now(self) -> list[str]:
        return [name for parameter, name in self._parameters.items() if not parameter.requires_grad]
