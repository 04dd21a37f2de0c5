"""The learning rate as a pure function of the step, and what another config makes of it. It needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from toolkit.config.optim import OptimConfig
from toolkit.config.schema import JobConfig, TrainConfig, value_of
from toolkit.constraints import choose

Schedule: TypeAlias = Callable[[int], float]


def total_steps(config: TrainConfig, dataset_size: int, global_batch_size: int) -> int:
    """Return the steps of ``config.epochs`` epochs, rounded up, or ``max_steps`` if that is less."""
    steps = -(-config.epochs * dataset_size // global_batch_size)
    return steps if config.max_steps is None else min(steps, config.max_steps)


def build_schedule(config: OptimConfig, total_steps: int) -> Schedule:
    """Return ``lr(step)``: a linear warm-up, then the schedule's shape. Steps are 0 to ``total_steps`` - 1.

    Warm-up step n (from 0) has lr * (n + 1) / warmup_steps: the first step moves, the last one has the full rate
    ``config.lr``. After the warm-up ``linear`` and ``cosine`` fall from lr toward ``min_lr``, which they would reach
    at step ``total_steps``. ``wsd`` (warm-up, stable, decay: https://arxiv.org/abs/2404.06395) falls in the last
    ``decay_steps`` only.
    """
    shape = choose("optim.schedule", config.schedule, _SHAPES)
    falls_from = config.warmup_steps
    if config.schedule == "wsd":
        decay_steps = total_steps // 5 if config.decay_steps is None else config.decay_steps
        falls_from = max(falls_from, total_steps - decay_steps)

    def lr(step: int) -> float:
        if step < config.warmup_steps:
            return config.lr * (step + 1) / config.warmup_steps
        fallen = min(1.0, max(0, step - falls_from) / max(1, total_steps - falls_from))
        return config.min_lr + (config.lr - config.min_lr) * shape(fallen)

    return lr


#: The share of ``lr`` - ``min_lr`` that is left, as a function of the part of the fall that is done, 0 to 1.
_SHAPES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda fallen: 1.0,
    "linear": lambda fallen: 1.0 - fallen,
    "cosine": lambda fallen: 0.5 * (1.0 + math.cos(math.pi * fallen)),
    "wsd": lambda fallen: 1.0 - fallen,
}


#: The keys that a schedule of the toolkit's depends on.
KEYS = (
    *("optim.lr", "optim.schedule", "optim.min_lr", "optim.warmup_steps", "optim.decay_steps"),
    *("train.epochs", "train.max_steps"),
)
#: Rates that differ by less are the same: figures of a message are rounded.
_SAME = 1e-4


def schedule_settings(config: JobConfig) -> dict[str, Any]:
    """Return the values that a schedule of the toolkit's depends on."""
    return {key: value_of(config, key) for key in KEYS}


def rates_at(rate: Schedule, step: int, keys: Mapping[str, Any], dataset_size: int) -> dict[str, Any]:
    """Return what a checkpoint after ``step`` steps keeps: the rate of its last step, and that of the next."""
    return {"last": rate(max(step - 1, 0)), "next": rate(step), "keys": dict(keys), "dataset_size": dataset_size}


@dataclass(frozen=True)
class RateChange:
    """Another rate than a checkpoint's run would have continued with."""

    text: str
    is_asked: bool  #: the rate itself was set, and not only what it follows from


def rate_change(
    saved: Mapping[str, Any], step: int, rate: float, total: int, keys: Mapping[str, Any], run_id: str
) -> RateChange | None:
    """Return what to report where a run continues at another ``rate`` than it would have. None: nothing.

    ``saved`` is what :func:`rates_at` gave for the checkpoint at ``step``. ``total`` and ``keys`` are the current ones.
    """
    if step >= total:
        return None  # nothing is left to train
    last, expected, then = saved["last"], saved["next"], saved["keys"]
    if any(math.isclose(rate, other, rel_tol=_SAME) for other in (last, expected)):
        return None
    text = f"the learning rate was {last:.4g} at step {step}, and is {rate:.4g} from the next step on"
    changed = [key for key in KEYS if key in keys and key in then and keys[key] != then[key]]
    if changed:
        shown = {key: ["null" if each[key] is None else each[key] for each in (then, keys)] for key in changed}
        text += ": " + ", ".join(f"{key} was {before} and is {now}" for key, (before, now) in shown.items())
    if "optim.lr" in changed:
        return RateChange(text, is_asked=True)
    # A job may have a schedule of its own, to which the keys mean nothing.
    if changed and math.isclose(build_schedule(_optim(keys), total)(step), rate, rel_tol=_SAME):
        text += f". {_ways_to_keep(last, step, total, keys, run_id)}"
    return RateChange(text, is_asked=False)


def rate_change_by(saved: Any, step: int, config: JobConfig, run_id: str) -> RateChange | None:
    """Do as :func:`rate_change` by the config alone. None, too, where its formula is not that of the saved rates."""
    if not isinstance(saved, Mapping) or not {*KEYS} <= saved["keys"].keys():
        return None
    then, size, batch = saved["keys"], saved["dataset_size"], config.data.global_batch_size
    earlier = TrainConfig(epochs=then["train.epochs"], max_steps=then["train.max_steps"])
    formula = build_schedule(_optim(then), total_steps(earlier, size, batch))
    if not math.isclose(formula(step), saved["next"], rel_tol=_SAME):
        return None
    total = total_steps(config.train, size, batch)
    return rate_change(saved, step, build_schedule(config.optim, total)(step), total, schedule_settings(config), run_id)


def _optim(keys: Mapping[str, Any]) -> OptimConfig:
    section = {key.removeprefix("optim."): value for key, value in keys.items() if key.startswith("optim.")}
    return OptimConfig(**section)


def _ways_to_keep(last: float, step: int, total: int, keys: Mapping[str, Any], run_id: str) -> str:
    """Return the commands that keep the rate ``last``, or let it fall from there."""
    rate = f"optim.lr={last:.6g}" + (" optim.warmup_steps=0" if step < keys["optim.warmup_steps"] else "")
    # What a constant rate has no use for is refused with it.
    constant = " optim.min_lr=0" if keys["optim.min_lr"] else ""
    constant += " optim.decay_steps=null" if keys["optim.decay_steps"] is not None else ""
    keep = f"toolkit resume {run_id} optim.schedule=constant {rate}{constant}"
    ways = f"To keep it: `toolkit cancel {run_id}`, then `{keep}`"
    if last > keys["optim.min_lr"]:
        falling = f"optim.schedule=wsd {rate} optim.decay_steps={total - step}"
        ways += f"; to let it fall from there to optim.min_lr: {falling}"
    return ways
