"""BatchNorm over several ranks. Its statistics become equal for an evaluation or a save, or are shared in each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from toolkit.base import logs
from toolkit.ranks.collectives import sum_across_ranks
from toolkit.strategies.protocol import ModelFactory

log = logs.get(__name__)


def statistics(model: nn.Module) -> list[Tensor]:
    """Return the running means and variances in ``model``, which follow the samples of each rank."""
    norms = [module for module in model.modules() if isinstance(module, _NormBase)]
    return [value for norm in norms for value in (norm.running_mean, norm.running_var) if value is not None]


def synchronised(make: ModelFactory) -> ModelFactory:
    """Return a factory like ``make``, with BatchNorm layers that train on all ranks' samples."""

    def make_synchronised() -> nn.Module:
        model = make()
        norms = [module for module in model.modules() if type(module) in _KINDS]
        for norm in norms:
            norm.__class__ = SyncBatchNorm  # in place: names, hooks and modes stay
        if not norms:
            log.warning("train.sync_batch_norm changes nothing: this model has no BatchNorm of torch's")
        return model

    return make_synchronised


_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class SyncBatchNorm(_BatchNorm):
    """BatchNorm over a batch (n, c, ...) that ranks share in parts of any size.

    It does what torch.nn.SyncBatchNorm does, which is for GPUs only. Each forward and backward pass is one small
    collective.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        """Accept any shape. The original layer has its own shapes, which torch checks in evaluation mode."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        # Statistics of half-precision values are computed in fp32 and summed in fp64.
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims = [0, *range(2, values.dim())]
        count = torch.full((1,), values.numel() // values.shape[1], dtype=torch.float64, device=values.device)
        var, mean = torch.var_mean(values, dims, correction=0)
        var, mean = var.double(), mean.double()
        # One message: count, sums and sums of squares. Ranks may have different numbers of samples.
        sums: Tensor = _Sum.apply(torch.cat([count, count * mean, count * (var + mean.square())]))
        count, mean, square = sums[0], *sums[1:].view(2, -1)
        mean, square = mean / count, square / count
        var = square - mean.square()
        # The running variance is the unbiased one, as torch has it.
        self._follow(mean.detach(), (var * count / (count - 1).clamp(min=1)).detach())
        shape = [1, -1, *[1] * (values.dim() - 2)]
        scale = (var + self.eps).rsqrt()
        if self.weight is not None:
            scale = self.weight * scale
        shift = -mean * scale if self.bias is None else self.bias - mean * scale
        scale, shift = (each.to(values.dtype).view(shape) for each in (scale, shift))
        normed: Tensor = values * scale + shift
        return normed.to(input.dtype)

    @torch.no_grad()
    def _follow(self, mean: Tensor, var: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        part = self.momentum if self.momentum is not None else 1 / self.num_batches_tracked.double()
        for running, now in ((self.running_mean, mean), (self.running_var, var)):
            running.copy_(running.double() * (1 - part) + now * part)


class _Sum(torch.autograd.Function):
    """The sum over all ranks. The gradient of each rank's loss for it is summed over all ranks as well."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return sum_across_ranks(values.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return sum_across_ranks(gradient.clone())
