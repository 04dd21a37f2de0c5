"""The data sets of images, as far as they are known without torch: shapes, classes, and which files are missing."""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path
from typing import Any

from toolkit.base.errors import DataMissingError, RequestError
from toolkit.config import DataConfig
from toolkit.config.catalog import Entry, data_root

_IDX_FILES = tuple(f"raw/{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_CIFAR10_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
#: By data set of torchvision: its folder below the root, and the files below that.
FILES = {
    "mnist": ("MNIST", _IDX_FILES),
    "fashion_mnist": ("FashionMNIST", _IDX_FILES),
    "cifar10": ("cifar-10-batches-py", _CIFAR10_FILES),
}
_FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def files_of(name: str, root: Path) -> list[Path]:
    """Return the files that data set ``name`` of torchvision must have under ``root``."""
    folder, files = FILES[name]
    return [root / folder / file for file in files]


def fetch_command(name: str, root: Path) -> str:
    """Return the command line that fetches a data set."""
    return shlex.join(["toolkit", "data", "fetch", name, "--root", str(root)])


def class_names(root: Path) -> list[str]:
    """Return the classes of an image folder in order: the sub-folders of ``root/train``.

    ``root/val`` must have the same ones. A class's number is its place in the list, and would mean another class in
    evaluation. Raises DataMissingError.
    """
    names: list[list[str]] = []
    for split in ("train", "val"):
        names.append([])
        with contextlib.suppress(OSError):
            names[-1] = sorted(entry.name for entry in os.scandir(root / split) if entry.is_dir())
        if not names[-1]:
            raise DataMissingError(
                f"data.root: {root / split} has no class folders. An image_folder data set cannot be fetched; it is "
                f"laid out as {root}/train/CLASS/IMAGE and {root}/val/CLASS/IMAGE"
            )
    train, val = names
    if train != val:
        odd = f"not in both: {', '.join(sorted(set(train) ^ set(val))[:5])}"
        raise DataMissingError(f"data.root: {root}/train and {root}/val must have the same class folders; {odd}")
    return train


def _check(config: DataConfig) -> None:
    """Refuse a root in which files of torchvision's data set are missing."""
    root = data_root(config.root)
    missing = [path for path in files_of(config.name, root) if not path.is_file()]
    if missing:
        origin = " (TOOLKIT_DATA)" if config.root is None and os.environ.get("TOOLKIT_DATA") else ""
        raise DataMissingError(
            f"data.root: data set {config.name} is not in {root}{origin}: {missing[0]} is not there "
            f"({len(missing)} missing in all). Compute nodes have no internet: on the login node run\n"
            f"    {fetch_command(config.name, root)}\n"
            "or set data.root to a folder that has it"
        )


def no_fetch(name: str, root: str | None) -> str:
    """Refuse to fetch photographs, and say where they belong."""
    place = data_root(root)
    raise RequestError(f"{name} cannot be fetched: put images in {place}/train/CLASS/IMAGE and {place}/val/CLASS/IMAGE")


#: The package that reads images, as refuse_missing() takes it.
TORCHVISION = "torchvision", "images", "images"
_HERE = "toolkit.plugins.formats.images"
_OF_TORCHVISION: Any = {
    "build": f"{_HERE}.small:build",
    "fetch": f"{_HERE}.small:fetch",
    "check": _check,
    "package": TORCHVISION,
}
MNIST = Entry((1, 28, 28), **_OF_TORCHVISION)
FASHION_MNIST = Entry((1, 28, 28), names=_FASHION, **_OF_TORCHVISION)
CIFAR10 = Entry((3, 32, 32), names=_CIFAR10, **_OF_TORCHVISION)
IMAGE_FOLDER = Entry(
    (3, 224, 224),
    build=f"{_HERE}.photographs:build",
    classes=None,
    check=lambda config: class_names(data_root(config.root)),
    fetch=f"{_HERE}.catalog:no_fetch",
    package=TORCHVISION,
)
