"""The data sets, as far as they are known without torch: names, shapes and files.

A data set is in ``data.root``; null means ``$TOOLKIT_DATA``, and without that ``./data``. Compute nodes mostly have no
internet, so files are looked for on the login node before a job is queued, and fetched there.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.base import fsio
from toolkit.base.errors import ConfigError, DataMissingError, nearest
from toolkit.base.staged import staged

if TYPE_CHECKING:
    from toolkit.config import DataConfig

_IDX_FILES = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
_CIFAR10_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch", "batches.meta")
_FASHION = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_SPLITS = ("train", "val")
#: The file of a folder of token shards that is written last.
TOKEN_INDEX = "index.json"
#: Folders of the standard library that hold others' code, or tests of it.
_NOT_OURS = {"site-packages", "dist-packages", "test", "tests"}


@dataclass(frozen=True)
class Entry:
    """One data set.

    ``folder`` (below the root) and ``files`` (below that) must exist. A data set without files has neither. ``shape``
    is (channels, height, width) of a sample where ``data.image_size`` is null. ``classes`` is None where the files
    determine the number. ``names`` are the classes' where they are not just numbers.
    """

    shape: tuple[int, int, int]
    classes: int | None = 10
    folder: str = ""
    files: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


CATALOG = {
    "digits": Entry((1, 8, 8)),
    "mnist": Entry((1, 28, 28), folder="MNIST", files=tuple(f"raw/{name}" for name in _IDX_FILES)),
    "fashion_mnist": Entry(
        (1, 28, 28), folder="FashionMNIST", files=tuple(f"raw/{name}" for name in _IDX_FILES), names=_FASHION
    ),
    "cifar10": Entry((3, 32, 32), folder="cifar-10-batches-py", files=_CIFAR10_FILES, names=_CIFAR10),
    "image_folder": Entry((3, 224, 224), classes=None),
    "synthetic": Entry((3, 32, 32)),
    "text": Entry((1, 1, 1), classes=256),  # bytes; see text_files
    "tokens": Entry((1, 1, 1), classes=None),  # what `toolkit data tokenize` has written
}


def entry_of(name: str) -> Entry:
    """Return the catalog's entry. Raises :class:`ConfigError` with the nearest name for an unknown one."""
    if name not in CATALOG:
        hint = nearest(name, CATALOG)
        raise ConfigError(f"data.name: there is no data set {name!r}; {hint}valid are {', '.join(CATALOG)}")
    return CATALOG[name]


def data_root(root: str | None) -> Path:
    """Return the absolute path that ``data.root`` means, or that of its copy on this node."""
    named = root or os.environ.get("TOOLKIT_DATA") or "data"
    try:
        return staged(Path(named).expanduser().absolute())
    except RuntimeError:
        raise ConfigError(f"data.root: there is no user whose home folder {named!r} could be in") from None


def sample_shape(config: DataConfig) -> tuple[int, int, int]:
    """Return (channels, height, width) of every sample."""
    channels, height, width = entry_of(config.name).shape
    return (channels, config.image_size or height, config.image_size or width)


def missing_files(name: str, root: Path) -> list[Path]:
    """Return the files of data set ``name`` that are missing under ``root``."""
    entry = entry_of(name)
    paths = [root / entry.folder / file for file in entry.files]
    return [path for path in paths if not path.is_file()]


def check_datasets(config: DataConfig) -> None:
    """Check that the data set's files exist, on the login node, before anything is queued.

    Raises :class:`DataMissingError`, which says what to run or where to put the files.
    """
    root = data_root(config.root)
    # Data sets without a fixed list of files are searched instead.
    if config.name == "image_folder":
        class_names(root)
        return
    if config.name == "text":
        text_files(config.root)
        return
    if config.name == "tokens":
        if not (root / TOKEN_INDEX).is_file():
            raise DataMissingError(
                f"data.root: {root} has no {TOKEN_INDEX}: make token shards of your texts with\n"
                f"    toolkit data tokenize TEXTS --tokenizer tokenizer.json --out {shlex.quote(str(root))}\n"
                "which goes on where it was killed"
            )
        return
    missing = missing_files(config.name, root)
    if missing:
        origin = " (TOOLKIT_DATA)" if config.root is None and os.environ.get("TOOLKIT_DATA") else ""
        raise DataMissingError(
            f"data.root: data set {config.name} is not in {root}{origin}: {missing[0]} is not there "
            f"({len(missing)} missing in all). Compute nodes have no internet: on the login node run\n"
            f"    {fetch_command(config.name, root)}\n"
            "or set data.root to a folder that has it"
        )


def fetch_command(name: str, root: Path) -> str:
    """Return the command line that fetches a data set."""
    return shlex.join(["toolkit", "data", "fetch", name, "--root", str(root)])


def text_files(root: str | None) -> list[Path]:
    """Return the files of data set ``text`` in order: all below ``root`` except hidden ones.

    Null means the Python files of the standard library.
    """
    import sysconfig  # takes longer than all the rest, and other data sets do not need it

    folder = staged(fsio.expand(root or sysconfig.get_path("stdlib")).absolute())
    files = list(fsio.files_below(folder, "*" if root else "*.py"))
    if not root:
        files = [path for path in files if _NOT_OURS.isdisjoint(path.relative_to(folder).parts)]
    if not files:
        raise DataMissingError(f"data.root: there are no text files below {folder}; give it a folder that holds some")
    return files


def class_names(root: Path) -> list[str]:
    """Return the classes of an image folder in order: the sub-folders of ``root/train``.

    ``root/val`` must have the same ones. A class's number is its place in the list, and would mean another class in
    evaluation. Raises DataMissingError.
    """
    names: list[list[str]] = []
    for split in _SPLITS:
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
