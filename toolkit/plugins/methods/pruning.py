"""Magnitude pruning: the smallest weights of linear and convolutional layers become 0, more and more, and stay 0.

The amount follows the cubic schedule of Zhu & Gupta (2017, https://arxiv.org/abs/1710.01878), eq. 1 from 0. One
threshold decides over the whole model, or over each layer where whole outputs are pruned: the k-th smallest magnitude,
found bit by bit with a count over all ranks for each bit. It is exact, and the same however the weights are cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from toolkit.base.errors import ConfigError
from toolkit.config import PruningConfig
from toolkit.ranks.state import Entry, Json, Replicated, entry, local
from toolkit.strategies.update import ShardedParameters, Total

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LEVEL = "mask/level"
#: The bits of a float32 without its sign. As integers they have the order of the numbers.
_BITS = 31


def target_sparsity(config: PruningConfig, step: int) -> float:
    """Return the part of the weights that is pruned after ``step`` steps. From ``end_step`` on it is ``amount``."""
    assert config.end_step is not None
    if step < config.start_step:
        return 0.0
    if step >= config.end_step:
        return config.amount
    last = step - (step - config.start_step) % config.every_steps
    done = (last - config.start_step) / (config.end_step - config.start_step)
    return config.amount * (1 - (1 - done) ** 3)


class Pruning:
    """The masks of the parameters that are pruned. Raises ConfigError for a model in which nothing can be pruned."""

    def __init__(self, model: nn.Module, config: PruningConfig, total: Total | None) -> None:
        self._config = config
        self._step, self._level = 0, 0.0
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, _LAYERS)}
        if config.structured:
            layers = dict(list(layers.items())[:-1])  # the last one's outputs are the model's
        self._device = next(model.parameters()).device
        # Ranks may hold other parts of the model, and one of them no such layer.
        count = torch.tensor(len(layers), device=self._device)
        if not int(count if total is None else total(count)):
            kind = "besides its last one " if config.structured else ""
            raise ConfigError(f"train.pruning: this model has no linear or convolutional layer {kind}to prune")
        self._weights: dict[Tensor, str] = {layer.weight: f"{name}.weight" for name, layer in layers.items()}
        self._biases: dict[Tensor, Tensor] = {}  #: of outputs that are pruned whole, by their layer's weight
        self._names = dict(self._weights)
        for name, layer in layers.items() if config.structured else ():
            placements = layer.weight.placements if isinstance(layer.weight, DTensor) else ()
            cut = [placement for placement in placements if not placement.is_replicate()]
            # Ask for the dimension: a part that is cut twice, over two dimensions of a mesh, is not a plain shard.
            if any(getattr(placement, "dim", None) != 0 for placement in cut):
                raise ConfigError(
                    f"train.pruning.structured: outputs of {name}.weight are cut over ranks; set it to false, or use "
                    "fsdp"
                )
            if isinstance(layer.bias, Tensor):
                self._biases[layer.weight] = layer.bias
                self._names[layer.bias] = f"{name}.bias"
        self._masks = {tensor: torch.ones_like(local(tensor), dtype=torch.bool) for tensor in self._names}
        # An output belongs to one layer, which ranks with other layers lack; a single weight competes with all others.
        self._sharded = ShardedParameters(self._weights, None if config.structured else total)

    @torch.no_grad()
    def after_step(self) -> None:
        """Prune what is due after a step, and set all pruned weights to 0. Momentum would bring them back."""
        self._step += 1
        due = target_sparsity(self._config, self._step)
        if due > self._level:
            self._prune(due)
            self._level = due
        for tensor, mask in self._masks.items():
            local(tensor).mul_(mask)

    @torch.no_grad()
    def apply_masks(self, others: Mapping[Tensor, Tensor]) -> None:
        """Set the same weights to 0 in ``others``, which holds a tensor for each parameter."""
        for tensor, mask in self._masks.items():
            others[tensor].mul_(mask)

    def sparsity(self) -> float:
        """Return the part of the weights that is pruned now. Every rank calls it, and the host waits."""
        counts: dict[Tensor, Tensor] = {}
        for weight in self._weights:
            mask = self._masks[weight]
            counts[weight] = torch.stack([mask.sum(), torch.ones_like(mask).sum()])
        like = torch.zeros(2, dtype=torch.int64, device=self._device)
        left, whole = self._sharded.sum(counts, like).tolist()
        return float(1 - left / whole)

    def state(self) -> dict[str, Entry]:
        entries: dict[str, Entry] = {_LEVEL: Replicated(self._level)}
        for tensor, mask in self._masks.items():  # a mask lies on the ranks as its tensor does
            entries[f"mask/{self._names[tensor]}"] = dataclasses.replace(entry(tensor), value=mask)
        return entries

    def live_state(self) -> dict[str, Tensor]:
        return {f"optimizer/mask/{self._names[tensor]}": mask for tensor, mask in self._masks.items()}

    def on_loaded(self, values: Mapping[str, Json]) -> None:
        """Continue from a checkpoint. ``values`` may hold the next step, from which the schedule continues."""
        found, step = values.get(_LEVEL, 0.0), values.get("step", self._step)
        assert isinstance(found, (int, float))
        assert isinstance(step, int)
        self._level, self._step = float(found), step

    def _prune(self, part: float) -> None:
        # One group of scores for the whole model, or one for each layer where whole outputs are pruned.
        scores: dict[Tensor, Tensor] = {}
        for weight in self._weights:
            # Each weight's magnitude, or the norm of each output (the first dimension), as ordered integers.
            values = local(weight).float()
            magnitudes = values.flatten(1).norm(dim=1) if self._config.structured else values.abs()
            scores[weight] = magnitudes.contiguous().view(torch.int32)
        groups = {weight: number if self._config.structured else 0 for number, weight in enumerate(scores)}
        # Find each group's k-th smallest score, for k = ``part`` of its scores: the largest number below which there
        # are fewer than k scores. (groups,) int64, -1 if k is 0.
        count = max(groups.values(), default=0) + 1
        above_all = torch.full((count,), 2**_BITS - 1, device=self._device)
        wanted = (self._below(above_all, scores, groups) * part).round().long()
        found = torch.zeros_like(above_all)
        # From the highest bit down: keep a bit if fewer than k scores lie below the number with it.
        for bit in reversed(range(_BITS)):
            tried = found | (1 << bit)
            found = torch.where(self._below(tried, scores, groups) < wanted, tried, found)
        highest = torch.where(wanted > 0, found, -1)
        for weight, score in scores.items():
            stays = score > highest[groups[weight]]
            if weight in self._biases:
                self._masks[self._biases[weight]].copy_(stays)
            if self._config.structured:  # one value for each output: (n,) becomes (n, 1, ...)
                inner = [1] * (weight.ndim - 1)
                stays = stays.view(-1, *inner)
            self._masks[weight].copy_(stays)

    def _below(self, limits: Tensor, scores: Mapping[Tensor, Tensor], groups: Mapping[Tensor, int]) -> Tensor:
        """Return the number of scores below their group's limit, over all ranks; int64 like ``limits``."""
        counts = {weight: torch.zeros_like(limits) for weight in scores}
        for weight, score in scores.items():
            counts[weight][groups[weight]] = (score < limits[groups[weight]]).sum()
        return self._sharded.sum(counts, limits)
