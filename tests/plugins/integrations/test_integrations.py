"""The adapters' names need their libraries, and an error names the missing one."""

import random
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from toolkit.base.errors import ConfigError
from toolkit.config import is_loop
from toolkit.plugins import integrations
from toolkit.plugins.integrations.transformers import SeededFetch, SeededStream


def test_importing_the_package_loads_neither_torch_nor_a_library() -> None:
    code = (
        "import sys, toolkit.plugins.integrations; "
        "assert not {'torch', 'lightning', 'transformers', 'accelerate'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("version", [None, "2.5.9", "1.99", "2.5rc1"])
def test_a_library_that_is_missing_or_too_old_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, version: str | None
) -> None:
    def installed(library: str) -> str:
        if version is None:
            raise metadata.PackageNotFoundError(library)
        return version

    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(ConfigError) as refused:
        _ = integrations.LightningCallback
    assert str(refused.value) == (
        f"LightningCallback needs lightning 2.6 or newer, and {version or 'none'} is installed: "
        "pip install 'slurm-batch-toolkit[integrations]'"
    )


def test_a_name_that_is_not_there_is_no_library() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'KerasCallback'"):
        _ = integrations.KerasCallback


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("from toolkit.plugins.integrations import AccelerateRun\nrun = AccelerateRun(None)\n", True),
        ("from toolkit.plugins import integrations as by\ncallbacks = [by.LightningCallback()]\n", True),
        ("import toolkit\n\nwith toolkit.start() as run:\n    pass\n", True),
        ("import lightning\n", False),
        ("from toolkit import submit\n", False),
    ],
)
def test_a_script_with_an_adapter_is_submitted_as_a_loop_of_ones_own(tmp_path: Path, text: str, is_one: bool) -> None:
    (tmp_path / "train.py").write_text(text)
    assert is_loop("train.py", tmp_path) is is_one


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
