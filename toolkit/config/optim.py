"""The optimizer and its learning rate, checked without importing the optimizer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from toolkit.base.errors import ConfigError
from toolkit.constraints import STEPS, Factor, Momentum, OneOf, Range, Steps, one_of, within

#: ``optim.name`` may also be the path of a class.
OPTIMIZERS = ("sgd", "adam", "adamw", "muon")
#: What an optimizer's argument may be.
Setting: TypeAlias = str | int | float | bool | list[float]
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


@dataclass
class OptimConfig:
    """The optimizer and its learning rate as a function of the step, see docs/optimizers.md."""

    name: str = "sgd"  #: sgd, adam, adamw, muon, or a class by its path: mypackage.MyOptimizer
    arguments: dict[str, Setting] = field(default_factory=dict)  #: of a class by its path, and of torch's Muon
    lr: Factor = 0.05  #: the rate after the warm-up
    momentum: Momentum | None = None  #: of sgd and muon; null: 0.9, with muon 0.95
    nesterov: bool | None = None  #: of sgd and muon; null: false, with muon true
    betas: list[float] = field(default_factory=list)  #: of adam, adamw and muon's AdamW; empty: torch's
    eps: Annotated[float, Range(1e-30, 1)] | None = None  #: of the same; null: torch's
    weight_decay: Factor = 0.0  #: of what no group has one of its own for
    decay_norms_and_biases: bool = True  #: false: weight_decay is for weights of two dimensions or more
    #: each block has its next one's rate times this; the last layers have lr
    layer_decay: Annotated[float, Range(1e-6, 1)] | None = None
    groups: dict[str, dict[str, Setting]] = field(default_factory=dict)  #: pattern of parameters: their own settings
    #: how the rate changes after the warm-up
    schedule: Annotated[str, OneOf("constant", "linear", "cosine", "wsd")] = "constant"
    min_lr: Factor = 0.0  #: to which a schedule falls
    warmup_steps: Annotated[int, Range(0, STEPS)] = 0  #: the first steps, in which the rate rises
    decay_steps: Steps | None = None  #: with wsd: the last steps, in which it falls; null: a fifth of all

    def check(self) -> None:
        """Refuse what no optimizer, or not the chosen one, can do. Raises ConfigError."""
        if not is_class_path(self.name):
            one_of("optim.name", self.name, [*OPTIMIZERS, "package.module.Class"])
        # A key that is not at its empty default must be one that the optimizer has.
        for key, names in _ONLY.items():
            is_theirs = self.name in names or (key == "arguments" and is_class_path(self.name))
            if getattr(self, key) not in (None, [], {}) and not is_theirs:
                instead = (
                    "set the argument of that name in optim.arguments" if is_class_path(self.name) else "leave it out"
                )
                if key == "arguments":
                    instead = "for others name the class by its path, such as optim.name: torch.optim.SGD"
                raise ConfigError(f"optim.{key}: is for optim.name {', '.join(names)}, not {self.name}; {instead}")
        if self.betas and (len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas)):
            raise ConfigError(
                f"optim.betas: {self.betas} is out of range; must be two numbers from 0 to below 1, such as [0.9, 0.95]"
            )
        if self.nesterov and self.momentum == 0:
            raise ConfigError(
                "optim.nesterov: needs momentum, and optim.momentum is 0; set that above 0, or leave it out"
            )
        if self.name == "muon":
            _check_muon(self.arguments)
        for pattern, settings in self.groups.items():
            _check_group(self, f"optim.groups.{pattern}", settings)
        if self.min_lr > self.lr:
            raise ConfigError(
                f"optim.min_lr: {self.min_lr} is more than optim.lr {self.lr}, from which a schedule falls"
            )
        if self.min_lr and self.schedule == "constant":
            raise ConfigError(
                "optim.min_lr: optim.schedule constant never falls; use linear, cosine or wsd, or leave it 0"
            )
        if self.decay_steps is not None and self.schedule != "wsd":
            raise ConfigError(
                f"optim.decay_steps: {self.schedule} falls from the end of the warm-up on; use optim.schedule wsd, or "
                "leave it out"
            )


def is_class_path(name: str) -> bool:
    """True if ``name`` can be that of a class in a module: ``package.module.Class``."""
    return _PATH.fullmatch(name) is not None


def _check_muon(arguments: Mapping[str, Any]) -> None:
    for name in arguments:
        one_of("optim.arguments", name, _MUON_ARGUMENTS)
    if "adjust_lr_fn" in arguments:
        one_of("optim.arguments.adjust_lr_fn", str(arguments["adjust_lr_fn"]), _ADJUSTMENTS)
    if "ns_steps" in arguments:
        _check_number("optim.arguments.ns_steps", arguments["ns_steps"], 1, 99, whole=True)
    coefficients = arguments.get("ns_coefficients", [0.0] * 3)
    if not isinstance(coefficients, list) or len(coefficients) != 3:
        raise ConfigError(
            f"optim.arguments.ns_coefficients: {coefficients!r} is not valid; must be a list of three numbers"
        )


def _check_group(optim: OptimConfig, key: str, settings: Mapping[str, Any]) -> None:
    """Refuse a setting that the optimizer lacks. A class by its path is only checked when it is made."""
    valid = ["lr_scale", "weight_decay", *(["optimizer"] if optim.name == "muon" else [])]
    for name, value in settings.items():
        if name in ("lr_scale", "weight_decay"):
            _check_number(f"{key}.{name}", value, 0, 10_000)
        elif not is_class_path(optim.name):
            one_of(key, name, valid)
            one_of(f"{key}.optimizer", str(value), ("muon", "adamw"))
        elif name == "lr":
            raise ConfigError(f"{key}.lr: the schedule sets the rate; give its part as lr_scale, such as lr_scale: 0.1")


def _check_number(key: str, value: Any, least: float, most: float, *, whole: bool = False) -> None:
    if type(value) not in ((int,) if whole else (int, float)):
        raise ConfigError(f"{key}: {value!r} is not valid; must be a {'whole ' if whole else ''}number")
    within(key, value, least, most)
