"""What a start tries before the first step: passes whose results must agree. They leave nothing behind.

A strategy that cuts a model, or the batch that a criterion sees, assumes something about it. Where that does not hold,
it would silently train something else. So every start compares, on two samples:

* the model whose layers ranks compute together with the whole one (tensor),
* a pass in training mode with one in evaluation mode, where a strategy cuts the model into stages,
* a loss's sum over samples with its sum over the same samples given twice (:class:`CheckedObjective`).

What differs is refused by name, on every rank.
"""

from __future__ import annotations

import copy
import inspect
import math
import random
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.base.errors import ConfigError, JobFailedError, listing
from toolkit.config import TrainConfig
from toolkit.data import randomness
from toolkit.devices import accelerator
from toolkit.hang import PRIMING, Activity
from toolkit.ranks import nested
from toolkit.ranks.batch import Batch
from toolkit.ranks.collectives import gather_objects
from toolkit.strategies.objective import HOW, Forward, Loss, Objective


@contextmanager
def same_randomness() -> Iterator[None]:
    """Restore all generators afterwards, those that the job holds as well, as if no number had been drawn."""
    plain, legacy = random.getstate(), np.random.get_state()
    held = [(each, randomness.state_of(each)) for each in randomness.HELD]
    with accelerator.forked_rng():
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(legacy)
            for each, state in held:
                randomness.set_state(each, state)


def rng_fingerprint() -> tuple[Any, ...]:
    """Return a value that differs once a random number has been drawn."""
    tensors = [torch.get_rng_state(), *accelerator.random_states()]
    legacy: Any = np.random.get_state()
    of_torch = [tensor.numpy().tobytes() for tensor in tensors]
    states = [randomness.state_of(each) for each in randomness.HELD]
    held = [each.numpy().tobytes() if isinstance(each, Tensor) else repr(each) for each in states]
    return (*of_torch, *held, random.getstate(), legacy[1].tobytes(), *legacy[2:])


@contextmanager
def undone(*parts: object) -> Iterator[None]:
    """Undo what passes change in the modules among ``parts``, gradients aside, and in random numbers.

    These are buffers, mode, extra state, and attributes that hold tensors or plain values: numbers, texts, and lists,
    sets and dictionaries of these. What is inside objects of the model's own classes cannot be restored.
    """
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    kept = [_Kept(module) for module in modules]
    with same_randomness():
        try:
            yield
        finally:
            for each in kept:
                each.put_back()


_ATOMS = (type(None), bool, int, float, complex, str, bytes)


class _Kept:
    """A copy of what one module has now."""

    def __init__(self, module: nn.Module) -> None:
        own = {name: value for name, value in vars(module).items() if name not in randomness.OF_EVERY_MODULE}
        self._module, self._training = module, module.training
        self._buffers = {name: (b, b.detach().clone()) for name, b in module._buffers.items() if b is not None}
        self._tensors = {name: (t, t.detach().clone()) for name, t in own.items() if isinstance(t, Tensor)}
        self._values = {name: (value, copy.deepcopy(value)) for name, value in own.items() if _is_plain(value)}
        self._extra = copy.deepcopy(module.get_extra_state()) if has_extra_state(module) else None

    @torch.no_grad()
    def put_back(self) -> None:
        self._module.training = self._training
        for kept, place in ((self._buffers, self._module._buffers), (self._tensors, vars(self._module))):
            # Restore the values in place, and the tensor itself where a pass has replaced it.
            for name, (tensor, before) in kept.items():
                tensor.detach().copy_(before)
                place[name] = tensor
        if self._extra is not None:
            self._module.set_extra_state(self._extra)
        for name, (value, before) in self._values.items():
            # The same object, which others may hold, gets its earlier contents.
            if isinstance(value, (dict, set)):
                value.clear()
                value.update(before)
            elif isinstance(value, (list, deque)):
                value.clear()
                value.extend(before)
            vars(self._module)[name] = value


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple, set, deque)):
        return all(map(_is_plain, value))
    return isinstance(value, _ATOMS)


def has_extra_state(module: nn.Module) -> bool:
    """True if ``module`` keeps something in a checkpoint besides tensors."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


@contextmanager
def priming(
    objective: Objective, train: TrainConfig, model: nn.Module, activity: Activity, *, probes: int = 0
) -> Iterator[CheckedObjective]:
    """Let the one pass inside it change nothing but gradients. The pass is to use the objective that is yielded.

    What that finds is for :func:`refuse_together`, after the pass: a rank that raised in it would leave the others
    waiting. Raises ConfigError if compiling fails. ``probes``: see :class:`CheckedObjective`.
    """
    activity.phase = PRIMING
    failures: tuple[type[Exception], ...] = ()
    if train.compile:
        from torch._dynamo.exc import TorchDynamoException

        failures = (TorchDynamoException,)
    try:
        with undone(model, objective.module):
            yield CheckedObjective(objective, train, probes=probes)
    except failures as error:  # the compiler's own text would fill pages
        cause = inspect.cleandoc(str(error)).split("\n")[0]
        raise ConfigError(
            f"train.compile: torch.compile failed on this model ({type(error).__name__}: {cause}); "
            "set train.compile: false, or see that a C++ compiler is on the ranks' PATH"
        ) from error


def shareable(sample: Batch | None, shares: int, ranks: str = "ranks") -> Batch:
    """Return ``sample``. Raises ConfigError if its global batch has fewer samples than there are ``shares``."""
    if sample is None or sample.global_count < shares:
        size = f"fewer samples than {ranks}" if sample is None else f"{sample.global_count} samples"
        raise ConfigError(
            f"data.global_batch_size: {size} cannot be shared by {shares} {ranks}: some would have none; use {shares} "
            "or more"
        )
    return sample


def refuse_together(refusal: str | None, unused: Collection[str] = (), group: dist.ProcessGroup | None = None) -> None:
    """Raise ConfigError on every rank if any rank has a ``refusal``, or else ``unused`` parameters.

    All ranks of ``group`` call it; the others would wait for that rank.
    """
    every = gather_objects((refusal, list(unused)), group)
    for text, _ in every:
        if text is not None:
            raise ConfigError(text)
    if names := dict.fromkeys(name for _, of_rank in every for name in of_rank):
        raise ConfigError(unused_message([*names]))


def params_without_grad(model: nn.Module, criterion: nn.Module | None = None) -> list[str]:
    """Return the names of parameters, also a criterion's, that are trained and have no gradient."""
    named = [*model.named_parameters()]
    if criterion is not None:
        named += [(f"criterion.{name}", parameter) for name, parameter in criterion.named_parameters()]
    return [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]


def unused_message(names: Sequence[str]) -> str:
    """Return the error text for parameters that get no gradient."""
    return (
        f"model: the loss does not depend on {listing(list(names), 5)}; freeze such parameters "
        "(requires_grad_(False)) or use them in forward(), in every step and on every rank"
    )


class CheckedObjective(Objective):
    """An objective that checks the losses of every call. ``refusal`` says what is wrong with it.

    The first call may be meaningless: torch's pipelining tries the loss on uninitialized memory.
    """

    def __init__(self, objective: Objective, train: TrainConfig, *, probes: int = 0) -> None:
        """Refuse losses that are not finite as well, unless ``train`` continues after them.

        The first ``probes`` calls are not checked for that.
        """
        super().__init__(objective.loss, objective.module)
        self.refusal: str | None = None
        self.names: tuple[str, ...] = ()  #: of the losses
        self._is_finite = train.on_nan == "stop" and not train.skip_bad_steps
        self._probes = probes

    def __call__(self, model: Forward, batch: Batch, divisor: float = 1.0) -> dict[str, Loss]:
        outputs: list[Any] = []

        # The model's outputs are kept, so that the check below can call the loss again without the model.
        def recorded(*args: Any, **kwargs: Any) -> Any:
            outputs.append(model(*args, **kwargs))
            return outputs[-1]

        losses = super().__call__(recorded, batch, divisor)
        self.refusal = self._refused(losses) or self.refusal or _no_sum(self, outputs, batch)
        self.names = tuple(losses)
        self._probes -= 1
        return losses

    def _refused(self, losses: Mapping[str, Loss]) -> str | None:
        for name, loss in losses.items():
            which = f"{self.where}: the loss{f' {name!r}' if name else ''}"
            if self._is_finite and self._probes <= 0 and not bool(loss.total.detach().isfinite()):
                return (
                    f"{which} of the first step is {float(loss.total.detach()):g}: look at the data, the first weights "
                    "and what the loss divides by; train.on_nan: warn trains on"
                )
        if torch.is_grad_enabled() and not any(loss.total.requires_grad for loss in losses.values()):
            return f"{self.where}: the loss depends on no parameter: is there a detach(), item() or no_grad() in it?"
        return None


@torch.no_grad()
def _no_sum(objective: Objective, outputs: Sequence[Any], batch: Batch) -> str | None:
    """Return why a loss is not a sum over samples: for two samples given twice it must be twice as large.

    None if all are sums, or draw random numbers, so that two calls cannot be compared. ``outputs`` are those of the
    model for ``batch``.
    """
    two = slice(0, 2)
    try:
        few = [nested.slice_samples(output, len(batch), two) for output in outputs]
        # Two samples once, and the same two twice, with the model's outputs repeated in the same way.
        small = batch.part(0, 2)
        positions = torch.cat([small.positions] * 2)
        given = [small, replace(small, data=nested.repeat_samples(small.data), positions=positions)]
        both = [few, [nested.repeat_samples(output) for output in few]]
    except (nested.NestingError, JobFailedError):
        return None  # the outputs do not have one row for each sample
    if not len(batch):
        return None
    with undone(objective.module):
        before = rng_fingerprint()
        found = []
        for samples, replayed in zip(given, both, strict=True):
            # The loss calls a stand-in for the model that returns the recorded outputs in turn.
            outputs_left = iter(replayed)
            found.append(Objective.__call__(objective, lambda *_, left=outputs_left, **__: next(left), samples))
        if rng_fingerprint() != before:
            return None
    once, twice = found
    for name, loss in once.items():
        for what, one, other in (("value", loss.total, twice[name].total), ("weight", loss.weight, twice[name].weight)):
            if one is None or other is None:
                continue
            # 2 % of rounding, and a margin for values near zero. torch's pipelines probe with whatever is in memory, of
            # which twice may overflow.
            single, double = float(one), float(other)
            if math.isfinite(double) and abs(double - 2 * single) > 0.02 * abs(2 * single) + 1e-6:
                which = f"the {what} of the loss{f' {name!r}' if name else ''}"
                return (
                    f"{objective.where}: {which} for two samples given twice is {double:.6g}, and for the two alone "
                    f"{single:.6g}: it is not a sum over samples, so that the length of a step would depend on how a "
                    f"batch is shared; {HOW}. A loss that looks at samples together is for a step of your own "
                    "(strategy.name: custom)"
                )
    return None
