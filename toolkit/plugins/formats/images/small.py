"""MNIST, Fashion-MNIST and CIFAR-10, read by torchvision, then kept as tensors.

Also `toolkit data fetch`: data sets and weights of torchvision, downloaded on the login node.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.base import fsio, terminal
from toolkit.base.errors import DataMissingError, RequestError
from toolkit.base.torch_version import refuse_missing
from toolkit.config import DataConfig
from toolkit.config.dataset_catalog import data_root, sample_shape
from toolkit.data.datasets import Datasets, RandomShift, in_memory, torchvision_transforms
from toolkit.files import origin
from toolkit.plugins.formats.dataset_catalog import FILES, TORCHVISION, fetch_command, files_of

#: Seconds until a download is given up: a server behind a firewall never answers.
FETCH_TIMEOUT_S = 60.0
TORCHVISION_NAMES = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "CIFAR10"}
# Mean and standard deviation of the training images per channel, pixels scaled to 0..1.
_STATISTICS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


def build(config: DataConfig) -> Datasets:
    """Return the data set. Raises DataMissingError where its files are damaged."""
    refuse_missing(*TORCHVISION)
    import torchvision  # takes seconds

    kind = getattr(torchvision.datasets, TORCHVISION_NAMES[config.name])
    root = data_root(config.root)
    try:
        parts = [kind(root, train=train) for train in (True, False)]
    except (RuntimeError, ValueError, EOFError) as error:
        folder, other = root / FILES[config.name][0], root / "published"
        raise DataMissingError(
            f"data.root: {folder} does not hold the files of {config.name} as they were published ({error}). Pictures "
            "of your own are data.name=image_folder. To get the published ones, run on the login node\n"
            f"    {fetch_command(config.name, other)}\nand set data.root={other}"
        ) from error
    train, test = (_tensors(part) for part in parts)
    return in_memory(config, train, test, *_STATISTICS[config.name], _augmentation(config))


def _tensors(part: Any) -> tuple[Tensor, Tensor]:
    """Return images (n, c, h, w) uint8 and classes (n,). MNIST comes as (n, h, w), and CIFAR-10 as (n, h, w, c)."""
    images = torch.as_tensor(part.data)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2)
    return images, torch.as_tensor(part.targets, dtype=torch.int64)


def _augmentation(config: DataConfig) -> Callable[[Tensor], Any]:
    """Return what makes the random change for a background (c, 1, 1): a shift, and for CIFAR-10 also mirroring."""
    if config.name != "cifar10":
        return partial(RandomShift, 2)
    pixels = max(sample_shape(config)[1] // 8, 1)  # 4 of 32
    v2 = torchvision_transforms()
    return lambda background: v2.Compose([RandomShift(pixels, background), v2.RandomHorizontalFlip()])


def fetch(name: str, root: str | None) -> str:
    """Download data set ``name`` below ``root``. Return a sentence that says where it is.

    torchvision downloads into a folder next to the final place and checks the MD5 sums. Only then the folder gets its
    name, so a broken download is never taken for the data set.
    """
    place = data_root(root)
    target, files = place / FILES[name][0], files_of(name, place)
    if all(path.is_file() for path in files):
        return f"{name} is in {target} already"
    if target.exists():
        command = fetch_command(name, place / "published")
        raise RequestError(f"{target} is there but incomplete; to download all of it elsewhere, run {command}")
    refuse_missing(*TORCHVISION)
    fsio.make_dir(place)
    # On one file system with the final place: the rename below makes the whole folder appear at once.
    with tempfile.TemporaryDirectory(prefix=f".fetch-{name}-", dir=place) as scratch:
        import torchvision

        kind = getattr(torchvision.datasets, TORCHVISION_NAMES[name])
        # A data set has several mirrors or one URL. The error of a failed download names them.
        addresses = list(getattr(kind, "mirrors", [])) or [kind.url]
        with _downloading(name, addresses, files):
            kind(Path(scratch), download=True)
        fsio.rename_dir(Path(scratch) / target.name, target)
    return f"{name} is in {target}"


def fetch_weights(name: str, root: str | None) -> str:
    """Download weights of torchvision, see :func:`~toolkit.files.origin.published_path`. Return where they are."""
    from torch.hub import HASH_REGEX, download_url_to_file

    path = origin.published_path(name, root)
    if path.is_file():
        return f"{name} is in {path} already"
    refuse_missing(*TORCHVISION)
    try:
        url = import_module("torchvision.models").get_weight(name).url
    except (ValueError, AttributeError) as error:
        raise RequestError(f"torchvision has no weights {name}: {error}") from None
    fsio.make_dir(path.parent)
    digest = HASH_REGEX.search(url)  # the name of a file of weights holds the beginning of its SHA-256
    with _downloading(name, [url], [path]), fsio.atomic_path(path) as scratch:
        download_url_to_file(url, str(scratch), digest and digest[1], progress=False)
    return f"{name} is in {path}"


@contextlib.contextmanager
def _downloading(name: str, addresses: Sequence[str], paths: Sequence[Path]) -> Iterator[None]:
    """Give up a server that does not answer. Raises DataMissingError with what to do without internet access here."""
    timeout_s = socket.getdefaulttimeout()
    # torchvision has no timeout of its own; this one covers every connection of the process.
    socket.setdefaulttimeout(FETCH_TIMEOUT_S)
    try:
        # torchvision prints its progress; stdout is for the command.
        with terminal.unguarded(), contextlib.redirect_stdout(sys.stderr):
            yield
    except (OSError, RuntimeError) as error:
        folder, files = paths[0].parent, "\n".join(f"    {path}" for path in paths)
        raise DataMissingError(
            f"{name} could not be downloaded from {' or '.join(addresses)}: {error}\n"
            f"Run this where there is internet, then copy the folder {folder.name} here; what must be there:\n{files}"
        ) from error
    finally:
        socket.setdefaulttimeout(timeout_s)
