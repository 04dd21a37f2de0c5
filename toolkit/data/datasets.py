"""The data sets that a config can name: what one of them is, and the two that come without files."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from toolkit import registry
from toolkit.base.errors import ConfigError
from toolkit.config import catalog
from toolkit.data.loader import BatchedSamples, Samples
from toolkit.data.memory import Augmented, InMemory, RandomShift, Synthetic
from toolkit.data.permutation import order
from toolkit.data.pictures import Pictures

if TYPE_CHECKING:
    from toolkit.config import DataConfig


Dataset = Samples | BatchedSamples

DIGITS_TRAIN = 1437
SYNTHETIC_TRAIN = 4096
SYNTHETIC_EVAL = 1024


@dataclass(frozen=True)
class Datasets:
    """A training set and an eval set.

    Their inputs are float tensors of ``sample_shape`` (channels, height, width).
    """

    train: Dataset
    eval: Dataset
    classes: int
    sample_shape: tuple[int, int, int]
    class_names: tuple[str, ...]  #: one for each class
    pictures: Pictures | None = None  #: how an image file becomes such an input; None where samples are not images


def build_datasets(config: DataConfig) -> Datasets:
    """Return the data sets of the ``data:`` section. Raises DataMissingError where their files are missing::
    >>> digits = toolkit.build_datasets(toolkit.load_config("configs/digits_ddp.yaml").data)
    >>> len(digits.train), digits.sample_shape
    (1437, (1, 8, 8))
    """
    catalog.check_datasets(config)
    build = catalog.entry_of(config.name).build
    if build is None:
        raise ConfigError(
            f"data.name: {config.name} has no images to classify; choose a data set of images, or jobs.language_model"
        )
    built: Datasets = registry.load(build)(config)
    return built


def digits(config: DataConfig) -> Datasets:
    """Return UCI's handwritten digits: 1,437 to train on and 360 to evaluate.

    A fixed permutation splits them. The file does not name the writers, so both sets have the same ones. Accuracy is
    higher than on unknown writers.
    """
    packed = resources.files("toolkit.data").joinpath("files/digits.csv.gz").read_bytes()
    table = np.loadtxt(io.BytesIO(gzip.decompress(packed)), delimiter=",", dtype=np.float32)
    table = table[order(len(table), seed=0, epoch=0, start=0, stop=len(table))]
    # Columns 0 to 63 are pixels from 0 to 16, column 64 is the digit.
    images = torch.from_numpy(table[:, :64] / 16).view(-1, 1, 8, 8)
    targets = torch.from_numpy(table[:, 64].astype(np.int64))
    train, test = slice(DIGITS_TRAIN), slice(DIGITS_TRAIN, None)
    sets = (images[train], targets[train]), (images[test], targets[test])
    return in_memory(config, *sets, (0.3053,), (0.3760,), lambda background: RandomShift(1, background))


def synthetic(config: DataConfig) -> Datasets:
    shape = catalog.sample_shape(config)
    train = Synthetic(SYNTHETIC_TRAIN, shape)
    test = Synthetic(SYNTHETIC_EVAL, shape, first=SYNTHETIC_TRAIN)
    changed = Augmented(train, RandomShift(2, train.background)) if config.augment else train
    return Datasets(changed, test, Synthetic.CLASSES, shape, _numbers(Synthetic.CLASSES))


def in_memory(
    config: DataConfig,
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    mean: tuple[float, ...],
    std: tuple[float, ...],
    augmentation: Callable[[Tensor], Callable[[Tensor], Tensor]],
) -> Datasets:
    """Return the data sets of images (n, c, h, w) uint8 or float, and their classes (n,).

    ``mean`` and ``std`` are those of the training images per channel, of pixels scaled to 0..1. ``augmentation`` makes
    the random change of ``data.augment`` of a black pixel, (c, 1, 1).
    """
    train_set, eval_set = (
        InMemory(*tensors, mean=mean, std=std, image_size=config.image_size) for tensors in (train, test)
    )
    entry, shape = catalog.entry_of(config.name), catalog.sample_shape(config)
    assert entry.classes is not None
    changed: Any = Augmented(train_set, augmentation(train_set.background)) if config.augment else train_set
    names = entry.names or _numbers(entry.classes)
    return Datasets(changed, eval_set, entry.classes, shape, names, Pictures(shape, mean, std))


def _numbers(classes: int) -> tuple[str, ...]:
    return tuple(map(str, range(classes)))
