"""Cuts a model, as a chain of layers, into the stages of a pipeline.

Such a model hands one tensor from layer to layer and does nothing else between them, but that a layer may also be given
the model's input. Two passes check that, one in evaluation mode and one in training mode. Layers are the model's
children; ``Sequential``, ``ModuleList`` and modules that hold blocks (strategies/models.py) are opened, a block is not.
Other stages' layers are deleted from the model, so every name stays that of the whole model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from toolkit.base.errors import ConfigError, did_you_mean, listing
from toolkit.plugins.model_parallel.stage_module import Grid
from toolkit.ranks.collectives import broadcast_object
from toolkit.strategies.layouts import make_on_rank_0
from toolkit.strategies.models import blocks, checkpoint_activations, refuse_extra_state, to_training_mode
from toolkit.strategies.priming import rng_fingerprint, undone, unused_message
from toolkit.strategies.protocol import ModelFactory


@dataclass(frozen=True)
class StagePlan:
    """The names of each stage's layers in call order, and of layers never called."""

    stages: tuple[tuple[str, ...], ...]
    idle: tuple[str, ...]  # without a parameter to train; they stay with the first stage
    with_input: frozenset[str] = frozenset()  # the layers that are also given the model's input

    def kept(self, stages: Sequence[int]) -> list[str]:
        """Return the layers that a rank with these stages has."""
        return [name for stage in stages for name in self.stages[stage]] + list(self.idle if 0 in stages else ())


@dataclass(frozen=True)
class _Call:
    name: str
    layer: nn.Module
    cost: int
    rows: tuple[int, ...]  # the first dimension of its output
    takes_input: bool  # whether it is also given the model's input


def plan(model: nn.Module, inputs: Tensor, stages: int, split: Sequence[str]) -> StagePlan:
    """Cut ``model`` into ``stages`` by its pass over ``inputs``, two samples or more.

    ``split`` names the layers that begin a stage, except the first one. Without it the cost of the largest stage is as
    small as possible; a layer costs the floating-point operations of its forward pass and one for each parameter. Each
    stage has a parameter to train, and a layer without parameters stays with the one before it. The cut depends on the
    model and the shape of ``inputs`` only. Raises ConfigError for a model that is not a chain, has fewer layers than
    stages, or shares parameters between them.
    """
    # Both modes must call the same layers, and parameters must belong to layers that are called.
    calls = _watch(model, inputs, training=False)
    _refuse_other_calls(calls, _watch(model, inputs, training=True))
    names = [call.name for call in calls]
    idle = [name for name in _layers(model) if name not in names]
    layers = [*names, *idle]
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    loose = [name for name, _ in named if owner(name, layers) is None]
    if loose:
        raise ConfigError(
            f"strategy.name: {listing(loose, 5)} belongs to the model and to none of its layers, so that no stage of a "
            "pipeline would have it; move it into a layer, or use fsdp"
        )
    unused = [name for name, p in model.named_parameters() if p.requires_grad and owner(name, idle) is not None]
    if unused:
        raise ConfigError(unused_message(unused))
    # Cut where the config says, or so that stages cost about the same.
    groups = _groups(calls)
    starts = _named_starts(calls, split) if split else _even_starts(groups, stages)
    ends = [*starts[1:], len(calls)]
    cut = tuple(tuple(names[start:end]) for start, end in zip(starts, ends, strict=True))
    found = StagePlan(cut, tuple(idle), frozenset(call.name for call in calls if call.takes_input))
    # Refuse cuts that cannot be trained.
    _refuse_shared(model, found)
    for number, layers_of_stage in enumerate(cut):
        if not any(_trains(model.get_submodule(name)) for name in layers_of_stage):
            raise ConfigError(
                f"strategy.pipeline.split: stage {number} ({listing(list(layers_of_stage), 5)}) has no parameter to "
                "train; move the boundary"
            )
    bent = [calls[end - 1].name for end in ends if calls[end - 1].rows != (len(inputs),)]
    if bent:
        raise ConfigError(
            f"strategy.pipeline.split: {listing(bent, 5)} ends a stage and does not return one row for each sample; "
            "let stages end where samples are the first dimension"
        )
    return found


def retain_layers(model: nn.Module, names: Sequence[str]) -> None:
    """Delete from ``model`` all layers except these."""
    for name in set(_layers(model)) - set(names):
        parent, _, leaf = name.rpartition(".")
        del model.get_submodule(parent)._modules[leaf]


def tensors(model: nn.Module, layers: Sequence[str]) -> dict[str, Tensor]:
    """Return the parameters and buffers of these layers, in the order of the model."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named if owner(name, layers) is not None}


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    whole = set(blocks(model))

    def inside(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            # Open modules that hold blocks, and containers whose own pass, if they have one, is that of their children.
            # A block is one layer.
            kind = type(child)
            if isinstance(child, nn.Sequential):
                only_holds = kind.forward is nn.Sequential.forward
            else:
                only_holds = isinstance(child, (nn.ModuleList, nn.ModuleDict)) and kind.forward is nn.Module.forward
            if child not in whole and (only_holds or not whole.isdisjoint(child.modules())):
                yield from inside(child, f"{prefix}{name}.")
            else:
                yield prefix + name, child

    return dict(inside(model, ""))


class _CallRecorder:
    """Records the calls of layers in one pass. Raises ConfigError if more happens than that they hand one tensor on."""

    def __init__(self, inputs: Tensor, counter: FlopCounterMode, mode: str) -> None:
        self.calls: list[_Call] = []
        self._counter = counter
        self._mode = mode
        self._began = 0
        self._inputs = inputs
        self._hand("the model's input", inputs)

    def before(self, name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if any(call.layer is layer for call in self.calls):
            raise ConfigError(
                f"strategy.name: {name} is called twice in a pass, and a pipeline gives each layer one place; let the "
                "model make a layer for each of its calls, or use fsdp"
            )
        if kwargs or not 1 <= len(args) <= 2 or any(other is not self._inputs for other in args[1:]):
            count = len(args) + len(kwargs)
            raise ConfigError(f"strategy.name: {name} is called with {count} arguments; {_HINT}")
        self.check(args[0], name)
        self._began = self._counter.get_total_flops()

    def after(self, name: str, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not isinstance(output, Tensor):
            raise ConfigError(f"strategy.name: {name} returns a {type(output).__name__} and no tensor; {_HINT}")
        size = sum(parameter.numel() for parameter in layer.parameters())
        cost = self._counter.get_total_flops() - self._began + size
        self.calls.append(_Call(name, layer, cost, output.shape[:1], len(args) == 2))
        self._hand(name, output)

    def _hand(self, name: str, tensor: Tensor) -> None:
        self._name, self._tensor, self._version = name, tensor, tensor._version
        self._random = rng_fingerprint()

    def check(self, found: Any, name: str) -> None:
        """Raise ConfigError unless ``found``, which ``name`` is given, is what the last layer returned."""
        does = None
        # An operation in place shows in the tensor's version.
        if found is not self._tensor or found._version != self._version:
            does = "computes something"
        if rng_fingerprint() != self._random:  # for dropout, for noise, or to skip layers now and then
            does = "draws random numbers"
        if does is not None:
            raise ConfigError(
                f"strategy.name: between {self._name} and {name} the model {does} outside of its layers, in "
                f"{self._mode} mode; {_HINT}"
            )


_HINT = (
    "a pipeline needs a model that hands one tensor from layer to layer and does nothing between them: move it into a "
    "layer (see TokenEmbedding in jobs/llama.py), or use fsdp"
)


def _watch(model: nn.Module, inputs: Tensor, *, training: bool) -> list[_Call]:
    handles = []
    with undone(model), torch.no_grad(), FlopCounterMode(display=False) as counter:
        watch = _CallRecorder(inputs, counter, "training" if training else "evaluation")
        for name, layer in _layers(model).items():
            handles.append(layer.register_forward_pre_hook(partial(watch.before, name), with_kwargs=True))
            handles.append(layer.register_forward_hook(partial(watch.after, name)))
        try:
            if not training:
                model.eval()
            # As in modes.in_training(): only a model that is in evaluation mode as a whole is changed.
            elif not model.training:
                model.train()
            watch.check(model(inputs), "the model's output")
        finally:
            for handle in handles:
                handle.remove()
    return watch.calls


def _refuse_other_calls(evaluation: Sequence[_Call], training: Sequence[_Call]) -> None:
    names, others = [call.name for call in evaluation], [call.name for call in training]
    different = next((pair for pair in zip_longest(names, others) if pair[0] != pair[1]), None)
    if different is not None:
        raise ConfigError(
            f"strategy.name: in evaluation mode the model calls {different[0] or 'nothing more'} where it calls "
            f"{different[1] or 'nothing more'} in training mode, and a pipeline calls the same layers in both; let a "
            "layer itself do what only one of them does, or use fsdp"
        )


def _groups(calls: Sequence[_Call]) -> list[tuple[int, int]]:
    """Return ``(first call, cost)`` of each layer with parameters to train, with those without that follow it."""
    firsts = [number for number, call in enumerate(calls) if _trains(call.layer)]
    firsts[:1] = [0]
    ends = [*firsts[1:], len(calls)]
    costs = [call.cost for call in calls]
    return [(first, sum(costs[first:end])) for first, end in zip(firsts, ends, strict=True)]


def _even_starts(groups: Sequence[tuple[int, int]], stages: int) -> list[int]:
    """Return the first call of each stage, with the largest one as small as possible; of such cuts the most even."""
    if len(groups) < stages:
        raise ConfigError(
            f"strategy.mesh.stages: this model has {len(groups)} layers with parameters to train, too few for {stages} "
            "stages; use fewer stages, or a deeper model"
        )
    costs = [cost for _, cost in groups]
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}  # by the number of groups that the stages so far hold
    # Dynamic programming: the best cut of the first ``end`` groups into stages, one stage more in each turn.
    for stage in range(stages):
        longer: dict[int, tuple[int, int, list[int]]] = {}
        for end in range(stage + 1, len(costs) - (stages - stage - 1) + 1):
            # The stage begins at ``start``: compare the largest stage, then the squares of all of them.
            candidates = []
            for start, (largest, squares, starts) in best.items():
                if start < end:
                    cost = sum(costs[start:end])
                    candidates.append((max(largest, cost), squares + cost * cost, [*starts, start]))
            longer[end] = min(candidates)
        best = longer
    *_, starts = best[len(costs)]
    return [groups[start][0] for start in starts]


def _named_starts(calls: Sequence[_Call], split: Sequence[str]) -> list[int]:
    names = [call.name for call in calls]
    starts = [0]
    # A stage begins with the first called layer that has the name or is inside the module of that name.
    for wanted in split:
        found = next((n for n, name in enumerate(names) if owner(name, [wanted]) is not None), None)
        if found is None:
            raise ConfigError(
                f"strategy.pipeline.split: no layer {wanted!r}; {did_you_mean(wanted, names)}there are, in this order: "
                f"{', '.join(names)}"
            )
        starts.append(found)
    # The first start is 0, so a split at the first layer is refused as well.
    if sorted(set(starts)) != starts:
        raise ConfigError(
            f"strategy.pipeline.split: {', '.join(split)} do not follow each other; the order of the layers is "
            f"{', '.join(names)}"
        )
    return starts


def owner(name: str, layers: Sequence[str]) -> str | None:
    """Return the one of ``layers`` that ``name`` is, or is inside of."""
    return next((layer for layer in layers if name == layer or name.startswith(f"{layer}.")), None)


def _trains(layer: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in layer.parameters())


def _refuse_shared(model: nn.Module, found: StagePlan) -> None:
    users: dict[Tensor, set[int]] = defaultdict(set)
    names: dict[Tensor, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[parameter].append(name)
        for stage in range(len(found.stages)):
            if owner(name, found.kept([stage])) is not None:
                users[parameter].add(stage)
    for tensor, stages in users.items():
        if len(stages) > 1:
            raise ConfigError(
                f"strategy.name: {' and '.join(names[tensor])} are one parameter, and belong to different stages of "
                "the pipeline; give each layer its own, keep them in one stage (strategy.pipeline.split), or use fsdp"
            )


def place(
    make: ModelFactory, inputs: Tensor, grid: Grid, device: torch.device, *, split: list[str], recompute: int
) -> tuple[nn.Module, StagePlan]:
    """Return the model with this rank's layers only, and the plan of the stages.

    The layers are on ``device``, with rank 0's weights: only rank 0 makes the model with values. Every rank calls it.
    ``inputs`` and ``split``: see :func:`.stages.plan`. Raises ConfigError, on all ranks, for a model that cannot be
    cut.
    """
    model = make_on_rank_0(make)
    refuse_extra_state(model, "a pipeline")
    if recompute:
        checkpoint_activations(model, recompute)
    here = next(model.parameters()).device  # the inputs may be on the GPU already
    # Only rank 0's model has values, so it plans for all. Its refusal is raised on every rank.
    found: StagePlan | None = None
    refusal = ""
    if dist.get_rank() == 0:
        try:
            found = plan(model, inputs.to(here), grid.stage_count, split)
        except ConfigError as error:
            refusal = str(error)
    found, refusal = broadcast_object(0, (found, refusal))
    if found is None:
        raise ConfigError(refusal)
    # Rank 0 keeps all tensors to send them; every rank, rank 0 as well, then deletes the layers of other ranks.
    whole = tensors(model, found.kept(range(grid.stage_count))) if dist.get_rank() == 0 else {}
    retain_layers(model, found.kept(grid.stages))
    is_meta = any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    model = to_training_mode(model.to_empty(device=device) if is_meta else model.to(device))
    _hand_out(whole, model, found, grid, device)
    return model, found


def _hand_out(whole: Mapping[str, Tensor], model: nn.Module, plan: StagePlan, grid: Grid, device: torch.device) -> None:
    """Send every other rank the tensors of its layers from rank 0. One is sent at a time."""
    if dist.get_rank():
        # Rank 0 sends in the same order, the model's.
        for tensor in tensors(model, plan.kept(grid.stages)).values():
            arrived = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            dist.recv(arrived, 0)
            tensor.copy_(arrived)
        return
    for rank in range(1, dist.get_world_size()):
        layers = plan.kept(grid.stages_of(rank))
        for name, tensor in whole.items():
            if owner(name, layers) is not None:
                dist.send(tensor.to(device).contiguous(), rank)
