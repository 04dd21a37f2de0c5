from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from toolkit.data.randomness import prepare, reseed


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


def test_each_gpu_of_a_process_draws_its_own_numbers_and_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Generators of the CPU stand for those of three GPUs. The second GPU is the current one."""
    gpus = [torch.Generator() for _ in range(3)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)

    def numbers() -> list[float]:
        reseed(1, 7, 0)
        return [torch.rand((), generator=generator).item() for generator in [torch.default_generator, *gpus]]

    first = numbers()
    assert first == numbers()
    assert len(set(first)) == 3, "the current GPU has the seed of the process, the others have their own"
    assert first[0] == first[2]
