"""The optimizer's state under parameter names, complete even before the first step."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from toolkit.base.errors import ConfigError, listing
from toolkit.ranks.state import Json, Replicated, Sharded, entry, local


class OptimizerState:
    """Names the slots of ``optimizer`` (momenta, step counts) ``optim/<parameter>/<slot>``.

    torch makes the slots of most optimizers in the first step, so a new one has nothing that a checkpoint could be read
    into. :meth:`entries` therefore makes them. If nothing is read, :meth:`forget_unfilled` removes them before the
    first step, which then starts as torch starts it, whatever the optimizer's first values are.
    """

    def __init__(self, names: Mapping[Tensor, str], optimizer: Optimizer) -> None:
        refuse_lost_state(optimizer, "optim.name")
        self._optimizer = optimizer
        self._names = names
        self._unfilled = False
        self._stepped = False

    def entries(self) -> dict[str, Replicated | Sharded]:
        """Return every slot; tensors are live and may be filled in place."""
        if not self._stepped and not self._optimizer.state:
            # Make every slot by a step of length 0 with gradients of 0, which moves no weight.
            groups = self._optimizer.param_groups
            rates = [group["lr"] for group in groups]
            for group in groups:
                group["lr"] = 0.0
                for parameter in group["params"]:
                    if parameter.requires_grad:  # a frozen one never gets a gradient, and so never has a slot
                        parameter.grad = torch.zeros_like(parameter)
            own = [{key: value for key, value in group.items() if key != "params"} for group in groups]
            # A rate of 0 moves no weight but changes slots (step counts, say): forget_unfilled() removes them.
            _try_step(self._optimizer)
            _refuse_state_in_groups(self._optimizer, own)
            self._optimizer.zero_grad()
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            self._unfilled = True
        found = {name: slots[slot] for name, slots, slot in self._named() if slots[slot] is not None}
        for name, value in found.items():
            if not isinstance(value, Tensor) and not _is_json(value):
                raise ConfigError(
                    f"optim.name: {type(self._optimizer).__name__} keeps a {type(value).__qualname__} as {name}, which "
                    "is neither a tensor nor plain numbers; use another optimizer, or toolkit.start(), which saves "
                    "lists of tensors"
                )
        return {name: entry(value) if isinstance(value, Tensor) else Replicated(value) for name, value in found.items()}

    def live_state(self) -> dict[str, Tensor]:
        """Return ``optimizer/<parameter>/<slot>`` of the slots that exist now and are tensors."""
        found = ((name.replace("optim/", "optimizer/", 1), slots[slot]) for name, slots, slot in self._named())
        return {name: local(value) for name, value in found if isinstance(value, Tensor)}

    def filled(self, values: Mapping[str, Json]) -> None:
        """Continue from a checkpoint, which the tensors of :meth:`entries` hold, and ``values`` the other slots."""
        self._unfilled, self._stepped = False, True
        for name, slots, slot in self._named():
            if name in values:
                slots[slot] = values[name]

    def forget_unfilled(self) -> None:
        """Remove slots that were made but not filled. Call before every step."""
        if self._unfilled:
            self._optimizer.state.clear()
            self._unfilled = False
        self._stepped = True

    def _named(self) -> Iterator[tuple[str, dict[str, Any], str]]:
        for parameter, slots in self._optimizer.state.items():
            for slot in slots:
                yield f"optim/{self._names[parameter]}/{slot}", slots, slot


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def refuse_lost_state(optimizer: Optimizer, key: str) -> None:
    """Raise ConfigError, beginning with ``key``, if ``optimizer`` keeps state where no checkpoint looks for it."""
    parameters = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for inner in vars(optimizer).values():
        # A wrapper may share its state with the optimizer inside, and then loses nothing.
        if not isinstance(inner, Optimizer) or inner.state is optimizer.state:
            continue
        if any(parameter in parameters for group in inner.param_groups for parameter in group["params"]):
            raise ConfigError(
                f"{key}: {type(optimizer).__qualname__} wraps {type(inner).__qualname__}, and only the state of one of "
                "them would be saved; use the inner optimizer itself, or in a loop of your own hand that over, with an "
                "object for the rest that has state_dict() and load_state_dict()"
            )
    if more := optimizer.state_dict().keys() - {"state", "param_groups"}:
        raise ConfigError(
            f"{key}: the state_dict() of {type(optimizer).__qualname__} has {listing(sorted(more), 3)} beside the "
            "state of the parameters, which would be in no checkpoint; keep that in optimizer.state[parameter]"
        )


def _try_step(optimizer: Optimizer) -> None:
    """Make a step. Raise ConfigError if torch cannot make it with weights that the strategy has cut (DTensors)."""
    try:
        optimizer.step()
    except RuntimeError as error:
        if not {"sharding", "placement", "dtensor"} & {*re.findall("[a-z]+", str(error).lower())}:  # as versions say it
            raise
        raise ConfigError(
            f"optim.name: torch's {type(optimizer).__name__} cannot update weights that the strategy has cut into "
            f"shards ({str(error).splitlines()[0]}); use another optimizer, or strategy.name ddp"
        ) from error


def _refuse_state_in_groups(optimizer: Optimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError if a step has changed the groups of parameters themselves, besides the slots."""
    changed = {
        key
        for group, own in zip(optimizer.param_groups, before, strict=True)
        for key, value in group.items()
        if key != "params" and (key not in own or bool(torch.as_tensor(value != own[key]).any()))
    }
    if changed:
        raise ConfigError(
            f"optim.name: {type(optimizer).__name__} keeps state in its groups of parameters "
            f"({listing(sorted(changed), 5)}), which would be in no checkpoint: a resumed run would differ. Use "
            "another optimizer, or toolkit.start(), which saves whole optimizers"
        )
