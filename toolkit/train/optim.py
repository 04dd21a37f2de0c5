"""The optimizer. Its learning rate is a function of the step: there is no scheduler whose state to save."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from toolkit.base.errors import ConfigError, listing, nearest
from toolkit.config import OptimConfig
from toolkit.config.optim import is_path
from toolkit.config.words import choose
from toolkit.train.muon import MuonAndAdamW
from toolkit.train.parameter_groups import parameter_groups

#: Devices for which torch has fused optimizers.
_FUSED = ("cpu", "cuda")


def build_optimizer(config: OptimConfig, model: nn.Module) -> Optimizer:
    """Make the optimizer ``config.name`` over the parameters of ``model`` that are not frozen, in groups.

    It is fused (one kernel for all parameters) where torch has that: faster, and able to leave out a step without the
    host knowing. For sharded weights torch has no fused SGD. With ``config.groups`` or muon this is a collective,
    because a rank may have only some of the layers. Raises ConfigError.
    """
    groups = parameter_groups(config, model)
    if is_path(config.name):
        return _own_optimizer(config, groups)
    muon = partial(MuonAndAdamW, config=config)
    kinds: dict[str, Callable[..., Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW, "muon": muon}
    kind = choose("optim.name", config.name, kinds)
    # torch refuses ``fused`` for other devices, and for parameters that are not floating point.
    parameters = [parameter for group in groups for parameter in group["params"]]
    fused = all(parameter.device.type in _FUSED and parameter.is_floating_point() for parameter in parameters)
    if config.name == "sgd":
        fused = fused and not any(isinstance(parameter, DTensor) for parameter in parameters)
        momentum, nesterov = 0.9 if config.momentum is None else config.momentum, bool(config.nesterov)
        return kind(groups, config.lr, momentum, weight_decay=config.weight_decay, nesterov=nesterov, fused=fused)
    given: dict[str, Any] = {"betas": tuple(config.betas) or None, "eps": config.eps}
    options = {name: value for name, value in given.items() if value is not None}
    options |= {"lr": config.lr, "weight_decay": config.weight_decay, "fused": fused}
    return kind(groups, **options)


def _own_optimizer(config: OptimConfig, groups: list[dict[str, Any]]) -> Optimizer:
    """Make an optimizer of the class at the path ``config.name``. Raises ConfigError."""
    # A closure that must be given means that the step computes the loss again, as LBFGS's does.
    kind = _imported(config.name)
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(f"optim.name: {config.name} computes the loss again in its step, which no strategy can do")
    options: dict[str, Any] = {"lr": config.lr, **config.arguments}
    if config.weight_decay or "weight_decay" in inspect.signature(kind).parameters:
        options["weight_decay"] = config.weight_decay
    try:
        optimizer = kind(groups, **options)
    except (TypeError, ValueError, AssertionError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        raise ConfigError(f"optim.arguments: {config.name} does not take {given}: {error}") from error
    # torch takes any key in a group, and ignores one that the class does not know.
    valid = list(optimizer.defaults)
    for name in {name for group in groups for name in group} - {"params", *valid}:
        raise ConfigError(
            f"optim.groups: {config.name} has no setting {name!r} for a group; {nearest(name, valid)}"
            f"it has: {listing(valid)}"
        )
    return optimizer


def _imported(path: str) -> type[Optimizer]:
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the module's code raises
        raise ConfigError(
            f"optim.name: {path}: the module {module_name} cannot be imported: {type(error).__name__}: {error}; "
            "correct the path, or install the package where the ranks run"
        ) from error
    # The error lists the module's optimizers, for a name that is misspelled.
    kind = getattr(module, name, None)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        there = [n for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, Optimizer)]
        what = "has no such class" if kind is None else f"has {name}, and it is no torch.optim.Optimizer"
        raise ConfigError(
            f"optim.name: {path}: the module {module_name} {what}; {nearest(name, there)}"
            f"there are: {listing(there) or 'none'}"
        )
    return kind
