"""Windows of tokens to train a language model on, at random offsets, with each token's place in its document."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from toolkit.base.errors import ConfigError
from toolkit.config.dataset_catalog import data_root
from toolkit.data.fingerprint import crc
from toolkit.plugins.formats.dataset_catalog import text_files
from toolkit.plugins.formats.tokens.folder import Tokens
from toolkit.plugins.formats.tokens.writer import pack_bytes

if TYPE_CHECKING:
    from toolkit.config import DataConfig

#: One window in ``HELD_OUT_EVERY`` is held out for the evaluation, and about ``MAX_HELD_OUT`` at most.
HELD_OUT_EVERY = 20
MAX_HELD_OUT = 256
#: A target that does not count.
NO_TARGET = -100


def load_tokens(config: DataConfig, folder: Path, alive: Callable[[], None] = lambda: None) -> Tokens:
    """Return the tokens of the ``data:`` section: token shards, or text as bytes.

    Text is copied into the run's ``folder`` once, so a resume finds the same bytes on any node, even if the files have
    changed since. On several ranks call it in ``with self.main_first():`` of a job. ``alive`` is called after each
    file. For example::

        >>> tokens = toolkit.load_tokens(toolkit.load_config("configs/gpt_fsdp.yaml").data, folder)
        >>> tokens.folder.parent == folder, len(tokens) > 1_000_000, tokens.index.vocabulary
        (True, True, 256)
    """
    if config.name == "tokens":
        return Tokens(data_root(config.root))
    if config.name != "text":
        raise ConfigError(f"data.name: {config.name} has no text; use text, or tokens")
    packed = folder / "text"
    if not packed.exists():
        pack_bytes(text_files(config.root), packed, alive)
    return Tokens(packed)


class TokenWindows:
    """The windows of ``length`` tokens that are ``held_out``, or all others.

    A sample is a pair: inputs (length, 2), each token and its place in its document, and targets (length,), the token
    that follows. Where a document ends the target is -100, since what follows is another document. A document that
    began before the window begins with it. Without ``documents`` inputs are tokens (length,), and each has a target.

    Held-out windows are evenly spaced, so that the evaluation covers all of the text. A window to train on moves by up
    to half its length, as torch's random numbers say, and never into one that is held out::

        >>> tokens = toolkit.load_tokens(toolkit.load_config("configs/gpt_fsdp.yaml").data, folder)
        >>> train_set = toolkit.TokenWindows(tokens, length=64, held_out=False)
        >>> inputs, targets = train_set[0]
        >>> inputs.shape, targets.shape
        (torch.Size([64, 2]), torch.Size([64]))
    """

    def __init__(self, tokens: Tokens, length: int, *, held_out: bool, documents: bool = True) -> None:
        self._tokens, self._length, self._documents = tokens, length, documents
        self._held_out = held_out
        self._windows = (len(tokens) - 1) // length
        self._every = max(HELD_OUT_EVERY, self._windows // MAX_HELD_OUT)
        if self._windows < 2:
            raise ConfigError(
                f"data.root: {len(tokens)} tokens make {self._windows} windows of {length}, and two are needed, one to "
                "train on and one to evaluate; give it more text, or shorter windows"
            )

    def __len__(self) -> int:
        held_out = -(-self._windows // self._every)
        return held_out if self._held_out else self._windows - held_out

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start, length = self._start(index), self._length
        row = torch.from_numpy(self._tokens.read(start, start + length + 1))
        inputs, targets = row[:-1], row[1:].clone()
        if not self._documents:
            return inputs, targets
        begins = self._tokens.document_starts(start, start + length)
        targets[begins - 1] = NO_TARGET
        # Each token's place is its distance from the last start of a document, or from the window's start.
        all_places = np.arange(length)
        starts = np.concatenate([[0], begins])[np.searchsorted(begins, all_places, side="right")]
        return torch.stack([inputs, torch.from_numpy(all_places - starts)], -1), targets

    def _start(self, index: int) -> int:
        """Return the first token of a window. Window 0 of each ``_every`` is held out."""
        if self._held_out:
            return index * self._every * self._length
        run, place = divmod(index, self._every - 1)
        # The windows between two that are held out are a run of tokens, in which a window may begin anywhere.
        first = (run * self._every + 1) * self._length
        last = (min((run + 1) * self._every, self._windows) - 1) * self._length
        half = self._length // 2
        moved = int(torch.randint(-half, half + 1, ()))
        return min(max(first + place * self._length + moved, first), last)

    def fingerprint(self) -> str:
        """Return what identifies the tokens and the windows."""
        index = self._tokens.index
        return crc([f"{index.content} {index.tokens} {index.documents} {self._length} {self._documents}".encode()])
