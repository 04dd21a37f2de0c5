"""From gradients to new weights: what every strategy does with a step's complete gradients.

The order: take out the loss scale, measure the norm over all parameters, judge the step, clip the gradient, step the
optimizer (or skip the step), prune weights, update the moving average. What the config does not ask for is left out.

The exponential moving average of the weights (Polyak & Juditsky 1992) lies on the ranks as the weights do.
Floating-point buffers (BatchNorm's statistics) are averaged as well, since averaged weights with the last step's
statistics would be a model that never existed. After t steps the next one counts with at least 9 / (10 + t). With a
decay of 0.9999 alone a short run would end with little but its first weights. Averages of bf16 and fp16 are kept in
fp32, in which a step of 1 - decay does not vanish.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import SGD, Optimizer

from toolkit.base import logs
from toolkit.base.errors import ConfigError, listing
from toolkit.config import TrainConfig
from toolkit.ranks.collectives import broadcast_tensors, gather_objects, sum_tensors
from toolkit.ranks.state import Entry, Json, Replicated, entry, local
from toolkit.strategies.models import refuse_copies, statistics
from toolkit.strategies.update.gradients import Gradients, Total
from toolkit.strategies.update.optimizer_state import OptimizerState

log = logs.get(__name__)


class Update:
    """Owns the optimizer of this rank's part of the model, and all else that changes with a step.

    ``train`` says what else there is; None: nothing. ``total`` sums over the ranks that hold other parts of the model,
    see :class:`~.gradients.ShardedParameters`. ``criterion`` has parameters that are trained as well, under
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
        self._parts = [part for part in (model, criterion) if part is not None]
        for part in self._parts:
            refuse_copies(type(part).__qualname__, part)
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
        self._buffers = _Buffers(self._parts) if leaves_out else None
        self._pruning = None
        if train.pruning.amount:
            from toolkit.plugins.methods.pruning import Pruning

            self._pruning = Pruning(model, train.pruning, total)
        self._average = Average(model, train.ema_decay) if train.ema_decay is not None else None

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
            self._pruning.follow()
        if self._average is not None:
            self._average.follow(made)
            if self._pruning is not None:
                self._pruning.mask(self._average.of)
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
    def following(self, source: int = 0, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Find the buffers that the pass inside this changes. From now on each step sends rank ``source``'s.

        A forward pass may read them: the codebook of a VQ-VAE, the observers of a quantization. A save would lose each
        rank's own, and so a training that was stopped would continue otherwise. Buffers of norms are left out, since no
        pass in training mode reads them. All ranks of ``group`` call it.
        """
        modules = [each for part in self._parts for each in part.modules() if not isinstance(each, _NormBase)]
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

    def equalise(self, source: int = 0, group: dist.ProcessGroup | None = None) -> None:
        """Make the model's buffers and their averages those of rank ``source``. All ranks of ``group`` call it.

        Those of rank ``source`` do not change, so it does not matter when this is called. It sends them once a step.
        """
        if self._buffers_equal:
            return
        self._buffers_equal = True
        averages = [] if self._average is None else self._average.of_buffers()
        broadcast_tensors([*_buffers(self._parts), *averages], source, group)

    def average_statistics(self, group: dist.ProcessGroup | None = None) -> None:
        """Replace BatchNorm's statistics by their mean over ``group`` in each step from now on."""
        self._statistics = statistics(self._model)
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

    def live(self) -> dict[str, Tensor]:
        """Return the weights, the buffers and the tensors of :meth:`state`, as this rank has them. Nothing is sent."""
        found = weights_and_buffers(self._model) | self._slots.live()
        if self._criterion is not None:
            named = self._criterion.named_parameters()
            found |= {f"weights/criterion/{name}": value.detach() for name, value in named}
        for part in (self._pruning, self._average):
            found |= {} if part is None else part.live()
        return found

    def loaded(self, values: Mapping[str, Json]) -> None:
        """Continue from a checkpoint: the tensors of :meth:`state` are filled, ``values`` are its other entries."""
        self._buffers_equal = True
        self._slots.filled(values)
        for part in (self._pruning, self._average):
            if part is not None:
                part.loaded(values)
        if self._buffers is not None:
            self._buffers.keep()

    def figures(self) -> dict[str, float]:
        found = {} if self._gradients is None else self._gradients.figures()
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

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts
        self.keep()

    @torch.no_grad()
    def keep(self) -> None:
        """Keep the buffers as they are now."""
        self._kept = [buffer.clone() for buffer in _buffers(self._parts)]

    def follow(self, left_out: Tensor) -> None:
        # Restore the buffers if the step was skipped, without a look from the host.
        for buffer, kept in zip(_buffers(self._parts), self._kept, strict=True):
            buffer.copy_(torch.where(left_out > 0, kept, buffer))
            kept.copy_(buffer)


def _buffers(parts: Iterable[nn.Module]) -> list[Tensor]:
    return [buffer for part in parts for buffer in part.buffers()]


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


class Average:
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

    def live(self) -> dict[str, Tensor]:
        averages = {}
        for name, tensor in self._live.items():
            kind = "buffers" if name in self._buffers else "optimizer"
            averages[f"{kind}/ema/{name}"] = self.of[tensor]
        return averages

    @torch.no_grad()
    def loaded(self, values: Mapping[str, Json]) -> None:
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
