"""What a start tries before the first step: passes whose results must agree, and which leave nothing behind.

A strategy that cuts a model, or cuts the batch that a criterion sees, assumes something about the model or the
criterion. Where that does not hold, it would silently train something else. So every start compares, on two samples:

* the model whose layers ranks compute together with the whole one (:class:`WholePass`),
* a pass in training mode with one in evaluation mode, of a pipeline's layers (:mod:`.pipeline.stages`),
* a loss's sum over samples with its sum over the same samples given twice (:class:`CheckedObjective`).

What differs is refused by name, on every rank.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from toolkit import logs
from toolkit.config import TrainConfig
from toolkit.errors import ConfigError, JobFailedError, listing
from toolkit.ranks import nested
from toolkit.ranks.batch import Batch
from toolkit.strategies.layouts import local
from toolkit.strategies.objective import HOW, Forward, Loss, Objective, TrialPass

#: The number of values of a layer's input that are compared, the same ones of the whole tensor on every rank.
SAMPLED = 256
#: How much two passes may differ by rounding, relative to their values. In bf16 each layer adds half a percent.
TOLERANCE, TOLERANCE_BF16 = 0.01, 0.1
OUTPUT = "the model's output"

log = logs.get(__name__)


# ------------------------------------------------------------------------------------------------- leaving no trace


@contextmanager
def same_randomness() -> Iterator[None]:
    """Restore torch's, Python's and numpy's random state afterwards, as if no number had been drawn."""
    plain, legacy = random.getstate(), np.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(legacy)


def random_state() -> tuple[Any, ...]:
    """Return a value that differs once a random number has been drawn."""
    tensors = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensors.append(torch.cuda.get_rng_state())
    legacy: Any = np.random.get_state()
    return (*(tensor.numpy().tobytes() for tensor in tensors), random.getstate(), legacy[1].tobytes(), *legacy[2:])


@contextmanager
def undone(*parts: object) -> Iterator[None]:
    """Undo what passes change in the modules among ``parts``, gradients aside, and in random numbers.

    In the modules these are buffers, mode, extra state, and attributes that hold tensors or plain values: numbers,
    texts, and lists, sets and dictionaries of these. What is inside objects of the model's own classes cannot be
    restored.
    """
    modules = [module for part in parts if isinstance(part, nn.Module) for module in part.modules()]
    kept = [_Kept(module) for module in modules]
    with same_randomness():
        try:
            yield
        finally:
            for each in kept:
                each.put_back()


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_ATOMS = (type(None), bool, int, float, complex, str, bytes)


class _Kept:
    """A copy of what one module has now."""

    def __init__(self, module: nn.Module) -> None:
        own = {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
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
            vars(self._module)[name] = _refilled(value, before)


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple, set, deque)):
        return all(map(_is_plain, value))
    return isinstance(value, _ATOMS)


def _refilled(value: Any, before: Any) -> Any:
    """Return the same object, which others may hold, with its earlier contents."""
    if isinstance(value, (dict, set)):
        value.clear()
        value.update(before)
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(before)
    return value


def has_extra_state(module: nn.Module) -> bool:
    """True if ``module`` keeps something in a checkpoint besides tensors."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


# --------------------------------------------------------------------------------------------------------- refusing


def refuse_together(refusal: str | None) -> None:
    """Raise ConfigError on every rank if any rank has a ``refusal``.

    All call it; the others would wait for that rank.
    """
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, refusal)
    for text in found:
        if text is not None:
            raise ConfigError(text)


def refuse_unused(model: nn.Module, criterion: nn.Module | None = None) -> None:
    """Raise ConfigError for parameters, also a criterion's, that a pass has left without a gradient."""
    unused = without_gradient(model)
    if criterion is not None:
        unused += [f"criterion.{name}" for name in without_gradient(criterion)]
    if unused:
        raise ConfigError(unused_message(unused))


def without_gradient(model: nn.Module) -> list[str]:
    """Return the names of parameters that are trained and have no gradient."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]


def unused_message(names: Sequence[str]) -> str:
    """Return the error text for parameters that get no gradient."""
    return (
        f"model: the loss does not depend on {listing(list(names), 5)}; freeze such parameters "
        "(requires_grad_(False)) or use them in forward(), in every step and on every rank"
    )


# ------------------------------------------------------------------------------------------------- the losses' sums


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

    def __call__(self, model: Forward, batch: Batch) -> dict[str, Loss]:
        outputs: list[Any] = []

        # The model's outputs are kept, so that the check below can call the loss again without the model.
        def recorded(*args: Any, **kwargs: Any) -> Any:
            outputs.append(model(*args, **kwargs))
            return outputs[-1]

        losses = super().__call__(recorded, batch)
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
    """Return why a loss is not a sum over samples.

    None if all are sums, or draw random numbers, so that two calls cannot be compared. For samples that are given twice
    a sum is twice as large, and a mean is not. ``outputs`` are those of the model for ``batch``, of which those for two
    samples are taken.
    """
    two = slice(0, 2)
    try:
        few = [nested.rows(output, len(batch), two) for output in outputs]
        # Two samples once, and the same two twice, with the model's outputs repeated in the same way.
        small = batch.part(0, 2)
        positions = torch.cat([small.positions] * 2)
        given = [small, replace(small, data=nested.twice(small.data), positions=positions)]
        both = [few, [nested.twice(output) for output in few]]
    except (nested.NestingError, JobFailedError):
        return None  # the outputs do not have one row for each sample
    if not len(batch):
        return None
    with undone(objective.module):
        before = random_state()
        found = []
        for samples, replayed in zip(given, both, strict=True):
            # The loss calls a stand-in for the model that returns the recorded outputs in turn.
            outputs_left = iter(replayed)
            found.append(Objective.__call__(objective, lambda *_, left=outputs_left, **__: next(left), samples))
        if random_state() != before:
            return None
    once, twice = found
    for name, loss in once.items():
        for what, one, other in (("value", loss.total, twice[name].total), ("weight", loss.weight, twice[name].weight)):
            if one is None or other is None:
                continue
            # 2 % of rounding, and an absolute margin for values near zero.
            single, double = float(one), float(other)
            if abs(double - 2 * single) > 0.02 * abs(2 * single) + 1e-6:
                which = f"the {what} of the loss{f' {name!r}' if name else ''}"
                return (
                    f"{objective.where}: {which} for two samples given twice is {double:.6g}, and for the two alone "
                    f"{single:.6g}: it is no sum over samples, so that the length of a step would depend on how a "
                    f"batch is shared; {HOW}. A loss that looks at samples together is for a step of your own "
                    "(strategy.name: custom)"
                )
    return None


# ------------------------------------------------------------------------------------- a cut model and the whole one


class WholePass:
    """The layers' inputs in a pass of the whole model, for comparison with the cut model's.

    ``cut`` has the dimension of each layer's input of which a rank of the group has a part; None: it has the whole.
    Only rank 0 has the whole model. Every rank makes this object before the model is cut, and calls :meth:`compare`
    after.
    """

    def __init__(self, model: nn.Module, cut: Mapping[str, int | None], trial: TrialPass) -> None:
        self._cut, self._trial = cut, trial
        self._seen: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        if dist.get_rank() == 0:
            try:
                _pass(model, cut, trial, self._keep)
            except Exception as error:  # a kernel that only a GPU has, say
                self._seen.clear()
                log.warning("the whole model cannot be run on this host, and is not compared with the cut one: "
                            "%s: %s", type(error).__name__, error)  # fmt: skip

    def _keep(self, name: str, tensor: Tensor) -> None:
        self._seen[name] = tuple(tensor.shape), _some(tensor, tuple(tensor.shape), None, 0)

    def compare(self, model: nn.Module, mesh: DeviceMesh, tolerance: float) -> tuple[str, list[str]] | None:
        """Return the first layer whose input differs from the whole model's; None if there is none.

        With it come the layers called since the last one whose input was equal. The result is the same on all ranks,
        which all call it.
        """
        group, ranks, here = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        # Rank 0 says which calls it has recorded; every rank then samples its part of the same places.
        told: list[Any] = [{name: shape for name, (shape, _) in self._seen.items()}]
        dist.broadcast_object_list(told, 0)
        shapes: dict[str, tuple[int, ...]] = told[0]
        found: dict[str, Tensor] = {}

        def keep(name: str, tensor: Tensor) -> None:
            if name in shapes:
                found[name] = _some(local(tensor), shapes[name], self._cut.get(name.partition("#")[0]), here)

        _pass(model, self._cut, self._trial, keep)
        # Rank 0 gets the samples of all ranks of its group and compares them with those of the whole model.
        rows = torch.stack([found.get(name, torch.full((SAMPLED,), torch.nan)) for name in shapes] or [torch.zeros(0)])
        every = rows.new_empty((ranks, *rows.shape)).to(self._trial.device)
        dist.all_gather_into_tensor(every.view(-1), rows.to(every.device).view(-1), group)
        told = [self._first_difference(every.cpu(), tolerance) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(told, 0)
        return told[0]  # type: ignore[no-any-return]

    def _first_difference(self, every: Tensor, tolerance: float) -> tuple[str, list[str]] | None:
        """Return what :meth:`compare` does, on rank 0.

        ``every`` is (ranks, layers, SAMPLED); NaN: the rank lacks the value.
        """
        since: list[str] = []
        for number, (name, (_, whole)) in enumerate(self._seen.items()):
            parts = every[:, number]
            known = ~parts.isnan()
            wrong = torch.where(known, parts - whole, 0.0)
            far = (wrong.norm(dim=1) / whole.where(known, 0.0).norm(dim=1).clamp(min=1e-12)).max().item()
            if far > tolerance and wrong.abs().max().item() > 1e-6:
                return name.partition("#")[0], since
            if known.any():
                since.clear()
            since.append(name.partition("#")[0])
        return None


@torch.no_grad()
def _pass(model: nn.Module, layers: Collection[str], trial: TrialPass, keep: Callable[[str, Tensor], None]) -> None:
    """Make a pass in evaluation mode. ``keep`` gets the input of each call of ``layers``, and the output."""
    calls: Counter[str] = Counter()

    def before(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            keep(f"{name}#{calls[name]}", args[0])
        calls[name] += 1

    # Before the hooks of torch's parallel styles, which communicate.
    hooks = [model.get_submodule(n).register_forward_pre_hook(partial(before, n), prepend=True) for n in layers]
    try:
        with undone(model), torch.compiler.set_stance("force_eager"):
            output = trial(model.eval())
        if isinstance(output, Tensor):
            keep(OUTPUT, output)
    finally:
        for hook in hooks:
            hook.remove()


def _some(tensor: Tensor, shape: tuple[int, ...], cut: int | None, here: int) -> Tensor:
    """Return (SAMPLED,) values of a tensor of ``shape``.

    ``tensor`` may be part ``here`` of it along dimension ``cut``. NaN stands for values that lie on another rank, and
    for all of a tensor that is not such a part.
    """
    # Seed and sizes are those of the whole tensor, so every rank draws the same places.
    draw = torch.Generator().manual_seed(len(shape))
    places = [torch.randint(size, (SAMPLED,), generator=draw) for size in shape]
    found = torch.full((SAMPLED,), torch.nan)
    there = torch.ones(SAMPLED, dtype=torch.bool)
    sizes = [*shape]
    # A cut tensor: shift the places into this rank's part, and note which of them lie in it.
    if tuple(tensor.shape) != shape and cut is not None and -len(shape) <= cut:
        sizes[cut] = tensor.shape[cut] if tensor.ndim == len(shape) else 0
        there = (places[cut] >= here * sizes[cut]) & (places[cut] < (here + 1) * sizes[cut])
        places[cut] = places[cut] - here * sizes[cut]
    if tuple(tensor.shape) == tuple(sizes):
        found[there] = tensor.detach()[tuple(place[there].to(tensor.device) for place in places)].float().cpu()
    return found
