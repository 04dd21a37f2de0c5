"""What a strategy trains on: losses over a batch, each with a weight.

A loss's sum over the global batch is divided by the sum of its weights. A job says for each loss whether it is a sum
or a mean. A strategy adds the sums up over micro-batches and ranks and divides once, so that the length of a step does
not depend on how a batch is shared.

A criterion may learn (a temperature, weights of several losses): its parameters are trained with the model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from toolkit.base.errors import ConfigError, JobCodeError, listing
from toolkit.ranks.batch import Batch
from toolkit.ranks.collectives import broadcast_tensors

#: A pass through the model, with whatever arguments its ``forward`` takes.
Forward: TypeAlias = Callable[..., Any]

#: Suffix of a figure's name in the sums of an evaluation: the entry holds what the figure is divided by.
WEIGHT = "\0weight"


@dataclass(frozen=True)
class Loss:
    """A loss, or another figure, of a batch: a sum and its divisor, which are both added up over the global batch.

    Made by :meth:`sum` or :meth:`mean`; ``0.1 * loss`` is a multiple of it. The examples: a loss of a batch, several
    losses by name, and a loss of those tokens of a batch that are real::

        >>> errors, is_real = torch.tensor([1.0, 2.0, 9.0]), torch.tensor([True, True, False])
        >>> loss = toolkit.Loss.mean(errors.mean())
        >>> losses = {"pixels": toolkit.Loss.sum(errors.sum()), "kl": 0.1 * toolkit.Loss.mean(errors.mean())}
        >>> toolkit.Loss.sum(errors[is_real].sum(), weight=is_real.sum())
        Loss(total=tensor(3.), weight=tensor(2), is_mean_over_samples=False)
    """

    total: Tensor
    weight: Tensor | None = None
    is_mean_over_samples: bool = False

    @classmethod
    def sum(cls, value: Tensor, weight: Tensor | float | None = None) -> Loss:
        """Make a loss of ``value``, a scalar summed over the batch.

        The sum over the global batch is divided by that of the weights. Without ``weight`` each sample weighs one.
        """
        return cls(value, _weight(weight, value))

    @classmethod
    def mean(cls, value: Tensor, count: Tensor | float | None = None) -> Loss:
        """Make a loss of ``value``, a scalar: the mean over ``count`` things. Default: over the batch's samples."""
        if count is None:
            return cls(value, None, is_mean_over_samples=True)
        weight = _weight(count, value)
        assert weight is not None
        return cls(value * weight, weight)

    def summed(self, samples: int, divisor: float = 1.0) -> Loss:
        """Return this loss as a sum over ``samples`` samples, divided by ``divisor``. The sum has no dimensions."""
        total = self.total.reshape(()) if self.total.ndim else self.total  # a reshape would go backward, too
        # A product takes a kernel, and one more in the backward pass: the mean over an even share needs none.
        factor = (samples if self.is_mean_over_samples else 1) / divisor
        return Loss(total if factor == 1 else total * factor, self.weight)

    def __mul__(self, factor: float) -> Loss:
        """Return this loss times a number."""
        return replace(self, total=self.total * factor)

    __rmul__ = __mul__


def _weight(value: Tensor | float | None, like: Tensor) -> Tensor | None:
    if value is None or isinstance(value, Tensor):
        return value
    return torch.tensor(float(value), device=like.device)


@dataclass(frozen=True)
class Gathered:
    """A figure of an evaluation that is gathered and not averaged. It has a row for each sample, (n, ...).

    A job's ``summary`` gets the rows of the whole eval set, in its order, on the CPU::

        >>> def evaluate(self, model, batch):
        ...     return {"scores": toolkit.Gathered(model(batch.inputs)), "classes": toolkit.Gathered(batch.targets)}
    """

    values: Tensor


#: What a job's ``loss`` returns: a loss, one value for each sample (n,), or several of these by name.
Losses: TypeAlias = Loss | Tensor | Mapping[str, Loss | Tensor]

#: ``measure(model, batch)``: figures by name, each a value for each sample (n,), a :class:`Loss` or :class:`Gathered`.
Measure: TypeAlias = Callable[[Forward, Batch], Mapping[str, Loss | Tensor | Gathered]]

#: ``criterion(outputs, targets) -> (sum, weight)`` for batches that are pairs; see :func:`criterion_objective`.
Criterion: TypeAlias = Callable[[Any, Any], tuple[Tensor, Tensor | None]]


@dataclass
class Objective:
    """A job's ``loss(model, batch)``; ``module`` has parameters that are trained besides the model's.

    A call returns the losses by name, as sums by ``divisor``. A loss without a name has the name "".
    """

    loss: Callable[[Forward, Batch], Losses]
    module: nn.Module | None = None

    def __call__(self, model: Forward, batch: Batch, divisor: float = 1.0) -> dict[str, Loss]:
        """Return the losses by name. Raises JobCodeError for a value that is not a loss."""
        given = self.loss(model, batch)
        if isinstance(given, Mapping):
            return {name: self._summed(name, value, len(batch), divisor) for name, value in given.items()}
        return {"": self._summed("", given, len(batch), divisor)}

    def _summed(self, name: str, value: Any, samples: int, divisor: float) -> Loss:
        if isinstance(value, Tensor) and value.shape == (samples,):
            value = Loss(value.sum())
        if isinstance(value, Loss) and isinstance(value.total, Tensor) and value.total.numel() == 1:
            return value.summed(samples, divisor)
        if isinstance(value, Loss):
            what = f"has the shape {tuple(getattr(value.total, 'shape', ()))} and is not a scalar"
        elif isinstance(value, Tensor):
            what = f"is a tensor of shape {tuple(value.shape)}"
        else:
            what = f"is a {type(value).__name__}"
        raise JobCodeError(f"{self.where}: the loss{f' {name!r}' if name else ''} {what}; {HOW}")

    @property
    def where(self) -> str:
        """Return the file and line of the job's loss."""
        return where(self.loss)


HOW = (
    "return toolkit.Loss.sum(value) of a sum over the batch's samples, toolkit.Loss.mean(value) of a mean over them, "
    "toolkit.Loss.mean(value, count) of a mean over something else such as tokens, or one value for each sample (n,)"
)


def where(function: Callable[..., Any]) -> str:
    """Return ``file:line`` of a function, or its name if that is not known."""
    try:
        function = inspect.unwrap(function)
        return f"{inspect.getsourcefile(function)}:{inspect.getsourcelines(function)[1]}"
    except (TypeError, OSError):
        return repr(function)


def criterion_objective(criterion: Criterion) -> Objective:
    """Return the objective of a criterion of (outputs, targets). Samples are pairs (input, target)."""

    def loss(model: Forward, batch: Batch) -> Loss:
        found = criterion(model(batch.inputs), batch.targets)
        if not isinstance(found, tuple) or len(found) != 2:
            raise ConfigError(f"criterion: it returned a {type(found).__name__} instead of (sum, weight); {HOW}")
        return Loss.sum(*found)

    return Objective(loss, criterion if isinstance(criterion, nn.Module) else None)


def common_weight(losses: Mapping[str, Loss]) -> bool:
    """True if the sums of all losses are divided by the same weight."""
    first, *others = losses.values()
    return all(other.weight is first.weight for other in others)


def refuse_other_weights(losses: Mapping[str, Loss], key: str) -> None:
    """Raise ConfigError unless the sums of all losses are divided by the same weight. The error names ``key``."""
    if not common_weight(losses):
        weights = {name: "samples" if loss.weight is None else "its own" for name, loss in losses.items()}
        names = ", ".join(f"{name} ({weight})" for name, weight in weights.items())
        raise ConfigError(
            f"{key}: the job's losses are divided by different weights: {names}; that takes one pass for the whole "
            "batch of a rank, under ddp, fsdp, zero or tensor: give all of them the same weight (one tensor)"
        )


def weights_of(passes: Sequence[Mapping[str, Loss]]) -> list[Tensor | None]:
    """Return the weight of each pass, by which all of its losses are divided."""
    return [next(iter(losses.values())).weight for losses in passes]


def total_weight(passes: Sequence[Mapping[str, Loss]]) -> Tensor | None:
    """Return the sum of the passes' weights, float64. None if the losses have no weights."""
    weights = [weight.detach().double() for weight in weights_of(passes) if weight is not None]
    return torch.stack(weights).sum() if weights else None


def means_of(passes: Sequence[Mapping[str, Loss]], *factors: Tensor | float) -> dict[str, Tensor]:
    """Return the sum of each loss over ``passes``, which are detached, by name, times ``factors``."""
    means = {}
    for name in passes[0]:
        first, *others = [losses[name].total for losses in passes]
        means[name] = sum(others, first)
        for factor in factors:
            # Each product takes a kernel. One by 1, as where every rank counts, changes no bit.
            if isinstance(factor, Tensor) or factor != 1:
                means[name] = means[name] * factor
    return means


@dataclass(frozen=True)
class Sums:
    """What an evaluation found in one batch, on this rank alone."""

    values: Mapping[str, Tensor]  #: sums over ``count`` samples by name, and by name and ``WEIGHT`` their weights
    count: int
    rows: Mapping[str, Tensor] = field(default_factory=dict)  #: (count, ...), of the samples at ``positions``
    positions: Tensor | None = None

    def zeroed(self) -> Sums:
        """Return the same names with zeros: another rank's values count."""
        return Sums({name: torch.zeros_like(value) for name, value in self.values.items()}, 0)


def measured(measure: Measure, model: Forward, batch: Batch) -> Sums:
    """Return the sums of an evaluation's figures over ``batch``. Raises JobCodeError for what is not a figure."""
    figures = measure(model, batch)
    if not isinstance(figures, Mapping):
        raise JobCodeError(f"{where(measure)}: it returned a {type(figures).__name__}; return figures by name")
    sums, rows = dict[str, Tensor](), dict[str, Tensor]()
    for name, figure in figures.items():
        if isinstance(figure, Gathered):
            values = figure.values
            if not (isinstance(values, Tensor) and values.ndim and len(values) == len(batch)):
                shape = tuple(getattr(values, "shape", ()))
                raise JobCodeError(
                    f"{where(measure)}: the rows {name!r} have the shape {shape}, and the batch has {len(batch)} "
                    "samples"
                )
            rows[name] = values.detach()
            continue
        summed = _figure(measure, name, figure, len(batch))
        sums[name] = summed.total.detach()
        # A figure with a weight of its own has a second entry for it.
        if summed.weight is not None:
            sums[name + WEIGHT] = summed.weight.detach()
    return Sums(sums, len(batch), rows, batch.positions)


def _figure(measure: Measure, name: str, figure: Any, samples: int) -> Loss:
    if isinstance(figure, Tensor) and figure.shape == (samples,):
        return Loss(figure.sum(dtype=torch.float64))
    if isinstance(figure, Loss) and isinstance(figure.total, Tensor) and figure.total.numel() == 1:
        return figure.summed(samples)
    shape = f" of shape {tuple(figure.shape)}" if isinstance(figure, Tensor) else ""
    raise JobCodeError(
        f"{where(measure)}: the figure {name!r} is a {type(figure).__name__}{shape}; return one value for each sample "
        f"({samples},), or toolkit.Loss.sum(value) of a sum over the batch, or toolkit.Loss.mean(value)"
    )


class CaptureDone(BaseException):
    """Ends a call of the model by :func:`capture_model_inputs`. Not an Exception, which a job might catch."""


def capture_model_inputs(
    call: Callable[[Forward, Batch], object], batch: Batch
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments with which ``call`` first calls the model. None if it does not call it."""
    given: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def capture(*args: Any, **kwargs: Any) -> Any:
        nonlocal given
        given = args, kwargs
        raise CaptureDone

    with suppress(CaptureDone):
        call(capture, batch)
    return given


class TrialPass:
    """A pass of two samples of a real batch through a model. The model is called as the objective calls it."""

    def __init__(self, objective: Objective, batch: Batch, device: torch.device) -> None:
        self._objective, self._batch = objective, batch
        self.device = device  #: of this rank

    def __call__(self, model: nn.Module) -> Any:
        """Return the model's output. Raises ConfigError if the loss does not call the model."""
        two = self._batch.part(0, min(2, len(self._batch))).to(next(model.parameters()).device)
        given = capture_model_inputs(self._objective, two)
        if given is None:
            raise ConfigError(f"{self._objective.where}: the loss never calls the model that it is given")
        return model(*given[0], **given[1])


def trainable_module(objective: Objective) -> nn.Module | None:
    """Return the objective's module if it has parameters that are trained, else None."""
    module = objective.module
    return module if module is not None and any(p.requires_grad for p in module.parameters()) else None


def place_learnt(objective: Objective, device: torch.device) -> nn.Module | None:
    """Put what an objective learns on ``device``, with rank 0's first values. Every rank calls it."""
    module = trainable_module(objective)
    if module is not None:
        module.to(device).train()
        broadcast_tensors([*module.parameters(), *module.buffers()], source=0)
    return module


def refuse_learnt(objective: Objective, strategy: str) -> None:
    """Raise ConfigError for an objective that learns, whose parameters ``strategy`` would not train."""
    module = trainable_module(objective)
    if module is not None:
        names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        raise ConfigError(
            f"strategy.name: {strategy} trains the model alone, and the criterion has parameters, too "
            f"({listing(names, 3)}); use ddp, fsdp, zero or tensor, or make them parameters of the model"
        )
