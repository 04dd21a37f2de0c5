"""Random numbers of samples do not depend on the batches that were read before, nor do the model's on the samples'."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from toolkit.plugins.integrations.transformers import SeededFetch, SeededStream


class Noisy(Dataset[Any]):
    name = "noise"

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()), random.random(), np.random.rand()])


def masked(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([*samples, torch.rand(4)])


def batches(first: int, epoch: int, seed: int = 0, workers: int = 0) -> list[torch.Tensor]:
    places = [[2 * batch, 2 * batch + 1] for batch in range(first, 6)]
    loader: DataLoader[Any] = DataLoader(Noisy(), batch_sampler=places, collate_fn=masked, num_workers=workers)
    fetch = SeededFetch(loader, seed)
    fetch.begin_epoch(epoch)
    return list(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_is_the_same_whatever_was_read_before_it(workers: int) -> None:
    whole = torch.stack(batches(0, 1))
    assert torch.equal(torch.stack(batches(4, 1, workers=workers)), whole[4:])
    others = [torch.stack(batches(0, 2)), torch.stack(batches(0, 1, seed=1))]
    assert not any((other[:, :, 1:] == whole[:, :, 1:]).any() for other in others)
    assert len({float(value) for value in whole[:, :, 1].flatten()}) == 18, "no two are the same"


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Noisy()[index] for index in range(12))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_the_same_whatever_is_drawn_between_its_batches(workers: int) -> None:
    epochs = []
    for number, draws in ((0, 0), (0, 3), (1, 0)):
        loader: DataLoader[Any] = DataLoader(Endless(), batch_size=2, collate_fn=masked, num_workers=workers)
        SeededStream(loader, 0).begin_epoch(number)
        read = iter(loader)
        epochs.append(torch.stack([(next(read), torch.rand(draws))[0] for _ in range(6)]))
    assert torch.equal(epochs[0], epochs[1])
    assert not (epochs[0][:, :, 1:] == epochs[2][:, :, 1:]).any()
    assert len({float(value) for value in epochs[0][:, :, 1].flatten()}) == 18, "no two are the same"


def test_workers_that_persist_draw_other_numbers_in_the_next_epoch() -> None:
    loader: DataLoader[Any] = DataLoader(Noisy(), batch_size=2, num_workers=1, persistent_workers=True)
    fetch = SeededFetch(loader, 0)
    epochs = []
    for number in (0, 1, 0):
        fetch.begin_epoch(number)
        epochs.append(torch.cat(list(loader)))
    assert torch.equal(epochs[0], epochs[2])
    assert not (epochs[0][:, 1:] == epochs[1][:, 1:]).any()


def test_the_models_random_numbers_do_not_depend_on_the_samples() -> None:
    def drawn() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), np.random.rand()

    for number in (0, 3):
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        fetch = SeededFetch(DataLoader(Noisy(), batch_size=2), 0)
        for _ in range(number):
            fetch.collate(fetch.__getitems__([1, 2]))
        if not number:
            before = drawn()
    assert drawn() == before


def test_it_passes_for_the_data_set() -> None:
    loader: DataLoader[Any] = DataLoader(Noisy(), batch_size=2)
    fetch = SeededFetch(loader, 0)
    assert (len(fetch), fetch.name, int(fetch[3][0])) == (12, "noise", 3)
