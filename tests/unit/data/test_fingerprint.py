"""The fingerprint that tells a data set from another, and from itself after a change."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from toolkit.data.datasets import Augmented, InMemory
from toolkit.data.fingerprint import fingerprint
from toolkit.data.loader import Loader
from toolkit.ranks.batch import Share


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
    loader = Loader(dataset, global_batch_size=4, seed=0, share=Share(0, 2), split="blocks")
    assert loader.fingerprint() == "10 samples"
