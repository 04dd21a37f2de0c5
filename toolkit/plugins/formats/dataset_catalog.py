"""The data sets of images, text and tokens, as far as known without torch: shapes, classes, which files are missing."""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path
from typing import Any

from toolkit.base import fsio
from toolkit.base.errors import DataMissingError, RequestError
from toolkit.base.staged import staged
from toolkit.config import DataConfig
from toolkit.config.dataset_catalog import Entry, data_root

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


def _check_images(config: DataConfig) -> None:
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


def refuse_image_fetch(name: str, root: str | None) -> str:
    """Refuse to fetch photographs, and say where they belong."""
    place = data_root(root)
    raise RequestError(f"{name} cannot be fetched: put images in {place}/train/CLASS/IMAGE and {place}/val/CLASS/IMAGE")


#: The package that reads images, as refuse_missing() takes it.
TORCHVISION = "torchvision", "images", "images"
_HERE = "toolkit.plugins.formats"
_OF_TORCHVISION: Any = {
    "build": f"{_HERE}.images.small:build",
    "fetch": f"{_HERE}.images.small:fetch",
    "check": _check_images,
    "package": TORCHVISION,
}
MNIST = Entry((1, 28, 28), **_OF_TORCHVISION)
FASHION_MNIST = Entry((1, 28, 28), names=_FASHION, **_OF_TORCHVISION)
CIFAR10 = Entry((3, 32, 32), names=_CIFAR10, **_OF_TORCHVISION)
IMAGE_FOLDER = Entry(
    (3, 224, 224),
    build=f"{_HERE}.images.photographs:build",
    classes=None,
    check=lambda config: class_names(data_root(config.root)),
    fetch=f"{_HERE}.dataset_catalog:refuse_image_fetch",
    package=TORCHVISION,
)


#: The file of a folder of token shards that is written last.
TOKEN_INDEX = "index.json"
#: Folders of the standard library that hold others' code, or tests of it.
_NOT_OURS = {"site-packages", "dist-packages", "test", "tests"}


def text_files(root: str | None) -> list[Path]:
    """Return the files of ``text`` in order: all below ``root`` but hidden ones. Null: the standard library's."""
    import sysconfig  # takes longer than all the rest, and other data sets do not need it

    folder = staged(fsio.expand(root or sysconfig.get_path("stdlib")).absolute())
    files = list(fsio.files_below(folder, "*" if root else "*.py"))
    if not root:
        files = [path for path in files if _NOT_OURS.isdisjoint(path.relative_to(folder).parts)]
    if not files:
        raise DataMissingError(f"data.root: there are no text files below {folder}; give it a folder that holds some")
    return files


def _check_tokens(config: DataConfig) -> None:
    root = data_root(config.root)
    if not (root / TOKEN_INDEX).is_file():
        raise DataMissingError(
            f"data.root: {root} has no {TOKEN_INDEX}: make token shards of your texts with\n"
            f"    toolkit data tokenize TEXTS --tokenizer tokenizer.json --out {shlex.quote(str(root))}\n"
            "which continues where it was killed"
        )


def refuse_token_fetch(name: str, root: str | None) -> str:
    """Refuse to fetch token shards, and say how they are made."""
    raise RequestError(f"{name} are made from your own texts: see `toolkit data tokenize`")


TEXT = Entry((1, 1, 1), classes=256, check=lambda config: text_files(config.root))  # bytes; see text_files
TOKENS = Entry((1, 1, 1), classes=None, check=_check_tokens, fetch=f"{_HERE}.dataset_catalog:refuse_token_fetch")
