"""Data sets whose samples are in memory, or computed from a few tensors in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from toolkit.data.fingerprint import digest
from toolkit.data.permutation import Indices, hash64, mix_array
from toolkit.data.pictures import Standardise


class InMemory:
    """Images (n, c, h, w), uint8 or float, and their classes (n,) int64.

    Each batch is converted to float32, then scaled and shifted per channel. uint8 stays uint8 in memory, which takes a
    quarter of the space. With ``image_size`` the batch is resized to a square by bilinear interpolation. uint8 pixels
    count as 0 to 1.
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
    """Ten classes of random images that a model can learn to tell apart.

    They are made from a seed alone. Sample ``i`` is the pattern of class ``hash(i) % 10`` plus two of 32 noise
    patterns. This gives large images in large numbers without files, each about as cheap as reading three images from
    memory.
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
    """Return uniform float32 numbers of mean 0 and variance 1.

    They come from our own hash, so they are equal on every version of torch.
    """
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
        padded = self._background.repeat(
            channels // len(self._background), *(s + 2 * self.pixels for s in (height, width))
        )
        padded[:, self.pixels : -self.pixels, self.pixels : -self.pixels] = image
        return padded[:, down : down + height, right : right + width]
