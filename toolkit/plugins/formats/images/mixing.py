"""Mixup and CutMix: each image gets a part of another one and of its classes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from toolkit.base.errors import ConfigError
from toolkit.data.permutation import hash64
from toolkit.ranks.batch import Batch

#: Keeps these draws apart from those that other parts of the package make of the same run seed.
_MIX = 0x4D495845


class PairMixing:
    """Mixing of neighbours in the order of the run, on the batch's device.

    Samples 0 and 1 of a global batch give each other a part, samples 2 and 3, and so on. A pair is mixed as a whole
    (mixup, https://arxiv.org/abs/1710.09412) or in a rectangle (CutMix, https://arxiv.org/abs/1905.04899). If both are
    asked for, each is drawn as often. What is drawn follows from the seed and the place in the run, so the number of
    ranks changes nothing, with one exception: two neighbours on different ranks, or in different micro-batches, stay
    as they are. That happens where those have odd numbers of samples::

        >>> mixing = toolkit.PairMixing(mixup=0.2, cutmix=1.0, classes=10, seed=0)
        >>> batch = toolkit.Batch((torch.rand(4, 3, 8, 8), torch.tensor([3, 5, 7, 9])), torch.arange(4), global_count=4)
        >>> images, shares = mixing(batch)
        >>> images.shape, shares.shape, shares.sum(dim=1)
        (torch.Size([4, 3, 8, 8]), torch.Size([4, 10]), tensor([1., 1., 1., 1.]))
    """

    def __init__(self, *, mixup: float, cutmix: float, classes: int, seed: int) -> None:
        """Set the mixing up. ``mixup`` and ``cutmix`` are alpha of the Beta distribution of each, or 0 for none."""
        self._alphas = [alpha for alpha in (mixup, cutmix) if alpha]
        if not self._alphas or min(self._alphas) < 0:
            raise ConfigError(f"mixup {mixup} and cutmix {cutmix}: one must be above 0, and none below")
        self._cuts = [False] * bool(mixup) + [True] * bool(cutmix)
        self._classes, self._seed = classes, seed

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return mixed images (n, c, h, w) and their shares of each class (n, classes).

        The batch holds images and classes (n,).
        """
        images, targets = batch.inputs, one_hot(batch.targets, self._classes).to(batch.inputs.dtype)
        if not len(batch):
            return images, targets
        partner, weights = self._drawn(batch, images.shape[-2], images.shape[-1])
        partner, weights = partner.to(images.device), weights.to(images)
        mixed = torch.lerp(images[partner], images, weights[:, None])
        return mixed, torch.lerp(targets[partner], targets, weights.mean((1, 2))[:, None])

    def _drawn(self, batch: Batch, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return each image's partner row (n,) and its own share of pixels (n, h, w)."""
        size = batch.global_count
        start = int(batch.positions[0]) // size * size
        places = batch.positions - start
        # The partner's row, where it is in this batch: else a row is its own partner.
        other = places + 1 - 2 * (places % 2)
        rows = torch.arange(len(places))
        partner = (rows + other - places).clamp(0, len(places) - 1)
        partner = torch.where(places[partner] == other, partner, rows)
        # Drawn for all pairs of the global batch: a share gets the same ones wherever it begins.
        draw = torch.Generator().manual_seed(hash64(_MIX, self._seed, start) >> 1)
        pairs = (size + 1) // 2
        kinds = torch.randint(len(self._alphas), (pairs,), generator=draw)
        alphas = torch.tensor(self._alphas)[kinds].unsqueeze(1).repeat(1, 2)
        shares = torch._sample_dirichlet(alphas, generator=draw)[:, 0]
        x, y = (torch.randint(edge, (pairs,), generator=draw) for edge in (width, height))
        pair = places // 2
        weights = shares[pair].view(-1, 1, 1).repeat(1, height, width)
        # A rectangle with the other's part of the area, around a point at random; what is outside of the image is lost.
        is_cut = torch.tensor(self._cuts)[kinds][pair]
        reach = 0.5 * (1 - shares[pair]).sqrt()
        covered = [
            (torch.arange(edge) >= (at[pair] - (reach * edge).int())[:, None])
            & (torch.arange(edge) < (at[pair] + (reach * edge).int())[:, None])
            for at, edge in ((y, height), (x, width))
        ]
        outside = ~(covered[0][:, :, None] & covered[1][:, None, :])
        return partner, torch.where(is_cut[:, None, None], outside.float(), weights)
