"""The data sets that a config can name, as far as they are known without torch.

A data set is in ``data.root``; null means ``$TOOLKIT_DATA``, and without that ``./data``. Compute nodes mostly have no
internet, so files are looked for on the login node before a job is queued, and fetched there. ``digits`` ships with the
package and ``synthetic`` needs no files; the others are found by :mod:`toolkit.registry`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit import registry
from toolkit.base import fsio
from toolkit.base.errors import ConfigError, did_you_mean
from toolkit.base.staged import staged

if TYPE_CHECKING:
    from toolkit.config import DataConfig


@dataclass(frozen=True)
class Entry:
    """One data set.

    ``shape`` is (channels, height, width) of a sample where ``data.image_size`` is null. ``classes`` is None where the
    files determine the number. ``names`` are the classes' where they are not just numbers. ``check(config)``
    raises DataMissingError, which says what to run or where to put the files. It imports no torch. What may import it
    is named, ``module:function``:

    * ``build(config)`` returns a :class:`toolkit.data.datasets.Datasets`. None: there are no images to classify.
    * ``fetch(name, root)`` puts the files below ``root``, and returns a sentence that says where. None: there are none.
    """

    shape: tuple[int, int, int]
    build: str | None = None
    classes: int | None = 10
    names: tuple[str, ...] = ()
    check: Callable[[DataConfig], object] | None = None
    fetch: str | None = None
    package: tuple[str, str, str] | None = None  #: what it needs, as :func:`~.torch_version.refuse_missing` takes it


DIGITS = Entry((1, 8, 8), "toolkit.data.datasets:digits")
SYNTHETIC = Entry((3, 32, 32), "toolkit.data.datasets:synthetic")


def entry_of(name: str) -> Entry:
    """Return the entry of a data set. Raises :class:`ConfigError` with the nearest name for an unknown one."""
    entry: Entry | None = registry.find("datasets", name)
    if entry is None:
        known = registry.names("datasets")
        raise ConfigError(f"data.name: unknown data set {name!r}; {did_you_mean(name, known)}valid: {', '.join(known)}")
    return entry


def data_root(root: str | None) -> Path:
    """Return the absolute path that ``data.root`` means, or that of its copy on this node."""
    named = root or os.environ.get("TOOLKIT_DATA") or "data"
    if (folder := str(fsio.expand(named))).startswith("~"):
        raise ConfigError(f"data.root: there is no user whose home folder {named!r} could be in")
    return staged(Path(folder).absolute())


def sample_shape(config: DataConfig) -> tuple[int, int, int]:
    """Return (channels, height, width) of every sample."""
    channels, height, width = entry_of(config.name).shape
    return (channels, config.image_size or height, config.image_size or width)


def check_datasets(config: DataConfig) -> None:
    """Check that the data set's files exist, on the login node, before anything is queued.

    Raises :class:`~toolkit.base.errors.DataMissingError`, which says what to run or where to put the files.
    """
    check = entry_of(config.name).check
    if check is not None:
        check(config)
