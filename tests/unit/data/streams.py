"""Streams of both kinds, for the tests. Each share reads its own lines, and shuffles them anew in each epoch."""

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toolkit.ranks.batch import Share


def length_of(share: Share) -> int:
    """Return a share's number of samples. Streams are uneven: 7 samples for share 0, 8 for share 1, ..."""
    return 7 + share.index


class Lines:
    """An iterator that is its own state. Samples are numbered 100 * share + line; the augmentation is random."""

    def __init__(self, share: Share, seed: int) -> None:
        self.share = share
        self.seed = seed
        self.epoch = 0
        self.taken = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        if self.taken == length_of(self.share):
            self.epoch, self.taken = self.epoch + 1, 0
        return self

    def __next__(self) -> tuple[Tensor, int]:
        if self.taken == length_of(self.share):
            raise StopIteration
        self.taken += 1
        return self.sample(self.taken - 1)

    def sample(self, number: int) -> tuple[Tensor, int]:
        lines = np.random.RandomState(self.seed + self.epoch).permutation(length_of(self.share))
        target = 100 * self.share.index + int(lines[number])
        return torch.rand(4) + random.random() + np.random.normal(), target

    def state_dict(self) -> Mapping[str, int]:
        return {"epoch": self.epoch, "taken": self.taken}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.taken = state["epoch"], state["taken"]


class YieldedLines(Lines):
    """The same samples from a generator. It ends an epoch by running out, and ignores a state that is loaded later."""

    def __iter__(self) -> Iterator[tuple[Tensor, Any]]:
        for number in range(self.taken, length_of(self.share)):
            self.taken = number + 1
            yield self.sample(number)
        self.epoch, self.taken = self.epoch + 1, 0
