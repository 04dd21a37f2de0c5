"""What modules keep in a checkpoint besides parameters and buffers: ``get_extra_state`` and ``set_extra_state``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from toolkit.base.errors import ConfigError, listing
from toolkit.ranks.collectives import from_rank
from toolkit.ranks.state import Entry, Json, Replicated
from toolkit.strategies.priming import has_extra_state

SUFFIX = "_extra_state"  #: torch's suffix in a state_dict


def modules_with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of ``model`` that have extra state, by its name in the ``state_dict``."""
    named = ((name, module) for name, module in model.named_modules() if has_extra_state(module))
    return {f"{name}.{SUFFIX}" if name else SUFFIX: module for name, module in named}


class ExtraState:
    """Extra state as ``model/<module>._extra_state``, with ``prefix`` for ``model/``. As with buffers, rank 0's counts.

    Raises ConfigError for extra state that a checkpoint cannot hold. It must be a tensor, or a value that a round trip
    through JSON leaves equal.
    """

    def __init__(self, model: nn.Module, prefix: str = "model/") -> None:
        self._modules = {f"{prefix}{name}": module for name, module in modules_with_extra_state(model).items()}
        self._tensors: dict[str, Tensor] = {}
        strange = [name for name, module in self._modules.items() if not _can_be_stored(module.get_extra_state())]
        if strange:
            raise ConfigError(
                f"model: {listing(strange, 3)}: get_extra_state() returns something else than a tensor, or than "
                "numbers, texts, lists and dictionaries by text; a checkpoint unpickles nothing, and cannot hold it"
            )

    def entries(self) -> dict[str, Entry]:
        """Return what a checkpoint stores, equal on all ranks from now on. A collective if there is any extra state."""
        if not self._modules:
            return {}
        values = from_rank(0, {name: module.get_extra_state() for name, module in self._modules.items()})
        # Other ranks take rank 0's values, so that all declare equal ones.
        if dist.get_rank():
            for name, value in values.items():
                self._modules[name].set_extra_state(value)
        return self._declared(values)

    def places(self) -> dict[str, Entry]:
        """Return what a checkpoint is read into; not a collective."""
        return self._declared({name: module.get_extra_state() for name, module in self._modules.items()})

    def _declared(self, values: Mapping[str, Any]) -> dict[str, Entry]:
        self._tensors = {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}
        return {name: Replicated(self._tensors.get(name, value)) for name, value in values.items()}

    def loaded(self, values: Mapping[str, Json]) -> None:
        """Hand each module its extra state. It is an entry of ``values``, or a filled tensor of :meth:`entries`."""
        for name, module in self._modules.items():
            module.set_extra_state(self._tensors[name] if name in self._tensors else values[name])


def refuse_extra_state(model: nn.Module, strategy: str) -> None:
    """Raise ConfigError if ``model`` has extra state, for a strategy whose ranks cannot keep it."""
    if found := modules_with_extra_state(model):
        raise ConfigError(
            f"strategy.name: {listing(list(found), 3)} is kept beside tensors (get_extra_state), and {strategy} does "
            "not save it; make it a buffer, or use ddp"
        )


def _can_be_stored(value: Any) -> bool:
    # The value must survive JSON unchanged: a tuple, say, would come back as a list.
    try:
        return isinstance(value, Tensor) or json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError):
        return False
