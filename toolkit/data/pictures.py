"""Image files as a model's inputs, prepared like the images that it was trained on."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.errors import RequestError

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


@dataclass(frozen=True)
class Pictures:
    """The way from an image file to an input of ``shape`` (channels, height, width); channels: 1 (gray) or 3 (RGB).

    The image is resized (bilinear) to that height and width. With ``shorter_side`` its shorter side gets that many
    pixels instead, and the center is cut out. Pixels are scaled to 0 to 1. Then ``mean`` is subtracted and the result
    divided by ``std``, for each channel.
    """

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shorter_side: int | None = None

    def read(self, path: Path) -> Tensor:
        """Return the input, float32. Raises OSError (Pillow's own included) for a damaged file or no image."""
        from PIL import Image

        with Image.open(path) as image:
            prepared: Tensor = self._transform(image.convert("L" if self.shape[0] == 1 else "RGB"))
        return prepared

    def as_json(self) -> dict[str, Any]:
        """Return the steps of the preparation, for programs that must do the same."""
        return {**asdict(self), "pixels": "0..1", "mode": "L" if self.shape[0] == 1 else "RGB", "resize": "bilinear"}

    @cached_property
    def _transform(self) -> Any:
        v2: Any = import_module("torchvision.transforms.v2")  # takes seconds: imported only where files are read
        size = list(self.shape[1:])
        if self.shorter_side is None:
            steps = [v2.Resize(size)]
        else:
            steps = [v2.Resize(self.shorter_side), v2.CenterCrop(size)]
        steps += [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
        return v2.Compose([*steps, v2.Normalize(self.mean, self.std)])


def image_files(folder: Path) -> list[Path]:
    """Return every image below ``folder`` except hidden ones, in the order of their names.

    Raises RequestError where there is none.
    """
    if not folder.is_dir():
        raise RequestError(f"--images {folder}: no such folder")
    found = []
    for path in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not is_hidden and path.suffix.lower() in SUFFIXES and path.is_file():
            found.append(path)
    if not found:
        raise RequestError(f"--images {folder}: holds no images ({', '.join(sorted(SUFFIXES))})")
    return found
