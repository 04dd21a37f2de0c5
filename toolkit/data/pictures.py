"""Image files as a model's inputs, prepared like the images that it was trained on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.base import fsio
from toolkit.base.errors import RequestError
from toolkit.config import ImageConfig, choose
from toolkit.data.fingerprint import digest
from toolkit.data.pixel_cache import PixelCache

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


class Standardise:
    """Convert images (..., c, h, w) to contiguous float32, standardised for each channel.

    uint8 pixels count as 0 to 1. ``mean`` is subtracted, and the result divided by ``std``. It works on the device
    where the images are.
    """

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        self._scale = 1 / torch.tensor(std).view(-1, 1, 1)
        #: What a pixel of 0 becomes, (c, 1, 1).
        self.background = -torch.tensor(mean).view(-1, 1, 1) * self._scale

    def __call__(self, images: Tensor) -> Tensor:
        # Both are kept on the device: a copy to it at each call would wait for all that it has to do.
        self._scale, self.background = self._scale.to(images.device), self.background.to(images.device)
        if images.is_floating_point():
            return torch.addcmul(self.background, images.float(), self._scale)
        floats = images.to(torch.float32, memory_format=torch.contiguous_format)
        return floats.mul_(self._scale / 255).add_(self.background)


@dataclass(frozen=True)
class Pictures:
    """The way from an image file to an input of ``shape`` (channels, height, width).

    There is 1 channel (gray) or 3 (RGB). The image is resized to that height and width. With ``shorter_side`` its
    shorter side gets that many pixels instead, and the center is cut out. Pixels are scaled to 0 to 1. Then ``mean`` is
    subtracted and the result divided by ``std``, for each channel.
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
        from PIL import Image

        with Image.open(path) as image:
            return _pixels_of(self._cut(image.convert("L" if self.shape[0] == 1 else "RGB")))

    def as_json(self) -> dict[str, Any]:
        """Return the steps of the preparation, for programs that must do the same."""
        return {**asdict(self), "pixels": "0..1", "mode": "L" if self.shape[0] == 1 else "RGB"}

    @cached_property
    def _cut(self) -> Any:
        v2 = transforms()
        size, interpolation = list(self.shape[1:]), v2.InterpolationMode(self.interpolation)
        if self.shorter_side is None:
            steps = [v2.Resize(size, interpolation)]
        else:
            steps = [v2.Resize(self.shorter_side, interpolation), v2.CenterCrop(size)]
        return v2.Compose(steps)


class Photographs:
    """The images of ``root/CLASS/IMAGE``, kept as uint8 until a batch is on its device.

    ``read`` returns the pixels (h, w, c) uint8 of a file, and ``change`` those of an input. With probability ``erase``
    a rectangle of an image is erased, as by torchvision's RandomErasing. What is read is kept in ``cache_bytes`` of
    memory. See :class:`~.workers.UnfinishedSamples`. Raises FileNotFoundError for a class without images.
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
            pixels = self._read(os.fsdecode(self._paths[self._ends[index] : self._ends[index + 1]]))
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
        return changed if policy is None else _pixels_of(policy(Image.fromarray(changed.numpy())))

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
    return _pixels_of(import_module("torchvision.datasets.folder").default_loader(path))


def _pixels_of(image: Any) -> Tensor:
    """Return the pixels (h, w, c) uint8 of an image of Pillow."""
    return torch.from_numpy(np.array(image).reshape(image.height, image.width, -1))


def transforms() -> Any:
    """Return torchvision's transforms. The import takes seconds, so it is for those who read files only."""
    return import_module("torchvision.transforms.v2")


def image_files(folder: Path) -> list[Path]:
    """Return every image below ``folder`` except hidden ones, in the order of their names.

    Raises RequestError where there is none.
    """
    if not folder.is_dir():
        raise RequestError(f"--images {folder}: no such folder")
    found = [path for path in fsio.files_below(folder) if path.suffix.lower() in SUFFIXES]
    if not found:
        raise RequestError(f"--images {folder}: holds no images ({', '.join(sorted(SUFFIXES))})")
    return found
