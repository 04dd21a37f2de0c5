"""The data sets that a config can name.

``digits`` ships with the package and ``synthetic`` needs no files. The others are read by torchvision, which is
imported only for them, because the import costs every rank seconds.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from toolkit.base import fsio, terminal
from toolkit.base.errors import ConfigError, DataMissingError, RequestError
from toolkit.config import catalog
from toolkit.data.loader import BatchedSamples, Samples
from toolkit.data.memory import Augmented, InMemory, RandomShift, Synthetic
from toolkit.data.permutation import order
from toolkit.data.pictures import Photographs, Pictures, Standardise, read_pixels, training_transform, transforms
from toolkit.files import origin

if TYPE_CHECKING:
    from toolkit.config import DataConfig


Dataset = Samples | BatchedSamples

DIGITS_TRAIN = 1437
SYNTHETIC_TRAIN = 4096
SYNTHETIC_EVAL = 1024
#: Seconds until a download is given up: a server behind a firewall never answers.
FETCH_TIMEOUT_S = 60.0

_TORCHVISION_NAMES = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "CIFAR10"}
# Mean and standard deviation of the training images per channel, pixels scaled to 0..1.
_STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "digits": ((0.3053,), (0.3760,)),
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "image_folder": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # ImageNet's
}
_SHIFT_PIXELS = {"digits": 1, "mnist": 2, "fashion_mnist": 2, "synthetic": 2}


@dataclass(frozen=True)
class Datasets:
    """A training set and an eval set.

    Their inputs are float tensors of ``sample_shape`` (channels, height, width).
    """

    train: Dataset
    eval: Dataset
    classes: int
    sample_shape: tuple[int, int, int]
    class_names: tuple[str, ...]  #: one for each class
    pictures: Pictures | None = None  #: how an image file becomes such an input; None where samples are not images


def build_datasets(config: DataConfig) -> Datasets:
    """Return the data sets of the ``data:`` section. Raises DataMissingError where their files are missing::
    >>> digits = toolkit.build_datasets(toolkit.load_config("configs/digits_ddp.yaml").data)
    >>> len(digits.train), digits.sample_shape
    (1437, (1, 8, 8))
    """
    catalog.check_datasets(config)
    if config.name in ("text", "tokens"):
        raise ConfigError(
            f"data.name: {config.name} has no images to classify; choose a data set of images, or jobs.language_model"
        )
    build = BUILDERS.get(config.name, _from_torchvision)
    return build(config)


def _digits(config: DataConfig) -> Datasets:
    """Return UCI's handwritten digits: 1,437 to train on and 360 to evaluate.

    A fixed permutation splits them. The file does not name the writers, so both sets have the same ones. Accuracy is
    higher than on unknown writers.
    """
    packed = resources.files("toolkit.data").joinpath("files/digits.csv.gz").read_bytes()
    table = np.loadtxt(io.BytesIO(gzip.decompress(packed)), delimiter=",", dtype=np.float32)
    table = table[order(len(table), seed=0, epoch=0, start=0, stop=len(table))]
    # Columns 0 to 63 are pixels from 0 to 16, column 64 is the digit.
    images = torch.from_numpy(table[:, :64] / 16).view(-1, 1, 8, 8)
    targets = torch.from_numpy(table[:, 64].astype(np.int64))
    train, test = slice(DIGITS_TRAIN), slice(DIGITS_TRAIN, None)
    return _in_memory(config, (images[train], targets[train]), (images[test], targets[test]))


def _synthetic(config: DataConfig) -> Datasets:
    shape = catalog.sample_shape(config)
    train: Any = Synthetic(SYNTHETIC_TRAIN, shape)
    test = Synthetic(SYNTHETIC_EVAL, shape, first=SYNTHETIC_TRAIN)
    return Datasets(_augmented(config, train), test, Synthetic.CLASSES, shape, _numbers(Synthetic.CLASSES))


def _numbers(classes: int) -> tuple[str, ...]:
    return tuple(map(str, range(classes)))


def _from_torchvision(config: DataConfig) -> Datasets:
    """Return MNIST, Fashion-MNIST or CIFAR-10, read by torchvision, then kept as tensors."""
    import torchvision

    kind = getattr(torchvision.datasets, _TORCHVISION_NAMES[config.name])
    root = catalog.data_root(config.root)
    try:
        parts = [kind(root, train=train) for train in (True, False)]
    except (RuntimeError, ValueError, EOFError) as error:
        folder = root / catalog.entry_of(config.name).folder
        raise DataMissingError(
            f"data.root: the files of {config.name} in {folder} cannot be read ({error}). Remove that folder and "
            f"run on the login node\n    {catalog.fetch_command(config.name, root)}"
        ) from error
    train, test = (_tensors(part) for part in parts)
    return _in_memory(config, train, test)


def _tensors(part: Any) -> tuple[Tensor, Tensor]:
    """Return images (n, c, h, w) uint8 and classes (n,).

    torchvision has MNIST as (n, h, w) and CIFAR-10 as (n, h, w, c).
    """
    images = torch.as_tensor(part.data)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
    return images, torch.as_tensor(part.targets, dtype=torch.int64)


def _in_memory(config: DataConfig, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]) -> Datasets:
    mean, std = _STATISTICS[config.name]
    train_set, eval_set = (
        InMemory(*tensors, mean=mean, std=std, image_size=config.image_size) for tensors in (train, test)
    )
    entry, shape = catalog.entry_of(config.name), catalog.sample_shape(config)
    assert entry.classes is not None
    names = entry.names or _numbers(entry.classes)
    return Datasets(_augmented(config, train_set), eval_set, entry.classes, shape, names, Pictures(shape, mean, std))


def _augmented(config: DataConfig, dataset: InMemory | Synthetic) -> Dataset:
    """Return ``dataset``, with random changes for ``data.augment``: small shifts, for CIFAR-10 also mirroring."""
    if not config.augment:
        return dataset
    if config.name == "cifar10":
        height = catalog.sample_shape(config)[1]
        shift = RandomShift(max(height // 8, 1), dataset.background)  # 4 pixels of 32
        return Augmented(dataset, transforms().Compose([shift, transforms().RandomHorizontalFlip()]))
    if config.name not in _SHIFT_PIXELS:
        raise ConfigError(f"data.augment: there is none for data.name: {config.name}; set it to false")
    return Augmented(dataset, RandomShift(_SHIFT_PIXELS[config.name], dataset.background))


def _image_folder(config: DataConfig) -> Datasets:
    """Return the images in ``root/train`` and ``root/val``, a folder for each class. Each is read and cropped alone."""
    root = catalog.data_root(config.root)
    shape, images, statistics = catalog.sample_shape(config), config.images, _STATISTICS["image_folder"]
    val_size = images.val_size or shape[1]
    resize = images.val_resize or round(val_size * 256 / 224)  # as for ImageNet
    evaluated = Pictures((3, val_size, val_size), *statistics, resize, images.interpolation)
    # Training images that are not changed at random are cut like evaluated ones, to their own size.
    plain = Pictures(shape, *statistics, round(shape[1] * 256 / 224), images.interpolation)
    read, change = (read_pixels, training_transform(images, shape[1])) if config.augment else (plain.pixels, _unchanged)
    standardise, cache_bytes = Standardise(*statistics), int(images.cache_gb * 2**30)
    try:
        train = Photographs(root / "train", read, change, standardise, erase=images.erase, cache_bytes=cache_bytes)
        test = Photographs(root / "val", evaluated.pixels, _unchanged, standardise)
    except FileNotFoundError as error:
        raise DataMissingError(f"data.root: {root}: {error}") from error
    return Datasets(train, test, len(train.classes), shape, tuple(train.classes), evaluated)


def _unchanged(pixels: Tensor) -> Tensor:
    return pixels


def fetch(name: str, root: str | None = None) -> str:
    """Download data set ``name`` below ``root``. Return a sentence that says where it is.

    torchvision downloads into a folder beside the final place and checks the MD5 sums. Only then the folder gets its
    name, so a broken download is never taken for the data set. Raises RequestError for one that cannot be fetched.
    """
    place = catalog.data_root(root)
    if origin.is_published(name):
        return _fetch_weights(name, root)
    if name not in _TORCHVISION_NAMES:
        if name == "tokens":
            raise RequestError("tokens are made from your own texts: see `toolkit data tokenize`")
        if catalog.entry_of(name).classes is None:
            raise RequestError(
                f"{name} cannot be fetched: put images in {place}/train/CLASS/IMAGE and {place}/val/CLASS/IMAGE"
            )
        return f"{name} needs no files: there is nothing to fetch"
    target = place / catalog.entry_of(name).folder
    if not catalog.missing_files(name, place):
        return f"{name} is in {target} already"
    if target.exists():
        raise RequestError(
            f"{target} is there but incomplete; remove it, then run {catalog.fetch_command(name, place)}"
        )
    fsio.make_dir(place)
    # Beside the final place, so on one file system with it: the rename below makes the whole folder appear at once.
    with tempfile.TemporaryDirectory(prefix=f".fetch-{name}-", dir=place) as scratch:
        import torchvision

        kind = getattr(torchvision.datasets, _TORCHVISION_NAMES[name])
        # A data set has several mirrors or one URL. The error of a failed download names them.
        addresses = list(getattr(kind, "mirrors", [])) or [kind.url]
        with _downloading(name, addresses, [target / file for file in catalog.entry_of(name).files]):
            kind(Path(scratch), download=True)
        fsio.rename_dir(Path(scratch) / target.name, target)
    return f"{name} is in {target}"


def _fetch_weights(name: str, root: str | None) -> str:
    """Download weights of torchvision, see :func:`~toolkit.files.origin.published_path`. Return where they are."""
    from torch.hub import HASH_REGEX, download_url_to_file

    path = origin.published_path(name, root)
    if path.is_file():
        return f"{name} is in {path} already"
    try:
        url = import_module("torchvision.models").get_weight(name).url
    except (ValueError, AttributeError) as error:
        raise RequestError(f"torchvision has no weights {name}: {error}") from None
    fsio.make_dir(path.parent)
    digest = HASH_REGEX.search(url)  # the name of a file of weights holds the beginning of its SHA-256
    with _downloading(name, [url], [path]), fsio.new_path(path) as scratch:
        download_url_to_file(url, str(scratch), digest and digest[1], progress=False)
    return f"{name} is in {path}"


@contextlib.contextmanager
def _downloading(name: str, addresses: Sequence[str], paths: Sequence[Path]) -> Iterator[None]:
    """Give up a server that does not answer. Raises DataMissingError with what to do without internet access here."""
    timeout_s = socket.getdefaulttimeout()
    # torchvision has no timeout of its own; this one covers every connection of the process.
    socket.setdefaulttimeout(FETCH_TIMEOUT_S)
    try:
        with (
            terminal.unguarded(),
            contextlib.redirect_stdout(sys.stderr),
        ):  # torchvision prints its progress; stdout is for the command
            yield
    except (OSError, RuntimeError) as error:
        folder, files = paths[0].parent, "\n".join(f"    {path}" for path in paths)
        raise DataMissingError(
            f"{name} could not be downloaded from {' or '.join(addresses)}: {error}\n"
            f"Run this where there is internet, then copy the folder {folder.name} here; what must be there:\n{files}"
        ) from error
    finally:
        socket.setdefaulttimeout(timeout_s)


#: The data sets that are not torchvision's.
BUILDERS = {"digits": _digits, "synthetic": _synthetic, "image_folder": _image_folder}
