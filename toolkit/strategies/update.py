"""From gradients to new weights: what every strategy does with a step's complete gradients.

The order: take out the loss scale, measure the norm over all parameters, judge the step, clip the gradient, step the
optimizer (or skip the step), prune weights, update the moving average. What the config does not ask for is left out.

The device decides which steps are skipped, and the host waits for nothing. All ranks decide alike without asking each
other, because they decide by the norm of the whole gradient: a NaN in one rank's loss is a NaN in every rank's gradient
once it is summed.

The exponential moving average of the weights (Polyak & Juditsky 1992) lies on the ranks as the weights do.
Floating-point buffers (BatchNorm's statistics) are averaged as well, since averaged weights with the last step's
statistics would be a model that never existed. After t steps the next one counts with at least 9 / (10 + t). With a
decay of 0.9999 alone a short run would end with little but its first weights. Averages of bf16 and fp16 are kept in
fp32, in which a step of 1 - decay does not vanish.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import SGD, Optimizer

from toolkit.base import logs
from toolkit.base.errors import ConfigError, listing
from toolkit.config import TrainConfig
from toolkit.ranks.collectives import broadcast_tensors, gather_objects, sum_in_order, sum_tensors
from toolkit.ranks.state import Entry, Json, Replicated, entry, local
from toolkit.strategies.models import batchnorm_buffers, refuse_copies
from toolkit.strategies.optimizer_state import OptimizerState

log = logs.get(__name__)


class OptimizerWrapper:
    """Owns the optimizer of this rank's part of the model, and all else that changes with a step.

    ``train`` says what else there is; None: nothing. ``total`` sums over the ranks that hold other parts of the model,
    see :class:`ShardedParameters`. ``criterion`` has parameters that are trained as well, under
    ``criterion/<name>``; those that the optimizer lacks become a group of their own. Raises ConfigError if the
    optimizer cannot skip a step where that is asked for, if it has a parameter of neither model nor criterion, if a
    ``state_dict()`` has copies, or if nothing can be pruned.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        train: TrainConfig | None = None,
        total: Total | None = None,
        criterion: nn.Module | None = None,
    ) -> None:
        train = train or TrainConfig()
        self._criterion = criterion
        self._modules = [module for module in (model, criterion) if module is not None]
        for module in self._modules:
            refuse_copies(type(module).__qualname__, module)
        names = _names(model, criterion)
        # The optimizer's groups are completed before they are split and before their learning rates are compared.
        _complete(optimizer, criterion, names)
        self._model = model
        self._statistics: list[Tensor] = []  #: BatchNorm's, if they are averaged over the group's ranks
        self._group: dist.ProcessGroup | None = None
        self._followed: list[tuple[nn.Module, str]] = []  #: buffers that are sent in each step: their places
        self._source = 0
        self._buffers_equal = True  #: on all ranks, as the first ones are
        self._optimizer = optimizer
        # Kernels for several parameters at once take one kind only: split groups that hold both plain parameters
        # and DTensors. A model of which some layers are cut over ranks has both.
        groups, optimizer.param_groups = optimizer.param_groups, []
        for group in groups:
            sharded = [parameter for parameter in group["params"] if isinstance(parameter, DTensor)]
            plain = [parameter for parameter in group["params"] if not isinstance(parameter, DTensor)]
            optimizer.param_groups += [{**group, "params": kind} for kind in (sharded, plain) if kind] or [group]
        self._ratios = _ratios(optimizer)
        self._slots = OptimizerState(names, optimizer)
        # The rest exists only if the config asks for it.
        leaves_out = train.skip_bad_steps or train.precision == "fp16"
        looks = leaves_out or train.clip_norm is not None
        self._gradients = Gradients(names, train, total) if looks else None
        if leaves_out and not getattr(optimizer, "_step_supports_amp_scaling", False):
            key = "skip_bad_steps" if train.skip_bad_steps else "precision"
            raise ConfigError(
                f"train.{key}: this {type(optimizer).__name__} cannot leave out a step on the device; use torch's Adam "
                "or AdamW with fused=True, or its SGD, which has that for weights that are not sharded only"
            )
        self._buffers = _Buffers(self._modules) if leaves_out else None
        self._pruning = None
        if train.pruning.amount:
            from toolkit.plugins.methods.pruning import Pruning

            self._pruning = Pruning(model, train.pruning, total)
        self._average = WeightAverage(model, train.ema_decay) if train.ema_decay is not None else None

    def begin(self) -> None:
        """Prepare for the forward pass of a step, which changes buffers."""
        self._buffers_equal = False
        self.hide_average()

    def hide_average(self) -> None:
        """Give the model its own weights back if an evaluation has swapped in the average."""
        if self._average is not None:
            self._average.show(False)

    def evaluating(self) -> None:
        """Prepare for a pass of an evaluation. It uses the averaged weights if there are any."""
        if self._average is not None:
            self._average.show(True)

    def scaled(self, loss: Tensor) -> Tensor:
        """Return the loss to go backward from. With fp16 it is a multiple, since small gradients would be 0."""
        scale = None if self._gradients is None else self._gradients.scale
        return loss if scale is None else loss * scale.value

    def apply(self, lr: float) -> Tensor | None:
        """Make one optimizer step along the gradients in ``.grad``, then drop them. Returns ``StepOutput.skipped``.

        ``lr`` is the schedule's; a group with a rate of its own keeps the ratio to it that it was made with.
        """
        self._slots.forget_unfilled()
        for group, ratio in zip(self._optimizer.param_groups, self._ratios, strict=True):
            group["lr"] = lr * ratio
        # The host does not learn whether the step is skipped: the optimizer's kernel reads that on the device.
        skipped = made = None if self._gradients is None else self._gradients.prepare()
        if skipped is None:
            self._optimizer.step()
        else:
            made = self._step_unless(skipped)
        self._optimizer.zero_grad()
        # What follows the weights: statistics, then masks, then the average, which gets the masks, too.
        if self._followed or self._statistics:
            self._share_buffers()
        if self._pruning is not None:
            self._pruning.after_step()
        if self._average is not None:
            self._average.follow(made)
            if self._pruning is not None:
                self._pruning.apply_masks(self._average.of)
        return skipped

    @torch.no_grad()
    def _share_buffers(self) -> None:
        if self._followed:
            broadcast_tensors(_held(self._followed), self._source, self._group)
        wide = [value.double() for value in self._statistics]  # in fp64 the mean of equal values is that value
        if wide:
            sum_tensors(wide, self._group, 1 / dist.get_world_size(self._group))
            for value, mean in zip(self._statistics, wide, strict=True):
                value.copy_(mean)
        if self._buffers is not None:
            self._buffers.keep()

    @contextmanager
    def track_changed_buffers(self, source: int = 0, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Find the buffers that the pass inside this changes. From now on each step sends rank ``source``'s.

        A forward pass may read them: the codebook of a VQ-VAE, the observers of a quantization. A save would lose each
        rank's own, and so a training that was stopped would continue otherwise. Buffers of norms are left out, since no
        pass in training mode reads them. All ranks of ``group`` call it.
        """
        modules = [each for module in self._modules for each in module.modules() if not isinstance(each, _NormBase)]
        places = [(each, name) for each in modules for name, buffer in each._buffers.items() if buffer is not None]
        before = [buffer.clone() for buffer in _held(places)]
        yield
        changed = [_differs(each._buffers[name], old) for (each, name), old in zip(places, before, strict=True)]
        if places:
            by_rank = gather_objects(changed, group)
            self._followed = [place for place, *own in zip(places, *by_rank, strict=True) if any(own)]
            self._source, self._group = source, group

    def drop(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad()

    def broadcast_buffers(self, source: int = 0, group: dist.ProcessGroup | None = None) -> None:
        """Make the model's buffers and their averages those of rank ``source``. All ranks of ``group`` call it.

        Those of rank ``source`` do not change, so it does not matter when this is called. It sends them once a step.
        """
        if self._buffers_equal:
            return
        self._buffers_equal = True
        averages = [] if self._average is None else self._average.of_buffers()
        broadcast_tensors([*_buffers(self._modules), *averages], source, group)

    def average_statistics(self, group: dist.ProcessGroup | None = None) -> None:
        """Replace BatchNorm's statistics by their mean over ``group`` in each step from now on."""
        self._statistics = batchnorm_buffers(self._model)
        self._group = group

    def state(self) -> dict[str, Entry]:
        """Return everything here that a resume needs, live. The model has its own weights from here on."""
        self.hide_average()
        found: dict[str, Entry] = dict(self._slots.entries())
        if self._criterion is not None:
            found |= {f"criterion/{name}": Replicated(value) for name, value in self._criterion.state_dict().items()}
        for part in (self._gradients, self._pruning, self._average):
            found |= {} if part is None else part.state()
        return found

    def live_state(self) -> dict[str, Tensor]:
        """Return the weights, the buffers and the tensors of :meth:`state`, as this rank has them. Nothing is sent."""
        found = weights_and_buffers(self._model) | self._slots.live_state()
        if self._criterion is not None:
            named = self._criterion.named_parameters()
            found |= {f"weights/criterion/{name}": value.detach() for name, value in named}
        for part in (self._pruning, self._average):
            found |= {} if part is None else part.live_state()
        return found

    def on_loaded(self, values: Mapping[str, Json]) -> None:
        """Continue from a checkpoint: the tensors of :meth:`state` are filled, ``values`` are its other entries."""
        self._buffers_equal = True
        self._slots.filled(values)
        for part in (self._pruning, self._average):
            if part is not None:
                part.on_loaded(values)
        if self._buffers is not None:
            self._buffers.keep()

    def step_metrics(self) -> dict[str, float]:
        found = {} if self._gradients is None else self._gradients.step_metrics()
        return found if self._pruning is None else {**found, "train/sparsity": self._pruning.sparsity()}

    @torch.no_grad()
    def _step_unless(self, skipped: Tensor) -> Tensor:
        """Make the step if ``skipped`` is 0 on the device, and return 1 then, else 0."""
        left_out = (skipped > 0).float()
        # torch's fused SGD makes its momenta in its first step, and leaves them without values if that is skipped. From
        # zeros the first step is the same: 0 times the momentum, plus the gradient.
        if isinstance(self._optimizer, SGD):
            for group in self._optimizer.param_groups:
                for parameter in group["params"] if group["momentum"] else ():
                    if parameter.grad is not None and self._optimizer.state[parameter].get("momentum_buffer") is None:
                        self._optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        stepper = cast(Any, self._optimizer)
        # torch's GradScaler sets this attribute on optimizers that support it; a fused kernel reads it.
        stepper.found_inf = left_out
        try:
            self._optimizer.step()
        finally:
            del stepper.found_inf
        if self._buffers is not None:
            self._buffers.follow(left_out)
        return 1 - left_out


def weights_and_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's parts as ``weights/<name>`` and ``buffers/<name>``, see `toolkit.strategies.protocol`."""
    weights = {f"weights/{name}": local(value) for name, value in model.named_parameters()}
    return weights | {f"buffers/{name}": value for name, value in model.named_buffers()}


class _Buffers:
    """The buffers as they were before a step. The forward pass of a step that is skipped has changed them."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the buffers as they are now."""
        self._kept = [buffer.clone() for buffer in _buffers(self._modules)]

    def follow(self, left_out: Tensor) -> None:
        # Restore the buffers if the step was skipped, without a look from the host.
        for buffer, kept in zip(_buffers(self._modules), self._kept, strict=True):
            buffer.copy_(torch.where(left_out > 0, kept, buffer))
            kept.copy_(buffer)


def _buffers(modules: Iterable[nn.Module]) -> list[Tensor]:
    return [buffer for module in modules for buffer in module.buffers()]


def _differs(now: Tensor | None, before: Tensor) -> bool:
    """True if a pass has changed a buffer, or replaced it by another kind."""
    same_kind = now is not None and (now.shape, now.dtype, now.device) == (before.shape, before.dtype, before.device)
    return now is None or not same_kind or not torch.equal(now, before)


def _held(places: Iterable[tuple[nn.Module, str]]) -> list[Tensor]:
    """Return the buffers that the modules have now; a pass may replace one."""
    return [buffer for module, name in places if (buffer := module._buffers[name]) is not None]


def _names(model: nn.Module, criterion: nn.Module | None) -> dict[Tensor, str]:
    """Return the name of each parameter that an optimizer may have."""
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    own = () if criterion is None else criterion.named_parameters()
    return names | {parameter: f"criterion/{name}" for name, parameter in own}


def _complete(optimizer: Optimizer, criterion: nn.Module | None, names: Mapping[Tensor, str]) -> None:
    """Give ``optimizer`` what the criterion learns. Raises ConfigError for a parameter that has no name."""
    has: set[Tensor] = set()
    for group in optimizer.param_groups:
        has.update(group["params"])
    unknown = [f"one of shape {tuple(parameter.shape)}" for parameter in has if parameter not in names]
    if unknown:
        raise ConfigError(
            f"optim.name: this {type(optimizer).__name__} has parameters that neither the model nor the criterion has "
            f"({listing(unknown, 3)}): they would be in no checkpoint, and each rank would train its own; make them "
            "parameters of the model, or of a criterion that is a torch.nn.Module"
        )
    # The job makes its optimizer from the model, so the parameters of the criterion may be missing.
    learnt = [] if criterion is None else [p for p in criterion.parameters() if p.requires_grad and p not in has]
    if learnt:
        optimizer.add_param_group({"params": learnt})


def _ratios(optimizer: Optimizer) -> list[float]:
    """Return each group's learning rate divided by the optimizer's, which the schedule's replaces."""
    groups, own = optimizer.param_groups, float(optimizer.defaults.get("lr", 0.0))
    if not own:
        if any(float(group.get("lr", 0.0)) for group in groups):
            raise ConfigError(
                f"optim.lr: this {type(optimizer).__name__} has no learning rate of its own, for which the schedule's "
                "could stand; give it the config's: lr=config.lr"
            )
        return [1.0] * len(groups)
    ratios = [float(group["lr"]) / own for group in groups]
    if any(ratio != 1 for ratio in ratios):
        sizes = [len(group["params"]) for group in groups]
        parts = [f"{ratio:g} ({size} tensors)" for ratio, size in zip(ratios, sizes, strict=True)]
        log.info("parameter groups have their own part of the learning rate: %s", ", ".join(parts))
    return ratios


_DECAY, _STEPS = "ema/decay", "ema/steps"


class WeightAverage:
    """``ema/<name>`` of all parameters and buffers but integers. They can be swapped with the model's values."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, decay: float) -> None:
        self._decay = decay
        # A tied weight has several names, and a reader of a checkpoint may want any of them.
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]
        self._live = {name: tensor for name, tensor in named if tensor.is_floating_point() or tensor.is_complex()}
        self._buffers: dict[str, tuple[nn.Module, str]] = {}  #: the places of those that are averaged
        for name, _ in model.named_buffers():
            if name in self._live:
                path, _, leaf = name.rpartition(".")
                self._buffers[name] = model.get_submodule(path), leaf
        copies = {tensor: _wide(local(tensor)).clone() for tensor in self._live.values()}
        self.of = copies  #: this rank's part of the average of each tensor of the model
        self._steps: int | Tensor = 0  #: averaged so far; a tensor if only the device knows
        self._is_shown = False
        self._own: dict[Tensor, Tensor] = {}  #: of tensors that cannot hold their average, while shown; by average

    @torch.no_grad()
    def follow(self, made: Tensor | None) -> None:
        """Move the averages after a step. ``made`` is 0 on the device if it was skipped; None: no step is skipped."""
        self._find_replaced()
        averages, live = [*self.of.values()], [_wide(local(tensor)) for tensor in self.of]
        if made is None:
            assert not isinstance(self._steps, Tensor)
            kept = (1 + self._steps) / (10 + self._steps)
            torch._foreach_lerp_(averages, live, 1 - min(self._decay, kept))
            self._steps += 1
        else:
            # On the device also at the first step after a load: a Python number would be rounded otherwise.
            steps = torch.zeros_like(made) + self._steps
            weight = made * (1 - ((1 + steps) / (10 + steps)).clamp(max=self._decay))
            torch._foreach_lerp_(averages, live, [weight.to(average.dtype) for average in averages])
            self._steps = steps + made

    def show(self, is_shown: bool) -> None:
        """Give the model the averages, or its own weights again. A second call changes nothing."""
        if self._is_shown != is_shown:
            self._swap()

    def state(self) -> dict[str, Entry]:
        entries: dict[str, Entry] = {_DECAY: Replicated(self._decay), _STEPS: Replicated(int(self._steps))}
        for name, tensor in self._live.items():  # an average lies on the ranks as its tensor does
            entries[f"ema/{name}"] = dataclasses.replace(entry(tensor), value=self.of[tensor])
        return entries

    def of_buffers(self) -> list[Tensor]:
        """Return the averages of buffers, in the same order on all ranks."""
        return [self.of[self._live[name]] for name in self._buffers]

    def live_state(self) -> dict[str, Tensor]:
        averages = {}
        for name, tensor in self._live.items():
            kind = "buffers" if name in self._buffers else "optimizer"
            averages[f"{kind}/ema/{name}"] = self.of[tensor]
        return averages

    @torch.no_grad()
    def on_loaded(self, values: Mapping[str, Json]) -> None:
        """Start from the weights that were loaded if the checkpoint has no average.

        A checkpoint that does not say how many steps its average has seen was made before the first steps counted more.
        """
        self._steps = int(cast(int, values.get(_STEPS, values.get("step", 0) if _DECAY in values else 0)))
        if _DECAY not in values:
            for tensor, average in self.of.items():
                average.copy_(local(tensor))

    @torch.no_grad()
    def _swap(self) -> None:
        """Swap in place, one tensor at a time. Others (a data-parallel wrapper, a sharded gather) hold the tensors."""
        self._find_replaced()
        for tensor, average in self.of.items():
            live = local(tensor)
            if live.dtype == average.dtype:
                kept = average.clone()
                average.copy_(live)
                live.copy_(kept)
            # A half-precision weight cannot hold its fp32 average: its own value is put aside meanwhile.
            elif self._is_shown:
                live.copy_(self._own.pop(average))
            else:
                self._own[average] = live.clone()
                live.copy_(average)
        self._is_shown = not self._is_shown

    def _find_replaced(self) -> None:
        """Let the averages follow buffers that a pass has replaced by other tensors of the same shape."""
        for name, (module, leaf) in self._buffers.items():
            now, before = module._buffers[leaf], self._live[name]
            if now is before or now is None or now.shape != before.shape or _wide(now).dtype != self.of[before].dtype:
                continue
            self.of[now] = self.of.pop(before)
            self._live[name] = now


def _wide(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in fp32 if its own type has fewer digits than an average needs."""
    return tensor.float() if tensor.is_floating_point() and tensor.itemsize < 4 else tensor


#: Sums a small tensor over the ranks that hold other parts of the model.
Total: TypeAlias = Callable[[Tensor], Tensor]
_Groups: TypeAlias = tuple[dist.ProcessGroup, ...]


class ShardedParameters:
    """The parameters of a model, of which this rank may hold parts.

    A DTensor knows over which dimensions of its mesh it is cut. Sums run over those, and not over the others, along
    which it lies whole on each rank. ``total`` is for what a plain tensor does not know: that other ranks hold other
    parameters (the stages of a pipeline, the shards of servers). None: they hold the same ones.
    """

    def __init__(self, parameters: Iterable[Tensor], total: Total | None = None) -> None:
        self._cut = {parameter: _cut_over(parameter) for parameter in parameters}
        self._kinds = list(dict.fromkeys(self._cut.values()))  # same order on all ranks: each is a collective
        self._total = total

    def sum(self, values: Mapping[Tensor, Tensor], like: Tensor) -> Tensor:
        """Return the sum of ``values``, by this rank's parts of parameters, over all parts. Every rank calls it.

        Each value has the shape of ``like``.
        """
        whole = torch.zeros_like(like)
        # One collective for each way of cutting; a rank without such parameters adds zeros.
        for kind in self._kinds:
            found = [value for parameter, value in values.items() if self._cut[parameter] == kind]
            part = torch.stack(found).sum(0) if found else torch.zeros_like(like)
            for group in kind:
                part = sum_in_order(part, group)
            whole += part
        return whole if self._total is None else self._total(whole)

    def norm(self, gradients: Mapping[Tensor, Tensor], device: torch.device) -> Tensor:
        """Return the 2-norm of all ranks' ``gradients`` as one vector, float64.

        It is that of ``torch.nn.utils.get_total_norm``, but squares are added in double precision: they cannot
        overflow.
        """
        norms = torch._foreach_norm(list(gradients.values())) if gradients else [torch.zeros((), device=device)]
        squares = torch.stack([*norms]).double().square()
        if self._kinds in ([], [()]) and self._total is None:  # replicas, the common case
            return squares.sum().sqrt()
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return self.sum(dict(zip(gradients, squares, strict=False)), zero).sqrt()


def _cut_over(parameter: Tensor) -> _Groups:
    """Return the process groups whose ranks hold different parts of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    cut = (dim for dim, placement in enumerate(parameter.placements) if not placement.is_replicate())
    return tuple(mesh.get_group(dim) for dim in cut if mesh.size(dim) > 1)


MADE, NOT_FINITE, SPIKE, OVERFLOW = 0, 1, 2, 3
#: Why a step was skipped.
WHY = {
    NOT_FINITE: "its gradient is not finite",
    SPIKE: "its gradient is far larger than those before it (train.spike_factor)",
    OVERFLOW: "fp16 overflowed, the loss scale is halved",
}
#: The factor by which older norms lose weight with each step that is made. Their average looks back about 100 steps.
DECAY = 0.99
#: The number of steps made before one can be a spike. The first norms of a training are unlike the later ones.
WARM_UP = 20
_ENOUGH = (1 - DECAY ** (WARM_UP - 0.5)) / (1 - DECAY)


class SpikeDetector:
    """Decides whether to skip a step. ``factor`` is ``train.spike_factor``; None: skip only what is not finite."""

    def __init__(self, factor: float | None, device: torch.device) -> None:
        self._factor = factor
        #: The sum of the norms of the steps made, and of their weights; older steps weigh less.
        self._norms = torch.zeros(2, dtype=torch.float64, device=device)

    def verdict(self, norm: Tensor) -> Tensor:
        """Return MADE, NOT_FINITE or SPIKE for a gradient with this ``norm``. It is a uint8 scalar on the device."""
        why = torch.where(norm.isfinite(), MADE, NOT_FINITE)
        if self._factor is not None:
            # A spike: the norm is more than ``factor`` times the mean of the norms so far, total / weight.
            total, weight = self._norms
            is_spike = (weight > _ENOUGH) & (norm * weight > self._factor * total)
            why = torch.where((why == MADE) & is_spike, SPIKE, why)
            # Only steps that are made enter the mean.
            grown = self._norms * DECAY + torch.stack([norm, torch.ones_like(norm)])
            self._norms.copy_(torch.where(why == MADE, grown, self._norms))
        return why.to(torch.uint8)

    def state(self) -> dict[str, Entry]:
        return {} if self._factor is None else {"update/norms": Replicated(self._norms)}


class LossScale:
    """fp16's loss scale. It does what torch.amp.GradScaler does, with its kernel and its constants."""

    FIRST, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000

    def __init__(self, device: torch.device) -> None:
        self.value = torch.full((), self.FIRST, device=device)
        self._clean_steps = torch.zeros((), dtype=torch.int32, device=device)

    def explained(self, why: Tensor) -> Tensor:
        """Return ``why``, with OVERFLOW for NOT_FINITE while the scale is above 1. It may be the cause then."""
        return torch.where((why == NOT_FINITE) & (self.value > 1), OVERFLOW, why).to(torch.uint8)

    def update(self, why: Tensor) -> None:
        """Halve the scale after an overflow, double it after ``INTERVAL`` steps without one. A spike is no overflow."""
        overflow = ((why == NOT_FINITE) | (why == OVERFLOW)).float()
        torch._amp_update_scale_(self.value, self._clean_steps, overflow, self.GROWTH, self.BACKOFF, self.INTERVAL)

    def state(self) -> dict[str, Entry]:
        return {"update/loss_scale": Replicated(self.value), "update/clean_steps": Replicated(self._clean_steps)}


class Gradients:
    """The gradients of all ``parameters``, or of this rank's parts of them. Nothing in it makes the host wait."""

    #: The same as in torch.nn.utils.clip_grad_norm_.
    _LEAST_NORM = 1e-6

    def __init__(self, parameters: Iterable[Tensor], train: TrainConfig, total: Total | None) -> None:
        self._parameters = list(parameters)
        self._device = local(self._parameters[0]).device if self._parameters else torch.device("cpu")
        self._sharded = ShardedParameters(self._parameters, total)
        self._clip_norm = train.clip_norm
        self.scale = LossScale(self._device) if train.precision == "fp16" else None
        judges = train.skip_bad_steps or self.scale is not None
        self._judge = SpikeDetector(train.spike_factor, self._device) if judges else None
        #: The norm of the last step's gradient, before clipping.
        self.norm: Tensor | None = None

    @torch.no_grad()
    def prepare(self) -> Tensor | None:
        """Prepare ``.grad`` for the optimizer. Return whether to skip the step (:class:`SpikeDetector`)."""
        gradients = {p: local(p.grad) for p in self._parameters if p.grad is not None}
        self.norm = self._sharded.norm(gradients, self._device)
        # The gradients still have the loss scale in them; one multiplication takes it out and clips.
        if self.scale is not None:
            self.norm = self.norm / self.scale.value
        why = None if self._judge is None else self._judge.verdict(self.norm)
        factor = None
        if self._clip_norm is not None:
            factor = (self._clip_norm / (self.norm + self._LEAST_NORM)).clamp(max=1.0)
        if self.scale is not None:
            factor = 1 / self.scale.value if factor is None else factor / self.scale.value
        if factor is not None:
            torch._foreach_mul_(list(gradients.values()), factor.float())
        # Only now: the factor above must be that of the old scale.
        if self.scale is not None and why is not None:
            why = self.scale.explained(why)
            self.scale.update(why)
        return why

    def state(self) -> dict[str, Entry]:
        parts = [part.state() for part in (self._judge, self.scale) if part is not None]
        return {name: value for part in parts for name, value in part.items()}

    def step_metrics(self) -> dict[str, float]:
        """Return ``train/grad_norm`` of the last step, before clipping, and fp16's ``train/loss_scale``."""
        found = {} if self.norm is None else {"train/grad_norm": float(self.norm)}
        return found if self.scale is None else {**found, "train/loss_scale": float(self.scale.value)}
