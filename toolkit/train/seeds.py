"""Random numbers as a function of (seed, step, share).

A resume needs no saved random state. Before each step the process's generators are seeded anew. So the dropout mask of
step 1000 is the same whether the run came there in one attempt or in five, and whatever was drawn in between for
logging or evaluation.
"""

from __future__ import annotations

import os
import random

import numpy as np
import torch

from toolkit.data.permutation import hash64

#: Tags that keep these seeds apart from those that other parts of the package hash from the same run seed.
_STEP = 0x53544550
_MODEL = 0x4D4F4445


def prepare(seed: int, *, deterministic: bool = False) -> None:
    """Seed the generators before the model is made. Every rank then draws the same first weights.

    ``deterministic`` allows only algorithms that give the same bits every time. An operation without one raises, and
    names itself.
    """
    _seed_generators(hash64(_MODEL, seed))
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False


def reseed(seed: int, step: int, share: int) -> None:
    """Seed the generators before a step. No two shares of a step, and no two steps, draw the same dropout masks."""
    _seed_generators(hash64(_STEP, seed, step, share))


def _seed_generators(word: int) -> None:
    """Seed torch's generators for the CPU and every GPU, ``random`` and numpy's legacy one.

    This takes about 7 us on the CPU; ``torch.manual_seed`` would take 100 us. Only ``strategy.name: dp`` uses GPUs
    other than the current one: each gets its own numbers, or the parts of a batch would have the same dropout masks.
    """
    seed_cpu(word)
    number = word >> 1
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        current = torch.cuda.current_device()
        for index, generator in enumerate(torch.cuda.default_generators):
            # The current GPU gets ``number`` itself, whatever its index.
            generator.manual_seed(number ^ index ^ current)


def seed_cpu(word: int) -> None:
    """Seed torch's generator for the CPU, ``random`` and numpy's legacy one by 64 bits."""
    torch.default_generator.manual_seed(word >> 1)
    random.seed(word)
    np.random.seed(word & 0xFFFFFFFF)
