"""Image files as a model's inputs, prepared like the images that it was trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.config import ImageConfig, choose
from toolkit.errors import RequestError

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}


@dataclass(frozen=True)
class Pictures:
    """The way from an image file to an input of ``shape`` (channels, height, width); channels: 1 (gray) or 3 (RGB).

    The image is resized to that height and width. With ``shorter_side`` its shorter side gets that many
    pixels instead, and the center is cut out. Pixels are scaled to 0 to 1. Then ``mean`` is subtracted and the result
    divided by ``std``, for each channel.
    """

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shorter_side: int | None = None
    interpolation: str = "bilinear"

    def read(self, path: Path) -> Tensor:
        """Return the input, float32. Raises OSError (Pillow's own included) for a damaged file or no image."""
        from PIL import Image

        with Image.open(path) as image:
            prepared: Tensor = self.transform(image.convert("L" if self.shape[0] == 1 else "RGB"))
        return prepared

    def as_json(self) -> dict[str, Any]:
        """Return the steps of the preparation, for programs that must do the same."""
        return {**asdict(self), "pixels": "0..1", "mode": "L" if self.shape[0] == 1 else "RGB"}

    @cached_property
    def transform(self) -> Any:
        """Return the transform of an opened image (PIL) to an input."""
        v2 = transforms()
        size, interpolation = list(self.shape[1:]), v2.InterpolationMode(self.interpolation)
        if self.shorter_side is None:
            steps = [v2.Resize(size, interpolation)]
        else:
            steps = [v2.Resize(self.shorter_side, interpolation), v2.CenterCrop(size)]
        return v2.Compose([*steps, *_standardised(v2, self.mean, self.std)])


def training_transform(config: ImageConfig, size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Any:
    """Return the transform of training photographs (PIL) to inputs of ``size``: that of torchvision's reference.

    A crop at random, mirroring, ``config.policy``, standardising, erasing, in this order
    (https://github.com/pytorch/vision/blob/main/references/classification/presets.py).
    """
    v2 = transforms()
    modes = {mode: v2.InterpolationMode(mode) for mode in ("bilinear", "bicubic")}
    interpolation = choose("data.images.interpolation", config.interpolation, modes)
    steps = [v2.RandomResizedCrop(size, interpolation=interpolation), v2.RandomHorizontalFlip()]
    policies: dict[str, Callable[[], list[Any]]] = {
        "none": list,
        "auto_augment": lambda: [v2.AutoAugment(interpolation=interpolation)],
        "rand_augment": lambda: [v2.RandAugment(interpolation=interpolation, magnitude=config.magnitude)],
        "trivial_augment": lambda: [v2.TrivialAugmentWide(interpolation=interpolation)],
        "augmix": lambda: [v2.AugMix(interpolation=interpolation)],
    }
    steps += choose("data.images.policy", config.policy, policies)() + _standardised(v2, mean, std)
    return v2.Compose(steps + ([v2.RandomErasing(config.erase)] if config.erase else []))


def transforms() -> Any:
    """Return torchvision's transforms. The import takes seconds, so it is for those who read files only."""
    return import_module("torchvision.transforms.v2")


def _standardised(v2: Any, mean: tuple[float, ...], std: tuple[float, ...]) -> list[Any]:
    return [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]


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
