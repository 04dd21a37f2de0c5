"""Checks a config's optimizer and learning rate, without importing the optimizer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from toolkit.config.schema import OPTIMIZERS, JobConfig, OptimConfig
from toolkit.config.strategy_traits import SHARDED
from toolkit.config.words import one_of, within
from toolkit.errors import ConfigError

#: The optimizers that have a key which others lack; ``arguments`` are also for a class by its path.
_ONLY: Mapping[str, tuple[str, ...]] = {
    "nesterov": ("sgd", "muon"),
    "betas": ("adam", "adamw", "muon"),
    "eps": ("adam", "adamw", "muon"),
    "arguments": ("muon",),
}
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
#: Arguments of torch's Muon besides those that have a key.
_MUON_ARGUMENTS = ("adjust_lr_fn", "ns_coefficients", "ns_steps")
_ADJUSTMENTS = ("match_rms_adamw", "original", "spectral_unclamped")


def check_optim(config: JobConfig) -> None:
    """Refuse what no optimizer, or not the chosen one, can do. Raises ConfigError."""
    optim, strategy = config.optim, config.strategy
    if not is_path(optim.name):
        one_of("optim.name", optim.name, [*OPTIMIZERS, "package.module.Class"])
    # A key that is not at its empty default must be one that the optimizer has.
    for key, names in _ONLY.items():
        is_theirs = optim.name in names or (key == "arguments" and is_path(optim.name))
        if getattr(optim, key) not in (None, [], {}) and not is_theirs:
            instead = "set the argument of that name in optim.arguments" if is_path(optim.name) else "leave it out"
            if key == "arguments":
                instead = "for others name the class by its path, such as optim.name: torch.optim.SGD"
            raise ConfigError(f"optim.{key}: is for optim.name {', '.join(names)}, not {optim.name}; {instead}")
    if optim.betas and (len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas)):
        raise ConfigError(f"optim.betas: {optim.betas} is refused; two numbers from 0 to below 1, such as [0.9, 0.95]")
    if optim.nesterov and optim.momentum == 0:
        raise ConfigError("optim.nesterov: needs momentum, and optim.momentum is 0; set that above 0, or leave it out")
    if optim.name == "muon":
        _check_muon(config)
    for pattern, settings in optim.groups.items():
        _check_group(optim, f"optim.groups.{pattern}", settings)
    if optim.min_lr > optim.lr:
        raise ConfigError(f"optim.min_lr: {optim.min_lr} is more than optim.lr {optim.lr}, from which a schedule falls")
    if optim.min_lr and optim.schedule == "constant":
        raise ConfigError("optim.min_lr: optim.schedule constant never falls; use linear, cosine or wsd, or leave it 0")
    if optim.decay_steps is not None and optim.schedule != "wsd":
        raise ConfigError(
            f"optim.decay_steps: {optim.schedule} falls from the end of the warm-up on; use optim.schedule wsd, or "
            "leave it out"
        )
    if optim.layer_decay is not None and strategy.name in ("pipeline", "custom"):
        raise ConfigError(
            f"optim.layer_decay: needs all blocks of one model, and with strategy.name {strategy.name} a rank or a "
            "network has some; give rates as optim.groups.PATTERN.lr_scale"
        )
    if config.train.skip_bad_steps and optim.name == "sgd" and strategy.name in SHARDED:
        raise ConfigError(
            f"train.skip_bad_steps: torch's sgd cannot leave out a step of weights that {strategy.name} cuts; "
            "use optim.name adam, adamw or muon, or strategy.name ddp"
        )


def is_path(name: str) -> bool:
    """True if ``name`` can be that of a class in a module: ``package.module.Class``."""
    return _PATH.fullmatch(name) is not None


def _check_muon(config: JobConfig) -> None:
    arguments = config.optim.arguments
    for name in arguments:
        one_of("optim.arguments", name, _MUON_ARGUMENTS)
    if "adjust_lr_fn" in arguments:
        one_of("optim.arguments.adjust_lr_fn", str(arguments["adjust_lr_fn"]), _ADJUSTMENTS)
    if "ns_steps" in arguments:
        _check_number("optim.arguments.ns_steps", arguments["ns_steps"], 1, 99, whole=True)
    coefficients = arguments.get("ns_coefficients", [0.0] * 3)
    if not isinstance(coefficients, list) or len(coefficients) != 3:
        raise ConfigError(f"optim.arguments.ns_coefficients: {coefficients!r} is refused; a list of three numbers")
    if config.strategy.name == "parameter_server" and config.strategy.parameter_server.servers > 1:
        raise ConfigError(
            "optim.name: muon needs each matrix as a whole, and with strategy.parameter_server.servers "
            f"{config.strategy.parameter_server.servers} a server has some of its rows; set that to 1, or use adamw"
        )


def _check_group(optim: OptimConfig, key: str, settings: Mapping[str, Any]) -> None:
    """Refuse a setting that the optimizer lacks. A class by its path is only checked when it is made."""
    valid = ["lr_scale", "weight_decay", *(["optimizer"] if optim.name == "muon" else [])]
    for name, value in settings.items():
        if name in ("lr_scale", "weight_decay"):
            _check_number(f"{key}.{name}", value, 0, 10_000)
        elif not is_path(optim.name):
            one_of(key, name, valid)
            one_of(f"{key}.optimizer", str(value), ("muon", "adamw"))
        elif name == "lr":
            raise ConfigError(f"{key}.lr: the schedule sets the rate; give its part as lr_scale, such as lr_scale: 0.1")


def _check_number(key: str, value: Any, least: float, most: float, *, whole: bool = False) -> None:
    if type(value) not in ((int,) if whole else (int, float)):
        raise ConfigError(f"{key}: {value!r} is refused; it must be a {'whole ' if whole else ''}number")
    within(key, value, least, most)
