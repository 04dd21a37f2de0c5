"""The data sets that need no files."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn import functional

from toolkit.config import DataConfig
from toolkit.data.datasets import InMemory, RandomShift, build_datasets
from toolkit.data.loader import BatchedSamples


def all_of(dataset: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = dataset.batch(np.arange(len(dataset)))
    return inputs, targets


def test_digits_are_the_1797_real_images() -> None:
    sets = build_datasets(DataConfig())
    (train, train_targets), (test, test_targets) = all_of(sets.train), all_of(sets.eval)
    assert (len(sets.train), len(sets.eval), sets.classes, sets.sample_shape) == (1437, 360, 10, (1, 8, 8))
    images = torch.cat([train, test]) * 0.3760 + 0.3053
    pixels = (images * 16).round()
    assert torch.allclose(images * 16, pixels, atol=1e-4)
    assert (pixels.min().item(), pixels.max().item()) == (0, 16)
    assert len(pixels.unique(dim=0)) == 1797, "no two images are equal"
    # class counts of the test set in optdigits.names of UCI
    counts = torch.bincount(torch.cat([train_targets, test_targets])).tolist()
    assert counts == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_are_standardised() -> None:
    train, _ = all_of(build_datasets(DataConfig()).train)
    assert abs(train.mean().item()) < 0.01
    assert abs(train.std().item() - 1) < 0.01


def test_digits_can_be_learnt_by_a_linear_model() -> None:
    sets = build_datasets(DataConfig())
    (train, labels), (test, truth) = all_of(sets.train), all_of(sets.eval)
    weights = torch.linalg.lstsq(train.flatten(1), functional.one_hot(labels).float(), driver="gelsd").solution
    assert ((test.flatten(1) @ weights).argmax(1) == truth).float().mean() > 0.85


def test_data_sets_without_files_do_not_pay_for_torchvision() -> None:
    code = (
        "import sys; from toolkit.config import DataConfig; from toolkit.data.datasets import build_datasets\n"
        "for name in ('digits', 'synthetic'): build_datasets(DataConfig(name=name, augment=True)).train[0]\n"
        "print('torchvision' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_synthetic_data_is_the_same_in_every_version() -> None:
    sets = build_datasets(DataConfig(name="synthetic", image_size=4))
    inputs, targets = cast(BatchedSamples, sets.train).batch(np.arange(8))
    assert targets.tolist() == [9, 0, 6, 2, 2, 2, 4, 0]
    assert inputs[0, 0, 0].tolist() == pytest.approx([-0.5188506, 1.6007397, -0.3786254, -0.1752949], abs=1e-6)


def test_synthetic_data_are_distinct_balanced_and_learnable() -> None:
    sets = build_datasets(DataConfig(name="synthetic", image_size=8))
    (train, labels), (test, truth) = all_of(sets.train), all_of(sets.eval)
    assert train.shape == (4096, 3, 8, 8)
    assert abs(train.mean().item()) < 0.05
    assert abs(train.std().item() - 1) < 0.05
    assert min(torch.bincount(labels, minlength=10)) > 330
    weights = torch.linalg.lstsq(train.flatten(1), functional.one_hot(labels).float(), driver="gelsd").solution
    assert ((test.flatten(1) @ weights).argmax(1) == truth).float().mean() > 0.95


def test_digits_augmentation_shifts_by_at_most_a_pixel() -> None:
    image = torch.arange(1.0, 129.0).view(2, 8, 8)
    background = torch.tensor([-3.0, -7.0]).view(2, 1, 1)
    padded = functional.pad(image - background, [1] * 4) + background
    shifts = {tuple(padded[:, y : y + 8, x : x + 8].flatten().tolist()) for y in range(3) for x in range(3)}
    assert {tuple(RandomShift(1, background)(image).flatten().tolist()) for _ in range(300)} == shifts


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_augmented_data_sets_keep_their_evaluation_still(name: str) -> None:
    sets = build_datasets(DataConfig(name=name, augment=True))
    assert not isinstance(sets.train, BatchedSamples)
    assert isinstance(sets.eval, BatchedSamples)


def test_tensors_that_are_not_images_are_refused_in_memory() -> None:
    with pytest.raises(ValueError, match=r"InMemory: images of shape \(30, 4\), but \(n, c, h, w\) is needed"):
        InMemory(torch.randn(30, 4), torch.zeros(30))
