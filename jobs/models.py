"""The models of the reference job, each fitted to the data set's images and classes."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from toolkit import ConfigError

Shape = tuple[int, int, int]


def build_model(name: str, classes: int, shape: Shape, evaluated: Shape | None = None) -> nn.Module:
    """Return a fresh model for images of ``shape`` (channels, height, width).

    It returns logits (n, classes). ``evaluated`` is the shape of images in evaluation, by default the same. Raises
    ConfigError when there is no such model, or when it cannot take images of that size.
    """
    if name not in _OWN:
        return _torchvision(name, classes, shape, evaluated or shape)
    if evaluated not in (None, shape):
        raise ConfigError(f"data.images.val_size: {name} takes images of one size only; leave it at null")
    return _OWN[name](classes, shape)


def mlp(classes: int, shape: Shape) -> nn.Module:
    """One hidden layer of 256."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 256), nn.ReLU(), nn.Linear(256, classes))


def lenet(classes: int, shape: Shape) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling, and padded convolutions so that 8x8 images are enough."""
    channels, height, width = shape
    if min(height, width) < 4:
        raise ConfigError(
            f"model.name: lenet halves images twice, and {'x'.join(map(str, shape))} is too small; use mlp"
        )
    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * (height // 4) * (width // 4), 120), nn.ReLU()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
    )


_OWN: dict[str, Callable[[int, Shape], nn.Module]] = {"mlp": mlp, "lenet": lenet}


# --------------------------------------------------------------------------------------------------- torchvision


def _torchvision(name: str, classes: int, shape: Shape, evaluated: Shape) -> nn.Module:
    """Return a classification model of torchvision with random weights.

    Its first convolution is fitted to the channels.
    """
    try:
        catalogue: Any = import_module("torchvision.models")  # 4 s, which a job with a model of its own need not pay
    except ModuleNotFoundError as error:
        raise ConfigError(f"model.name: {name} needs torchvision: pip install 'slurm-batch-toolkit[images]'") from error
    names = catalogue.list_models(module=catalogue)
    if name not in names:
        raise ConfigError(f"model.name: unknown value {name!r}; valid: {', '.join([*_OWN, *names])}")
    make = partial(catalogue.get_model, name, weights=None, num_classes=classes, **_options(name, shape))
    for each in dict.fromkeys((shape, evaluated)):
        _probe(make, name, classes, each)
    return _fitted(make(), name, shape[0])


def _options(name: str, shape: Shape) -> dict[str, Any]:
    if name in ("googlenet", "inception_v3"):  # their auxiliary outputs would make the criterion get a tuple
        return {"aux_logits": False, "init_weights": True}
    return {"image_size": shape[1]} if name.startswith("vit_") else {}


def _fitted(model: nn.Module, name: str, channels: int) -> nn.Module:
    """Replace the first convolution, which reads 3 channels, by one for ``channels``; its name stays."""
    convolutions = ((path, layer) for path, layer in model.named_modules() if isinstance(layer, nn.Conv2d))
    path, first = next(convolutions, ("", None))
    if first is None or first.in_channels != 3:
        raise ConfigError(f"model.name: {name} does not start with a convolution of 3 channels; use another model")
    if channels == 3:
        return model
    parent, _, leaf = path.rpartition(".")
    options: dict[str, Any] = {key: getattr(first, key) for key in ("kernel_size", "stride", "padding", "dilation")}
    fitted = nn.Conv2d(channels, first.out_channels, **options, bias=first.bias is not None)
    setattr(model.get_submodule(parent), leaf, fitted)
    return model


def _probe(make: Callable[[], nn.Module], name: str, classes: int, shape: Shape) -> None:
    """Refuse images that do not fit. Only the model's shapes run, without memory and arithmetic."""
    try:
        with torch.device("meta"):
            outputs = _fitted(make(), name, shape[0])(torch.empty(2, *shape))
    except (RuntimeError, ValueError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"model.name: {name} cannot take {'x'.join(map(str, shape))} images ({reason}); "
            "set data.image_size (data.images.val_size) to a larger value (224 fits most), or use lenet or mlp"
        ) from error
    if not isinstance(outputs, Tensor) or outputs.shape != (2, classes):
        raise ConfigError(f"model.name: {name} does not return one row of logits for each image; use a classifier")
