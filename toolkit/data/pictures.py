"""Image files as a model's inputs, prepared like the images that it was trained on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.base import torch_version


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
        cut = self._cut  # before Pillow, which comes with torchvision
        from PIL import Image

        with Image.open(path) as image:
            return pixels_of(cut(image.convert("L" if self.shape[0] == 1 else "RGB")))

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


def pixels_of(image: Any) -> Tensor:
    """Return the pixels (h, w, c) uint8 of an image of Pillow."""
    return torch.from_numpy(np.array(image).reshape(image.height, image.width, -1))


def transforms() -> Any:
    """Return torchvision's transforms. The import takes seconds, so it is for those who read files only."""
    torch_version.refuse_missing("torchvision", "images", "images")
    return import_module("torchvision.transforms.v2")
