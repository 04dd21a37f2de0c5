"""The data sets that a config can name: what one of them is, and the two that come without files."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from toolkit import registry
from toolkit.base import torch_version
from toolkit.base.errors import ConfigError
from toolkit.config import dataset_catalog
from toolkit.data.fingerprint import digest
from toolkit.data.loader import BatchedSamples, Samples
from toolkit.data.permutation import Indices, hash64, mix_array, order

if TYPE_CHECKING:
    from toolkit.config import DataConfig


Dataset = Samples | BatchedSamples

DIGITS_TRAIN = 1437
SYNTHETIC_TRAIN = 4096
SYNTHETIC_EVAL = 1024


@dataclass(frozen=True)
class Datasets:
    """A training set and an eval set. Inputs are float tensors of ``sample_shape`` (channels, height, width)."""

    train: Dataset
    eval: Dataset
    classes: int
    sample_shape: tuple[int, int, int]
    class_names: tuple[str, ...]  #: one for each class
    pictures: ImagePreprocessor | None = (
        None  #: how an image file becomes such an input; None where samples are not images
    )


def build_datasets(config: DataConfig) -> Datasets:
    """Return the data sets of the ``data:`` section. Raises DataMissingError where their files are missing::
    >>> digits = toolkit.build_datasets(toolkit.load_config("configs/digits_ddp.yaml").data)
    >>> len(digits.train), digits.sample_shape
    (1437, (1, 8, 8))
    """
    dataset_catalog.check_datasets(config)
    build = dataset_catalog.entry_of(config.name).build
    if build is None:
        raise ConfigError(
            f"data.name: {config.name} has no images to classify; choose a data set of images, or jobs.language_model"
        )
    built: Datasets = registry.load_part("datasets", config.name, build)(config)
    return built


def digits(config: DataConfig) -> Datasets:
    """Return UCI's handwritten digits: 1,437 to train on and 360 to evaluate, split by a fixed permutation.

    Both sets have the same writers, so accuracy is higher than on unknown ones.
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
    shape = dataset_catalog.sample_shape(config)
    train = Synthetic(SYNTHETIC_TRAIN, shape)
    test = Synthetic(SYNTHETIC_EVAL, shape, first=SYNTHETIC_TRAIN)
    changed = Augmented(train, RandomShift(2, train.background)) if config.augment else train
    return Datasets(changed, test, Synthetic.CLASSES, shape, tuple(map(str, range(Synthetic.CLASSES))))


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
    entry, shape = dataset_catalog.entry_of(config.name), dataset_catalog.sample_shape(config)
    assert entry.classes is not None
    changed: Any = Augmented(train_set, augmentation(train_set.background)) if config.augment else train_set
    names = entry.names or tuple(map(str, range(entry.classes)))
    return Datasets(changed, eval_set, entry.classes, shape, names, ImagePreprocessor(shape, mean, std))


class InMemory:
    """Images (n, c, h, w), uint8 or float, and their classes (n,) int64.

    Each batch is converted to float32, then scaled and shifted per channel; uint8 pixels count as 0 to 1. With
    ``image_size`` the batch is resized to a square by bilinear interpolation.
    """

    def __init__(
        self,
        images: Tensor,
        targets: Tensor,
        *,
        mean: tuple[float, ...] = (0.0,),
        std: tuple[float, ...] = (1.0,),
        image_size: int | None = None,
    ) -> None:
        if images.ndim != 4:  # one that has fewer would be broadcast against the channels' means
            raise ValueError(
                f"InMemory: images of shape {tuple(images.shape)}, but (n, c, h, w) is needed; "
                "torch.utils.data.TensorDataset holds other tensors"
            )
        self._standardise = Standardise(mean, std)
        self.background = self._standardise.background
        is_of_size = images.shape[-2:] == (image_size, image_size)
        self._resize = None if is_of_size else image_size
        # Without a resize, float images are prepared once; all others batch by batch.
        self._ready = images.is_floating_point() and self._resize is None
        self._images = self._prepare(images) if self._ready else images.contiguous()
        self._targets = targets

    def __len__(self) -> int:
        return self._targets.shape[0]

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return inputs (n, c, h, w) float32 and classes (n,) of the samples ``indices`` (n,)."""
        chosen = torch.from_numpy(indices)
        images = self._images.index_select(0, chosen)
        return images if self._ready else self._prepare(images), self._targets.index_select(0, chosen)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch(np.array([index]))
        return inputs[0], targets[0]

    def _prepare(self, images: Tensor) -> Tensor:
        images = self._standardise(images)
        if self._resize is None or not len(images):
            return images
        return functional.interpolate(images, size=(self._resize, self._resize), mode="bilinear")


class Synthetic:
    """Ten classes of random images that a model can learn to tell apart, made without files.

    Sample ``i`` is the pattern of class ``hash(i) % 10`` plus two of 32 noise patterns.
    """

    CLASSES = 10
    background = torch.zeros(1, 1, 1)  #: as InMemory's; here it is the mean
    _NOISES = 32

    def __init__(self, size: int, shape: tuple[int, int, int], *, first: int = 0) -> None:
        self._size = size
        self._first = first
        self._patterns = _noise(hash64(1), (self.CLASSES, *shape))
        self._noises = _noise(hash64(2), (self._NOISES, *shape))

    def __len__(self) -> int:
        return self._size

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return inputs (n, c, h, w) float32 and classes (n,) of the samples ``indices`` (n,).

        The inputs are about standard normal.
        """
        words = mix_array((indices + (self._first + 1)).astype(np.uint64))
        picks = [words % self.CLASSES, (words >> 8) % self._NOISES, (words >> 16) % self._NOISES]
        classes, one, other = (torch.from_numpy(pick.astype(np.int64)) for pick in picks)
        inputs = self._patterns.index_select(0, classes)
        inputs.add_(self._noises.index_select(0, one)).add_(self._noises.index_select(0, other))
        # The sum of three images of variance 1 has variance 3.
        return inputs.mul_(3**-0.5), classes

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.batch(np.array([index]))
        return inputs[0], targets[0]


def _noise(key: int, shape: tuple[int, ...]) -> Tensor:
    """Return uniform float32 numbers of mean 0 and variance 1, equal on every version of torch."""
    numbers = np.arange(int(np.prod(shape)), dtype=np.uint64)
    words = mix_array(numbers + np.uint64(key))
    uniform = (words >> np.uint64(40)).astype(np.float32) / 2**24  # a float32 holds 24 bits
    return torch.from_numpy((uniform - 0.5) * 12**0.5).view(shape)


class Augmented:
    """A data set with a random ``transform`` of each input. It is read sample by sample: each has its own seed."""

    def __init__(self, dataset: InMemory | Synthetic, transform: Callable[[Tensor], Tensor]) -> None:
        self._dataset = dataset
        self._transform = transform

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        inputs, target = self._dataset[index]
        return self._transform(inputs), target

    def fingerprint(self) -> str:
        """Return the digest of the data set without the transform; see :mod:`toolkit.data.fingerprint`."""
        return digest(self._dataset)


class RandomShift:
    """A shift of an image (c, h, w) by up to ``pixels`` in each direction. ``background`` (c, 1, 1) fills the edge."""

    def __init__(self, pixels: int, background: Tensor) -> None:
        self.pixels = pixels
        self._background = background

    def __call__(self, image: Tensor) -> Tensor:
        down, right = torch.randint(0, 2 * self.pixels + 1, (2,)).tolist()
        channels, height, width = image.shape
        # Place the image on a larger background, then cut out a window at a random place.
        edges = 2 * self.pixels
        padded = self._background.repeat(channels // len(self._background), height + edges, width + edges)
        padded[:, self.pixels : -self.pixels, self.pixels : -self.pixels] = image
        return padded[:, down : down + height, right : right + width]


class Standardise:
    """Convert images (..., c, h, w) to contiguous float32, standardised for each channel.

    uint8 pixels count as 0 to 1. ``mean`` is subtracted, and the result divided by ``std``, on the images' device.
    """

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self._scale = 1 / torch.tensor(std).view(-1, 1, 1)
        #: What a pixel of 0 becomes, (c, 1, 1).
        self.background = -torch.tensor(mean).view(-1, 1, 1) * self._scale

    def __call__(self, images: Tensor) -> Tensor:
        # Both are kept on the device: a copy to it at each call would wait for its other work.
        self._scale, self.background = self._scale.to(images.device), self.background.to(images.device)
        if images.is_floating_point():
            return torch.addcmul(self.background, images.float(), self._scale)
        floats = images.to(torch.float32, memory_format=torch.contiguous_format)
        return floats.mul_(self._scale / 255).add_(self.background)


@dataclass(frozen=True)
class ImagePreprocessor:
    """The way from an image file to an input of ``shape`` (channels, height, width), with 1 channel (gray) or 3 (RGB).

    The image is resized to that height and width. With ``shorter_side`` its shorter side gets that many pixels instead,
    and the center is cut out. Pixels are scaled to 0 to 1 and standardised by ``mean`` and ``std``.
    """

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shorter_side: int | None = None
    interpolation: str = "bilinear"

    def read(self, path: Path | str) -> Tensor:
        """Return the input, float32. Raises OSError (Pillow's own included) for a damaged file or no image."""
        return Standardise(self.mean, self.std)(self.pixels(path).permute(2, 0, 1))

    def pixels(self, path: Path | str) -> Tensor:
        """Return the input before it is scaled, (height, width, channels) uint8. Raises as :meth:`read`."""
        cut = self._cut  # before Pillow, which comes with torchvision
        from PIL import Image

        with Image.open(path) as image:
            return pixels_of(cut(image.convert("L" if self.shape[0] == 1 else "RGB")))

    def as_json(self) -> dict[str, Any]:
        """Return the steps of the preparation, for programs that must do the same."""
        return {**asdict(self), "pixels": "0..1", "mode": "L" if self.shape[0] == 1 else "RGB"}

    @cached_property
    def _cut(self) -> Any:
        v2 = torchvision_transforms()
        size, interpolation = list(self.shape[1:]), v2.InterpolationMode(self.interpolation)
        if self.shorter_side is None:
            steps = [v2.Resize(size, interpolation)]
        else:
            steps = [v2.Resize(self.shorter_side, interpolation), v2.CenterCrop(size)]
        return v2.Compose(steps)


def pixels_of(image: Any) -> Tensor:
    """Return the pixels (h, w, c) uint8 of an image of Pillow."""
    return torch.from_numpy(np.array(image).reshape(image.height, image.width, -1))


def torchvision_transforms() -> Any:
    """Return torchvision's transforms. The import takes seconds, so it is for those who read files only."""
    torch_version.refuse_missing("torchvision", "images", "images")
    return import_module("torchvision.transforms.v2")
