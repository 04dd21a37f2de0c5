"""Small data sets that the tests of this folder share."""

import random
from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Numbers:
    """A data set whose sample i is the number i. The output tells which samples were read."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        chosen = torch.from_numpy(indices.copy())
        return chosen.float().unsqueeze(1), chosen


class Noisy:
    """A data set whose sample i is i and a few random numbers.

    They come from each generator that an augmentation may use.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draws = [float(index), torch.rand(()).item(), random.random(), np.random.random()]
        return torch.tensor(draws, dtype=torch.float64), index


class Damaged(Noisy):
    """A data set whose samples ``bad`` cannot be read."""

    def __init__(self, size: int, bad: Collection[int], error: Exception | None = None) -> None:
        super().__init__(size)
        self.bad = bad
        self.error = error or OSError("truncated image")

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index in self.bad:
            raise self.error
        return super().__getitem__(index)
