"""Random augmentation that depends only on the run's seed and the sample's position.

torchvision's transforms draw from the process-wide generators and accept no other generator. So those are seeded before
each *sample*. Then neither the rank, the number of ranks or workers, nor how far workers run ahead changes a pixel, and
a resumed run needs no saved random state.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from toolkit.data.permutation import hash64

#: Keeps these seeds apart from those that other parts of the package hash from the same run seed.
_SAMPLE = 0x53414D50


def seed_sample(seed: int, position: int) -> None:
    """Seed torch's CPU generator, ``random`` and numpy's legacy generator for the sample at ``position``.

    It takes about 7 us. ``torch.manual_seed`` would take 100, most of it for devices that a data worker must not touch.
    """
    word = hash64(_SAMPLE, seed, position)
    torch.default_generator.manual_seed(word >> 1)
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)


@contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the three generators at the end. Loading in the training process must not disturb dropout."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
