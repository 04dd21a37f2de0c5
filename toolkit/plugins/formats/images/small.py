"""MNIST, Fashion-MNIST and CIFAR-10, read by torchvision, then kept as tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from toolkit.base.errors import DataMissingError
from toolkit.base.torch_version import refuse_missing
from toolkit.config import DataConfig
from toolkit.config.catalog import data_root, sample_shape
from toolkit.data.datasets import Datasets, RandomShift, in_memory, transforms
from toolkit.plugins.formats.images.catalog import FILES, TORCHVISION, fetch_command

TORCHVISION_NAMES = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "CIFAR10"}
# Mean and standard deviation of the training images per channel, pixels scaled to 0..1.
_STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


def build(config: DataConfig) -> Datasets:
    """Return the data set. Raises DataMissingError where its files are damaged."""
    refuse_missing(*TORCHVISION)
    import torchvision  # takes seconds

    kind = getattr(torchvision.datasets, TORCHVISION_NAMES[config.name])
    root = data_root(config.root)
    try:
        parts = [kind(root, train=train) for train in (True, False)]
    except (RuntimeError, ValueError, EOFError) as error:
        folder, other = root / FILES[config.name][0], root / "published"
        raise DataMissingError(
            f"data.root: {folder} does not hold the files of {config.name} as they were published ({error}). Pictures "
            "of your own are data.name=image_folder. To get the published ones, run on the login node\n"
            f"    {fetch_command(config.name, other)}\nand set data.root={other}"
        ) from error
    train, test = (_tensors(part) for part in parts)
    return in_memory(config, train, test, *_STATISTICS[config.name], _augmentation(config))


def _tensors(part: Any) -> tuple[Tensor, Tensor]:
    """Return images (n, c, h, w) uint8 and classes (n,).

    torchvision has MNIST as (n, h, w) and CIFAR-10 as (n, h, w, c).
    """
    images = torch.as_tensor(part.data)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
    return images, torch.as_tensor(part.targets, dtype=torch.int64)


def _augmentation(config: DataConfig) -> Callable[[Tensor], Any]:
    """Return what makes the random change for a background (c, 1, 1): a shift, and for CIFAR-10 also mirroring."""
    if config.name != "cifar10":
        return partial(RandomShift, 2)
    pixels = max(sample_shape(config)[1] // 8, 1)  # 4 of 32
    v2 = transforms()
    return lambda background: v2.Compose([RandomShift(pixels, background), v2.RandomHorizontalFlip()])
