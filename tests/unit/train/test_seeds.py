from __future__ import annotations

import random
import timeit

import numpy as np
import torch

from toolkit.train.seeds import prepare, reseed


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_a_step_draws_the_same_whatever_was_drawn_before() -> None:
    reseed(1, 7, 0)
    first = draws()
    torch.rand(100), random.random(), np.random.rand()
    reseed(1, 7, 0)
    assert draws() == first


def test_seed_step_and_share_each_change_every_generator() -> None:
    found = []
    for place in [(1, 7, 0), (2, 7, 0), (1, 8, 0), (1, 7, 1)]:
        reseed(*place)
        found.append(draws())
    prepare(1)
    found.append(draws())
    assert all(len(set(values)) == 5 for values in zip(*found, strict=True))


def test_reseeding_costs_a_small_part_of_the_shortest_step() -> None:
    assert min(timeit.repeat(lambda: reseed(1, 2, 3), number=200, repeat=5)) / 200 < 100e-6
