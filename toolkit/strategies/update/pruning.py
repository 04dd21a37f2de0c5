"""Magnitude pruning: the smallest weights of linear and convolutional layers become 0, more and more, and stay so.

How many follows the cubic schedule of Zhu & Gupta (2017, https://arxiv.org/abs/1710.01878), eq. 1 from 0. Which is
decided by one threshold over the whole model, or, where whole outputs are pruned, over each layer's. The threshold is
the k-th smallest magnitude, found bit by bit with a count over all ranks for each bit: exact, and the same on all
ranks however the weights are cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.config import PruningConfig
from toolkit.dist.state import Entry, Json, Replicated
from toolkit.errors import ConfigError
from toolkit.strategies.layouts import entry, local
from toolkit.strategies.update.parts import Parts, Total

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LEVEL = "mask/level"
#: Of a float32 without its sign: as integers they have the order of the numbers.
_BITS = 31


def level(config: PruningConfig, step: int) -> float:
    """The part of the weights that is pruned once ``step`` steps are made: ``amount`` in ``end_step`` and after it."""
    assert config.end_step is not None
    if step < config.start_step:
        return 0.0
    if step >= config.end_step:
        return config.amount
    last = step - (step - config.start_step) % config.every_steps
    done = (last - config.start_step) / (config.end_step - config.start_step)
    return config.amount * (1 - (1 - done) ** 3)


class Pruning:
    """The masks of the parameters that are pruned. Raises ConfigError for a model in which nothing can be."""

    def __init__(self, model: nn.Module, config: PruningConfig, total: Total | None) -> None:
        self._config = config
        self._step, self._level = 0, 0.0
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, _LAYERS)}
        if config.structured:
            layers = dict(list(layers.items())[:-1])  # the last one's outputs are the model's
        self._device = next(model.parameters()).device
        if not _count(layers, total, self._device):
            kind = "besides its last one " if config.structured else ""
            raise ConfigError(f"train.pruning: this model has no linear or convolutional layer {kind}to prune")
        self._weights: dict[Tensor, str] = {layer.weight: f"{name}.weight" for name, layer in layers.items()}
        self._biases: dict[Tensor, Tensor] = {}  #: of outputs that are pruned whole, by their layer's weight
        self._names = dict(self._weights)
        for name, layer in layers.items() if config.structured else ():
            if isinstance(layer.bias, Tensor):
                self._biases[layer.weight] = layer.bias
                self._names[layer.bias] = f"{name}.bias"
        self._refuse()
        self._masks = {tensor: torch.ones_like(local(tensor), dtype=torch.bool) for tensor in self._names}
        # An output is of one layer, which ranks with other layers do not have; a single weight competes with all.
        self._parts = Parts(self._weights, None if config.structured else total)

    def _refuse(self) -> None:
        for weight, name in self._weights.items():
            cut = [p for p in weight.placements if not p.is_replicate()] if isinstance(weight, DTensor) else []
            # by the dimension: a part that is cut twice, over two sides of a mesh, is no plain shard
            if self._config.structured and any(getattr(place, "dim", None) != 0 for place in cut):
                raise ConfigError(
                    f"train.pruning.structured: outputs of {name} are cut over ranks; set it to false, or use fsdp"
                )

    @torch.no_grad()
    def follow(self) -> None:
        """After a step of the optimizer, whose momentum would bring weights back."""
        self._step += 1
        due = level(self._config, self._step)
        if due > self._level:
            self._prune(due)
            self._level = due
        for tensor, mask in self._masks.items():
            local(tensor).mul_(mask)

    @torch.no_grad()
    def mask(self, others: Mapping[Tensor, Tensor]) -> None:
        """The same weights become 0 in ``others``, which holds a tensor for each parameter."""
        for tensor, mask in self._masks.items():
            others[tensor].mul_(mask)

    def sparsity(self) -> float:
        """The part of the weights that is pruned now; every rank calls it, the host waits."""
        masks = {weight: self._masks[weight] for weight in self._weights}
        counts = {weight: torch.stack([mask.sum(), torch.ones_like(mask).sum()]) for weight, mask in masks.items()}
        like = torch.zeros(2, dtype=torch.int64, device=self._device)
        left, whole = self._parts.sum(counts, like).tolist()
        return float(1 - left / whole)

    def state(self) -> dict[str, Entry]:
        masks = {f"mask/{self._names[t]}": dataclasses.replace(entry(t), value=m) for t, m in self._masks.items()}
        return {_LEVEL: Replicated(self._level), **masks}

    def live(self) -> dict[str, Tensor]:
        return {f"optimizer/mask/{self._names[tensor]}": mask for tensor, mask in self._masks.items()}

    def loaded(self, values: Mapping[str, Json]) -> None:
        """``values`` may hold the step that comes next, from which the schedule goes on."""
        found, step = values.get(_LEVEL, 0.0), values.get("step", self._step)
        assert isinstance(found, (int, float))
        assert isinstance(step, int)
        self._level, self._step = float(found), step

    # ---------------------------------------------------------------------------------------------- the threshold

    def _prune(self, part: float) -> None:
        scores = {weight: self._score(weight) for weight in self._weights}
        groups = {weight: number if self._config.structured else 0 for number, weight in enumerate(scores)}
        highest = self._highest_pruned(scores, groups, part)
        for weight, score in scores.items():
            stays = score > highest[groups[weight]]
            self._masks[weight].copy_(stays.view(-1, *[1] * (weight.ndim - 1)) if self._config.structured else stays)
            if weight in self._biases:
                self._masks[self._biases[weight]].copy_(stays)

    def _score(self, weight: Tensor) -> Tensor:
        """Of each weight its magnitude, or of each output (the first dimension) its norm, as ordered integers."""
        part = local(weight).float()
        magnitudes = part.flatten(1).norm(dim=1) if self._config.structured else part.abs()
        return magnitudes.contiguous().view(torch.int32)

    def _highest_pruned(self, scores: Mapping[Tensor, Tensor], groups: Mapping[Tensor, int], part: float) -> Tensor:
        """Of each group the k-th smallest score for k = ``part`` of them, (groups,) int64; -1 where k is 0.

        It is the largest number below which there are fewer than k scores.
        """
        above_all = torch.full((max(groups.values(), default=0) + 1,), 2**_BITS - 1, device=self._device)
        wanted = (self._below(above_all, scores, groups) * part).round().long()
        found = torch.zeros_like(above_all)
        for bit in reversed(range(_BITS)):
            tried = found | (1 << bit)
            found = torch.where(self._below(tried, scores, groups) < wanted, tried, found)
        return torch.where(wanted > 0, found, -1)

    def _below(self, limits: Tensor, scores: Mapping[Tensor, Tensor], groups: Mapping[Tensor, int]) -> Tensor:
        """How many scores of each group are smaller than its limit, over all ranks; like ``limits`` int64."""
        counts = {weight: torch.zeros_like(limits) for weight in scores}
        for weight, score in scores.items():
            counts[weight][groups[weight]] = (score < limits[groups[weight]]).sum()
        return self._parts.sum(counts, limits)


def _count(layers: Mapping[str, nn.Module], total: Total | None, device: torch.device) -> int:
    """How many there are, on all ranks that hold other parts of the model: one of them may have none."""
    count = torch.tensor(len(layers), device=device)
    return int(count if total is None else total(count))
