"""A short identification of a data set. A resume and each rank compare it to see that they have the same one."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from toolkit.ranks import nested

#: How many samples of a data set in memory, or names of a list of files, are read; evenly spaced.
SAMPLES, NAMES = 64, 10_000


def fingerprint(dataset: Any) -> str:
    """Return the number of samples and, where ``dataset`` offers it cheaply, a content digest."""
    content = digest(dataset)
    return f"{len(dataset)} samples{f', {content}' if content else ''}"


def digest(dataset: Any) -> str:
    """Return a digest of the content; empty where the data set offers nothing.

    The content is the first of these that the data set has: the text that its own method ``fingerprint() -> str``
    returns; the names and classes of files that it lists as torchvision's folders do; for a data set that gives
    batches, the classes and those inputs that are integers. (Floating-point results may differ in the last bit from one
    processor to the next.)
    """
    if callable(own := getattr(dataset, "fingerprint", None)):
        return str(own())
    files = getattr(dataset, "samples", None)
    if isinstance(files, list) and files and isinstance(files[0], tuple) and files[0] and isinstance(files[0][0], str):
        # Names are taken below the root: the digest must not depend on where the folder is.
        root = str(getattr(dataset, "root", ""))
        # What follows the name is mostly the class, but may be anything, or nothing.
        lines = [f"{name.removeprefix(root)}\0{' '.join(map(str, kind))}" for name, *kind in _some(files, NAMES)]
        return crc([line.encode(errors="surrogateescape") for line in lines])
    if not gives_batches(dataset) or not len(dataset):
        return ""
    data = dataset.batch(np.array(_some(range(len(dataset)), SAMPLES)))
    tensors = [leaf for leaf in nested.leaves(data) if isinstance(leaf, Tensor)]
    whole = [value for value in tensors if not (value.is_floating_point() or value.is_complex())]
    return crc([value.contiguous().numpy().tobytes() for value in whole]) if whole else ""


def gives_batches(dataset: Any) -> bool:
    """True if ``dataset.batch(indices)`` returns samples. Hugging Face's ``batch(batch_size)`` groups them instead."""
    batch = getattr(dataset, "batch", None)
    return callable(batch) and next(iter(inspect.signature(batch).parameters), None) not in (None, "batch_size")


def _some(items: Sequence[Any], most: int) -> list[Any]:
    count = min(len(items), most)
    return [items[index * len(items) // count] for index in range(count)]


def crc(parts: list[bytes]) -> str:
    """Return the CRC-32 of ``parts`` in a row, as eight hexadecimal digits."""
    value = 0
    for part in parts:
        value = zlib.crc32(part, value)
    return f"{value:08x}"
