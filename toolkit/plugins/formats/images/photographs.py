"""Folders of photographs. Each is read and cropped alone, and prepared like torchvision's reference does it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.base.errors import DataMissingError
from toolkit.base.torch_version import refuse_missing
from toolkit.config import DataConfig, ImageConfig, choose
from toolkit.config.catalog import data_root, sample_shape
from toolkit.data.datasets import Datasets
from toolkit.data.fingerprint import digest
from toolkit.data.pictures import Pictures, Standardise, pixels_of, transforms
from toolkit.plugins.formats.images.catalog import TORCHVISION
from toolkit.plugins.formats.images.pixel_cache import PixelCache

#: Mean and deviation per channel of ImageNet's training images, pixels scaled to 0..1.
_STATISTICS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def build(config: DataConfig) -> Datasets:
    """Return the images in ``root/train`` and ``root/val``, a folder for each class. Each is read and cropped alone."""
    root, shape, images = data_root(config.root), sample_shape(config), config.images
    val_size = images.val_size or shape[1]
    resize = images.val_resize or round(val_size * 256 / 224)  # as for ImageNet
    evaluated = Pictures((3, val_size, val_size), *_STATISTICS, resize, images.interpolation)
    # Training images that are not changed at random are cut like evaluated ones, to their own size.
    plain = Pictures(shape, *_STATISTICS, round(shape[1] * 256 / 224), images.interpolation)
    read, change = (read_pixels, training_transform(images, shape[1])) if config.augment else (plain.pixels, _unchanged)
    standardise, cache_bytes = Standardise(*_STATISTICS), int(images.cache_gb * 2**30)
    try:
        train = Photographs(root / "train", read, change, standardise, erase=images.erase, cache_bytes=cache_bytes)
        test = Photographs(root / "val", evaluated.pixels, _unchanged, standardise)
    except FileNotFoundError as error:
        raise DataMissingError(f"data.root: {root}: {error}") from error
    return Datasets(train, test, len(train.classes), shape, tuple(train.classes), evaluated)


def _unchanged(pixels: Tensor) -> Tensor:
    return pixels


class Photographs:
    """The images of ``root/CLASS/IMAGE``, kept as uint8 until a batch is on its device.

    ``read`` returns the pixels (h, w, c) uint8 of a file, and ``change`` those of an input. With probability ``erase``
    a rectangle of an image is erased, as by torchvision's RandomErasing. What is read is kept in ``cache_bytes`` of
    memory. See :class:`~toolkit.data.workers.UnfinishedSamples`. Raises FileNotFoundError for a class without images.
    """

    def __init__(
        self,
        root: Path,
        read: Callable[[str], Tensor],
        change: Callable[[Tensor], Tensor],
        standardise: Standardise,
        *,
        erase: float = 0.0,
        cache_bytes: int = 0,
    ) -> None:
        refuse_missing(*TORCHVISION)
        folder = import_module("torchvision.datasets").ImageFolder(root)
        self.classes: list[str] = folder.classes
        self._read, self._change, self._standardise = read, change, standardise
        self._eraser = transforms().RandomErasing(erase) if erase else None
        self._fingerprint = digest(folder)
        # A worker that uses an object gets a copy of its page, since it counts the references to it. So there is one
        # object for all paths: of a list of them each worker would have a copy of its own in the end.
        paths = [os.fsencode(path) for path, _ in folder.samples]
        self._paths, self._ends = b"".join(paths), np.cumsum([0, *map(len, paths)])
        self._targets = np.array(folder.targets)
        key = f"{root} {self._fingerprint}"
        self._cache = PixelCache(len(paths), cache_bytes, key) if cache_bytes else None

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels, *boxes, target = self.unfinished(index)
        # Finish it as a batch of one.
        images, _ = self.finish((pixels[None], *(box[None] for box in boxes), target))
        return images[0], target

    def unfinished(self, index: int) -> tuple[Any, ...]:
        """Return pixels (h, w, c) uint8, the edges (4,) of the erasure, and the class.

        There are no edges where the data set erases nothing.
        """
        pixels = self._change(self._opened(index))
        target = int(self._targets[index])
        return (pixels, target) if self._eraser is None else (pixels, self._box(pixels), target)

    def finish(self, data: Any) -> tuple[Tensor, Tensor]:
        """Return inputs (n, c, h, w) float32 and classes (n,) of stacked unfinished samples."""
        pixels, *boxes, targets = data
        images = self._standardise(pixels.permute(0, 3, 1, 2))
        for box in boxes:
            if images.device.type == "cpu":  # most images have no rectangle
                for image, (top, left, bottom, right) in zip(images, box.tolist(), strict=True):
                    image[:, top:bottom, left:right] = 0
            else:  # the edges are on the device, and to ask for them would wait for it
                top, left, bottom, right = box.to(images.device)[:, :, None].unbind(1)
                rows, columns = (torch.arange(edge, device=images.device) for edge in images.shape[-2:])
                in_rows = (rows >= top) & (rows < bottom)
                in_columns = (columns >= left) & (columns < right)
                is_inside = in_rows[:, :, None] & in_columns[:, None]
                images.masked_fill_(is_inside[:, None], 0)
        return images, targets

    def fingerprint(self) -> str:
        """Return the digest of the names and classes; see :mod:`toolkit.data.fingerprint`."""
        return self._fingerprint

    def _opened(self, index: int) -> Tensor:
        pixels = None if self._cache is None else self._cache.get(index)
        if pixels is None:
            path = os.fsdecode(self._paths[self._ends[index] : self._ends[index + 1]])
            try:
                pixels = self._read(path)
            except Exception as error:  # of a torn file Pillow says what is wrong, but not with which
                raise OSError(getattr(error, "errno", None), f"{path} is no whole picture: {error}") from error
            if self._cache is not None:
                self._cache.put(index, pixels)
        return pixels

    def _box(self, pixels: Tensor) -> Tensor:
        """Return top, left, bottom and right (4,) of the erased rectangle, or zeros for none. Draws as torchvision."""
        assert self._eraser is not None
        if torch.rand(1) >= self._eraser.p:
            return torch.zeros(4, dtype=torch.int64)
        drawn = self._eraser.make_params([pixels.permute(2, 0, 1)])
        top, left = drawn["i"], drawn["j"]
        # Without a value, none of the rectangles that were drawn has fitted.
        if drawn["v"] is None:
            return torch.zeros(4, dtype=torch.int64)
        return torch.tensor([top, left, top + drawn["h"], left + drawn["w"]])


def training_transform(config: ImageConfig, size: int) -> Any:
    """Return the transform of pixels (h, w, 3) uint8 to a training image.

    The image is (``size``, ``size``, 3). The transform is that of torchvision's reference up to the standardising: a
    crop at random, mirroring, ``config.policy``
    (https://github.com/pytorch/vision/blob/main/references/classification/presets.py).
    """
    from PIL import Image

    v2 = transforms()
    modes = {mode: v2.InterpolationMode(mode) for mode in ("bilinear", "bicubic")}
    interpolation = choose("data.images.interpolation", config.interpolation, modes)
    crop, mirror = v2.RandomResizedCrop(size, interpolation=interpolation), v2.RandomHorizontalFlip()
    policies: dict[str, Callable[[], Any]] = {
        "none": lambda: None,
        "auto_augment": lambda: v2.AutoAugment(interpolation=interpolation),
        "rand_augment": lambda: v2.RandAugment(interpolation=interpolation, magnitude=config.magnitude),
        "trivial_augment": lambda: v2.TrivialAugmentWide(interpolation=interpolation),
        "augmix": lambda: v2.AugMix(interpolation=interpolation),
    }
    policy = choose("data.images.policy", config.policy, policies)()

    def transform(pixels: Tensor) -> Tensor:
        pixels = pixels.permute(2, 0, 1)
        at = crop.make_params([pixels])
        bottom, right = at["top"] + at["height"], at["left"] + at["width"]
        cut = pixels[:, at["top"] : bottom, at["left"] : right]
        # The channels stay last: torchvision would first copy the pixels to planes, which takes half of the time.
        cut = cut[None].contiguous(memory_format=torch.channels_last)
        resized = v2.functional.resize(cut, [size, size], interpolation, antialias=True)[0]
        changed: Tensor = mirror(resized).permute(1, 2, 0).contiguous()
        # The policies work on images of Pillow: published figures are of its pixels, and tensors take longer.
        return changed if policy is None else pixels_of(policy(Image.fromarray(changed.numpy())))

    return transform


def read_pixels(path: str) -> Tensor:
    """Return the pixels (h, w, 3) uint8 of an image file, those that Pillow reads.

    JPEG files are decoded to a tensor at once. Raises OSError (Pillow's own included) for a damaged file.
    """
    data = np.fromfile(path, np.uint8)
    # The operator below decode_jpeg(), which torchvision 0.29 deprecates with a warning at each call.
    decode = getattr(torch.ops.image, "decode_jpeg", None)
    # A file without its end mark is torn, and the decoder would fill it with grey: Pillow says what is wrong with it.
    is_whole = data[:3].tobytes() == b"\xff\xd8\xff" and data[-64:].tobytes().rstrip(b"\0").endswith(b"\xff\xd9")
    if decode is not None and is_whole:
        with contextlib.suppress(RuntimeError):
            pixels: Tensor = decode(torch.from_numpy(data), 0, False)  # 0: with the channels of the file
            if len(pixels) in (1, 3):  # four are CMYK, which Pillow converts in another way
                return pixels.expand(3, -1, -1).permute(1, 2, 0)
    return pixels_of(import_module("torchvision.datasets.folder").default_loader(path))
