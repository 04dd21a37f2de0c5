"""Photographs: the transforms of torchvision's reference, built from its older classes as published, beside ours."""

from __future__ import annotations

import random
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision.models import ResNet50_Weights
from torchvision.transforms.functional import InterpolationMode

from toolkit.config import DataConfig, ImageConfig, JobConfig, validate
from toolkit.data.datasets import build_datasets
from toolkit.data.pictures import training_transform
from toolkit.data.randomness import seed_sample
from toolkit.errors import ConfigError

v2: Any = import_module("torchvision.transforms.v2")  # whose names have no types
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def photograph() -> Image.Image:
    """A smooth image with some noise, of another shape than a square."""
    draw = np.random.default_rng(0)
    waves = np.sin(np.arange(90)[:, None, None] / 9 + np.arange(120)[None, :, None] / 14 + np.arange(3))
    return Image.fromarray((127 + 90 * waves + draw.normal(0, 12, (90, 120, 3))).clip(0, 255).astype(np.uint8))


def reference(policy: str, erase: float, interpolation: str) -> Any:
    """references/classification/presets.py of torchvision, ClassificationPresetTrain with --use-v2 for the policy.

    (The older classes of the policies draw the sign of a change in another way.)
    """
    mode = InterpolationMode(interpolation)
    policies: dict[str, list[Any]] = {
        "none": [],
        "rand_augment": [v2.RandAugment(interpolation=mode, magnitude=9)],
        "trivial_augment": [v2.TrivialAugmentWide(interpolation=mode)],
        "augmix": [v2.AugMix(interpolation=mode, severity=3)],
        "auto_augment": [v2.AutoAugment(policy=v2.AutoAugmentPolicy("imagenet"), interpolation=mode)],
    }
    steps = [v1.RandomResizedCrop(48, interpolation=mode), v1.RandomHorizontalFlip(0.5), *policies[policy]]
    steps += [v1.PILToTensor(), v1.ConvertImageDtype(torch.float), v1.Normalize(mean=MEAN, std=STD)]
    return v2.Compose([*steps, *([v1.RandomErasing(p=erase)] if erase else [])])


@pytest.mark.parametrize(
    ("policy", "interpolation"),
    [
        *((name, "bicubic") for name in ("none", "rand_augment", "trivial_augment", "auto_augment")),
        *((name, "bilinear") for name in ("none", "augmix")),
    ],
)
def test_training_images_are_those_of_torchvisions_reference(
    policy: str, interpolation: str, photograph: Image.Image
) -> None:
    theirs = reference(policy, 0.5, interpolation)
    ours = training_transform(ImageConfig(policy=policy, erase=0.5, interpolation=interpolation), 48, MEAN, STD)
    for position in range(8):
        seed_sample(0, position)
        expected = theirs(photograph)
        seed_sample(0, position)
        assert torch.allclose(ours(photograph), expected, atol=1e-5), f"position {position}"


def write_folder(root: Path, photograph: Image.Image) -> None:
    for name in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (root / name).mkdir(parents=True)
        photograph.save(root / name / "0.jpg")


def test_evaluated_images_are_those_of_torchvisions_weights(tmp_path: Path, photograph: Image.Image) -> None:
    write_folder(tmp_path, photograph)
    images = ImageConfig(val_size=224, val_resize=232)
    sets = build_datasets(DataConfig("image_folder", str(tmp_path), image_size=176, augment=True, images=images))
    theirs = ResNet50_Weights.IMAGENET1K_V2.transforms()
    with Image.open(tmp_path / "val/cat/0.jpg") as image:
        expected = theirs(image.convert("RGB"))
    assert torch.allclose(sets.eval[0][0], expected, atol=1e-5)  # type: ignore[index]
    assert sets.train[0][0].shape == (3, 176, 176)  # type: ignore[index]
    assert sets.pictures is not None
    assert torch.equal(sets.pictures.read(tmp_path / "val/cat/0.jpg"), sets.eval[0][0])  # type: ignore[index]


def test_erasing_follows_its_probability(photograph: Image.Image) -> None:
    random.seed(0)
    torch.manual_seed(0)
    transform = training_transform(ImageConfig(erase=0.25), 32, MEAN, STD)
    erased = sum(bool((transform(photograph) == 0).all(0).any()) for _ in range(200))
    assert 30 <= erased <= 70


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (DataConfig("digits", images=ImageConfig(val_size=16)), r"data\.images: .* for data\.name image_folder"),
        (DataConfig("image_folder", images=ImageConfig(policy="augmix")), r"data\.images\.policy: .*data\.augment"),
        (DataConfig("image_folder", images=ImageConfig(erase=0.1)), r"data\.images\.erase: .*data\.augment"),
        (DataConfig("image_folder", images=ImageConfig(val_size=224, val_resize=200)), r"val_resize: 200 is less"),
        (DataConfig("image_folder", images=ImageConfig(policy="ta_wide")), r"data\.images\.policy.*trivial_augment"),
        (
            DataConfig("image_folder", augment=True, images=ImageConfig("augmix", interpolation="bicubic")),
            r"data\.images\.interpolation: .*augmix",
        ),
        (DataConfig(repeats=2, split="blocks"), r"data\.repeats: does not go with data\.split"),
    ],
)
def test_keys_that_change_nothing_or_do_not_fit_are_refused(data: DataConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        validate(JobConfig(data=data))
