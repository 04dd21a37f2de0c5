"""Text as bytes, packed end to end and cut into windows of one length, to train a language model of bytes on.

The text is copied into the run's folder once, and memory-mapped there. So a resume finds the same bytes, on any node,
even if the original files have changed since.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from toolkit import fsio
from toolkit.config import catalog
from toolkit.data.permutation import Indices
from toolkit.errors import ConfigError

#: One window in ``HELD_OUT_EVERY`` is held out for the evaluation, and about ``MOST_HELD_OUT`` at most.
HELD_OUT_EVERY = 20
MOST_HELD_OUT = 256
_NAME = "text.bin"


def pack_text(root: str | None, folder: Path, alive: Callable[[], None] = lambda: None) -> Path:
    """Return the copy in ``folder`` of the text that ``root`` names, made where there is none.

    On several ranks call it in ``with self.main_first():`` of a job. ``alive`` is called after each file::

        >>> text = toolkit.pack_text(None, folder)
        >>> text.parent == folder, text.stat().st_size > 1_000_000
        (True, True)
    """
    path = folder / _NAME
    if not path.exists():
        pack(catalog.text_files(root), path, alive)
    return path


def pack(files: list[Path], target: Path, alive: Callable[[], None] = lambda: None) -> None:
    """Write ``files`` end to end, a zero byte after each, as the new file ``target``, all or nothing."""

    def contents() -> Iterator[bytes]:
        for file in files:
            yield file.read_bytes() + b"\0"
            alive()

    with fsio.new_path(target) as temporary:
        fsio.write_stream(temporary, contents())


class TextWindows:
    """The windows of ``length`` bytes of a packed text that are ``held_out``, or all others; none overlap.

    The held-out windows are evenly spaced over the text, so that the evaluation covers all of it::

        >>> text = toolkit.pack_text(None, folder)
        >>> train_set = toolkit.TextWindows(text, length=64, held_out=False)
        >>> eval_set = toolkit.TextWindows(text, length=64, held_out=True)
        >>> inputs, targets = eval_set.batch(numpy.arange(8))
        >>> inputs.shape, bool((inputs[:, 1:] == targets[:, :-1]).all())
        (torch.Size([8, 64]), True)
    """

    def __init__(self, path: Path, length: int, *, held_out: bool) -> None:
        self._bytes = np.memmap(path, np.uint8, "r")
        self._length = length
        self._held_out = held_out
        self._windows = (len(self._bytes) - 1) // length
        self._every = max(HELD_OUT_EVERY, self._windows // MOST_HELD_OUT)
        if self._windows < 2:
            raise ConfigError(
                f"data.root: {len(self._bytes)} bytes of text make {self._windows} windows of {length}, and two are "
                "needed, one to train on and one to evaluate; give it more text, or a model.name with shorter windows"
            )

    def __len__(self) -> int:
        held_out = -(-self._windows // self._every)
        return held_out if self._held_out else self._windows - held_out

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return bytes (n, length) int64 of the windows ``indices`` (n,), and the byte that follows each of them."""
        # Window 0 of each ``_every`` is held out; the others are counted without it.
        if self._held_out:
            windows = indices * self._every
        else:
            windows = indices + indices // (self._every - 1) + 1
        first = windows[:, None] * self._length
        rows = self._bytes[first + np.arange(self._length + 1)]
        text = torch.from_numpy(rows.astype(np.int64))
        return text[:, :-1], text[:, 1:]
