"""The data sets that need no files."""

import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from toolkit.base.errors import ConfigError
from toolkit.config import DataConfig, dataset_catalog
from toolkit.data.datasets import Augmented, InMemory, RandomShift, build_datasets
from toolkit.data.fingerprint import fingerprint
from toolkit.data.loader import BatchedSamples, Loader
from toolkit.ranks.batch import Share


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


@pytest.mark.parametrize(
    ("config", "off", "accuracy"),
    [(DataConfig(), 0.01, 0.85), (DataConfig(name="synthetic", image_size=8), 0.05, 0.95)],
    ids=["digits", "synthetic"],
)
def test_images_are_standardised_and_can_be_learnt_by_a_linear_model(
    config: DataConfig, off: float, accuracy: float
) -> None:
    sets = build_datasets(config)
    (train, labels), (test, truth) = all_of(sets.train), all_of(sets.eval)
    assert abs(train.mean().item()) < off
    assert abs(train.std().item() - 1) < off
    if config.name == "synthetic":
        assert train.shape == (4096, 3, 8, 8)
        assert min(torch.bincount(labels, minlength=10)) > 330
    weights = torch.linalg.lstsq(train.flatten(1), functional.one_hot(labels).float(), driver="gelsd").solution
    assert ((test.flatten(1) @ weights).argmax(1) == truth).float().mean() > accuracy


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


def test_checking_files_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, toolkit.config.dataset_catalog; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_data_sets_without_files_are_always_there(name: str, tmp_path: Path) -> None:
    dataset_catalog.check_datasets(DataConfig(name=name, root=str(tmp_path / "none")))


def test_root_is_the_config_then_the_environment_then_data_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOOLKIT_DATA", raising=False)
    assert dataset_catalog.data_root(None) == tmp_path / "data"
    monkeypatch.setenv("TOOLKIT_DATA", "/shared/data")
    assert dataset_catalog.data_root(None) == Path("/shared/data")
    assert dataset_catalog.data_root("mine") == tmp_path / "mine"


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        dataset_catalog.entry_of("digist")


@pytest.mark.parametrize(
    ("name", "image_size", "shape"),
    [("digits", None, (1, 8, 8)), ("digits", 32, (1, 32, 32)), ("synthetic", None, (3, 32, 32))],
)
def test_sample_shapes_follow_the_image_size(name: str, image_size: int | None, shape: tuple[int, int, int]) -> None:
    assert dataset_catalog.sample_shape(DataConfig(name=name, image_size=image_size)) == shape


def images(count: int, moved: float = 0.0, first_class: int = 0) -> InMemory:
    classes = torch.arange(count) % 7
    classes[0] = first_class
    return InMemory(torch.full((count, 1, 2, 2), moved), classes)


class Folder:
    """A data set with a list of files as torchvision's folders have."""

    def __init__(self, root: str, names: list[str]) -> None:
        self.root = root
        self.samples = [(f"{root}/{name}", 0) for name in names]

    def __len__(self) -> int:
        return len(self.samples)


class Plain:
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Tensor:
        raise AssertionError("reading a sample may take long, or be random")


class Named(Plain):
    def fingerprint(self) -> str:
        return "version 3"


def test_the_number_of_samples_and_their_classes_count_but_no_rounded_input() -> None:
    assert fingerprint(images(100)) == fingerprint(images(100, moved=1e-7))
    assert len({fingerprint(images(100)), fingerprint(images(110)), fingerprint(images(100, first_class=3))}) == 3
    augmented = Augmented(images(100), lambda image: image + torch.rand(()))
    assert fingerprint(augmented) == fingerprint(images(100))


def test_of_a_folder_the_names_count_wherever_it_is() -> None:
    one, moved, other = Folder("/a", ["x.png", "y.png"]), Folder("/b", ["x.png", "y.png"]), Folder("/a", ["x.png", "z"])
    assert fingerprint(one) == fingerprint(moved) != fingerprint(other)


def test_a_listed_file_may_come_with_several_values_or_none_and_any_name() -> None:
    def of(*samples: tuple[object, ...]) -> str:
        folder = Folder("/a", [])
        folder.samples = list(samples)  # type: ignore[arg-type]
        return fingerprint(folder)

    assert of(("/a/x.png", 3)) == "1 samples, 773689d5", "stored in checkpoints"
    assert len({of(("/a/x.png",)), of(("/a/x.png", 3)), of(("/a/x.png", 3, (0, 1))), of(("/a/\udcff.png", 3))}) == 4


def test_any_other_data_set_says_it_itself_or_counts_by_its_size() -> None:
    assert fingerprint(Plain()) == "5 samples"
    assert fingerprint(Named()) == "5 samples, version 3"


def test_of_parts_that_stay_on_their_nodes_no_sample_is_read() -> None:
    class OnlyHere(InMemory):
        def batch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
            raise AssertionError("another node has it")

    dataset = OnlyHere(torch.zeros(10, 1, 2, 2), torch.zeros(10, dtype=torch.int64))
    loader = Loader(dataset, global_batch_size=4, seed=0, share=Share(0, 2), partition="blocks")
    assert loader.fingerprint() == "10 samples"
