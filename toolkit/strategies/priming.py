"""What a start tries before the first step: passes that must agree, and leave nothing behind.

A strategy that cuts a model, or cuts the batch that a criterion sees, would train something else in silence where the
model or the criterion does what the cut does not allow for. So every start compares, on two samples:

* the model whose layers ranks compute together with the whole one (:class:`WholePass`),
* a pass in training mode with one in evaluation mode, of a pipeline's layers (:mod:`.pipeline.stages`),
* a criterion's sum over samples with its sum over the same samples given twice (:class:`CheckedCriterion`).

What differs is refused by name, on every rank.
"""

from __future__ import annotations

import copy
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from toolkit import logs
from toolkit.errors import ConfigError, listing
from toolkit.strategies.layouts import local
from toolkit.strategies.protocol import Criterion

#: So many values of a layer's input are compared, the same ones of the whole tensor on every rank.
SAMPLED = 256
#: How far two passes may be apart by rounding, relative to their values; in bf16 each layer adds half a percent.
TOLERANCE, TOLERANCE_BF16 = 0.01, 0.1
OUTPUT = "the model's output"

log = logs.get(__name__)


# ------------------------------------------------------------------------------------------------- leaving no trace


@contextmanager
def same_randomness() -> Iterator[None]:
    """Random numbers go on afterwards as if none had been drawn: torch's, Python's and numpy's."""
    plain, legacy = random.getstate(), np.random.get_state()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(legacy)


def random_state() -> tuple[Any, ...]:
    """Return what differs once a random number has been drawn."""
    tensors = [torch.get_rng_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        tensors.append(torch.cuda.get_rng_state())
    legacy: Any = np.random.get_state()
    return (*(tensor.numpy().tobytes() for tensor in tensors), random.getstate(), legacy[1].tobytes(), *legacy[2:])


@contextmanager
def undone(*parts: object) -> Iterator[None]:
    """Undo what passes change in the modules among ``parts``, gradients aside, and in random numbers.

    That is their buffers, their mode, their extra state, and attributes that hold tensors or plain values: numbers,
    texts, and lists, sets and dictionaries of these. What hides in objects of the model's own cannot be put back.
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
    """What one module has now."""

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
    """The same object, which others may hold, with what it held before."""
    if isinstance(value, (dict, set)):
        value.clear()
        value.update(before)
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(before)
    return value


def has_extra_state(module: nn.Module) -> bool:
    """True if ``module`` keeps something in a checkpoint beside tensors."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


# --------------------------------------------------------------------------------------------------------- refusing


def refuse_together(refusal: str | None) -> None:
    """Raise ConfigError on every rank where any rank has a ``refusal``; the others would wait for it. All call it."""
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, refusal)
    for text in found:
        if text is not None:
            raise ConfigError(text)


def refuse_unused(model: nn.Module, criterion: nn.Module | None = None) -> None:
    """Raise ConfigError for parameters, also of a criterion that learns, that a pass has left without a gradient."""
    unused = without_gradient(model)
    if criterion is not None:
        unused += [f"criterion.{name}" for name in without_gradient(criterion)]
    if unused:
        raise ConfigError(unused_message(unused))


def without_gradient(model: nn.Module) -> list[str]:
    """The names of parameters that are trained and have no gradient."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]


def unused_message(names: Sequence[str]) -> str:
    """Of parameters that get no gradient."""
    return (
        f"model: the loss does not depend on {listing(list(names), 5)}; freeze such parameters "
        "(requires_grad_(False)) or use them in forward(), in every step and on every rank"
    )


# -------------------------------------------------------------------------------------------- the criterion's sum


class CheckedCriterion:
    """A criterion that is looked at in every call; ``refusal`` says what is wrong with it.

    The first call may tell nothing: torch's pipelining tries the criterion on memory that nobody has filled.
    """

    def __init__(self, criterion: Criterion) -> None:
        self._criterion = criterion
        self.refusal: str | None = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
        found = self._criterion(outputs, targets)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ConfigError(f"criterion: it returned a {type(found).__name__} and no (sum, weight); {_SUM}")
        if self.refusal is None:
            self.refusal = _no_sum(self._criterion, outputs, targets)
        return found


_SUM = (
    "return the loss summed over the samples, such as (cross_entropy(outputs, targets, reduction='sum'), None); for a "
    "mean over something else, such as tokens, return their number as the weight"
)


@torch.no_grad()
def _no_sum(criterion: Criterion, outputs: Any, targets: Any) -> str | None:
    """Why ``criterion`` is no sum over samples; None if it is one, or draws random numbers, and nobody can tell.

    Of samples that are given twice a sum is twice as large, and a mean is not.
    """
    leaves = [leaf for leaf in tree_leaves((outputs, targets)) if isinstance(leaf, Tensor)]
    if any(not leaf.ndim or len(leaf) != len(leaves[0]) for leaf in leaves) or not len(leaves[0]):
        return None  # not one row for each sample
    with undone(criterion):
        before = random_state()
        given = [tree_map(partial(_rows, times), (outputs, targets)) for times in (1, 2)]
        (once, weight), (twice, double) = (criterion(*each) for each in given)
        if random_state() != before:
            return None
    for what, one, two in (("value", once, twice), ("weight", weight, double)):
        if one is None or two is None:
            continue
        small, large = float(one), float(two)
        if abs(large - 2 * small) > 0.02 * abs(2 * small) + 1e-6:
            return (
                f"criterion: its {what} for two samples given twice is {large:.6g}, and for the two alone {small:.6g}: "
                f"it is no sum over samples, so that the length of a step would depend on how a batch is shared; {_SUM}"
                ". A loss that looks at samples together is for a step of your own (strategy.name: custom)"
            )
    return None


def _rows(times: int, leaf: Any) -> Any:
    return torch.cat([leaf[:2]] * times) if isinstance(leaf, Tensor) else leaf


# ------------------------------------------------------------------------------------- a cut model and the whole one


class WholePass:
    """What the layers of the whole model are given in a pass, to compare the cut one's with.

    ``cut`` has the dimension of each layer's input of which a rank of the group has a part; None: it has the whole.
    Rank 0 alone has the whole model. Every rank makes this before the model is cut, and calls :meth:`compare` after.
    """

    def __init__(self, model: nn.Module, cut: Mapping[str, int | None], inputs: Tensor) -> None:
        self._cut, self._inputs = cut, inputs
        self._seen: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        if dist.get_rank() == 0:
            try:
                _pass(model, cut, inputs, self._keep)
            except Exception as error:  # a kernel that only a GPU has, say
                self._seen.clear()
                log.warning("the whole model cannot be run on this host, and is not compared with the cut one: "
                            "%s: %s", type(error).__name__, error)  # fmt: skip

    def _keep(self, name: str, tensor: Tensor) -> None:
        self._seen[name] = tuple(tensor.shape), _some(tensor, tuple(tensor.shape), None, 0)

    def compare(self, model: nn.Module, mesh: DeviceMesh, tolerance: float) -> tuple[str, list[str]] | None:
        """Return the first layer that gets something else than in the whole model, and those called since the last
        one that got the same; None if there is no such layer. The same on all ranks, which all call it."""
        group, ranks, here = mesh.get_group(), mesh.size(), mesh.get_local_rank()
        told: list[Any] = [{name: shape for name, (shape, _) in self._seen.items()}]
        dist.broadcast_object_list(told, 0)
        shapes: dict[str, tuple[int, ...]] = told[0]
        found: dict[str, Tensor] = {}

        def keep(name: str, tensor: Tensor) -> None:
            if name in shapes:
                found[name] = _some(local(tensor), shapes[name], self._cut.get(name.partition("#")[0]), here)

        _pass(model, self._cut, self._inputs, keep)
        rows = torch.stack([found.get(name, torch.full((SAMPLED,), torch.nan)) for name in shapes] or [torch.zeros(0)])
        every = rows.new_empty((ranks, *rows.shape)).to(self._inputs.device)
        dist.all_gather_into_tensor(every.view(-1), rows.to(every.device).view(-1), group)
        told = [self._first_difference(every.cpu(), tolerance) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(told, 0)
        return told[0]  # type: ignore[no-any-return]

    def _first_difference(self, every: Tensor, tolerance: float) -> tuple[str, list[str]] | None:
        """``every`` (ranks, layers, SAMPLED); NaN is what a rank does not have."""
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
def _pass(model: nn.Module, layers: Collection[str], inputs: Tensor, keep: Callable[[str, Tensor], None]) -> None:
    """A pass in evaluation mode; ``keep`` gets what each call of ``layers`` is given, and the output."""
    calls: Counter[str] = Counter()

    def before(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            keep(f"{name}#{calls[name]}", args[0])
        calls[name] += 1

    # before those of torch's parallel styles, which send
    hooks = [model.get_submodule(n).register_forward_pre_hook(partial(before, n), prepend=True) for n in layers]
    try:
        with undone(model), torch.compiler.set_stance("force_eager"):
            output = model.eval()(inputs.to(next(model.parameters()).device))
        if isinstance(output, Tensor):
            keep(OUTPUT, output)
    finally:
        for hook in hooks:
            hook.remove()


def _some(tensor: Tensor, shape: tuple[int, ...], cut: int | None, here: int) -> Tensor:
    """(SAMPLED,) values of a tensor of ``shape``, of which this one may be part ``here`` along ``cut``.

    NaN is what lies elsewhere, and all of a tensor that is no such part.
    """
    draw = torch.Generator().manual_seed(len(shape))
    places = [torch.randint(size, (SAMPLED,), generator=draw) for size in shape]
    found = torch.full((SAMPLED,), torch.nan)
    there = torch.ones(SAMPLED, dtype=torch.bool)
    sizes = [*shape]
    if tuple(tensor.shape) != shape and cut is not None and -len(shape) <= cut:
        sizes[cut] = tensor.shape[cut] if tensor.ndim == len(shape) else 0
        there = (places[cut] >= here * sizes[cut]) & (places[cut] < (here + 1) * sizes[cut])
        places[cut] = places[cut] - here * sizes[cut]
    if tuple(tensor.shape) == tuple(sizes):
        found[there] = tensor.detach()[tuple(place[there].to(tensor.device) for place in places)].float().cpu()
    return found
