"""Files of MNIST, CIFAR-10 and image folders are written here and read through torchvision."""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.error import URLError

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn import functional

from toolkit.base.errors import ConfigError, DataMissingError, RequestError
from toolkit.cli.commands import data
from toolkit.config import DataConfig, dataset_catalog, load_config, validate
from toolkit.data.datasets import Datasets, build_datasets
from toolkit.data.loader import BatchedSamples, Loader, Samples
from toolkit.files import origin
from toolkit.plugins.formats.dataset_catalog import fetch_command, files_of
from toolkit.ranks.batch import Batch, Share
from toolkit.train import initial as weights


def all_of(dataset: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = dataset.batch(np.arange(len(dataset)))
    return inputs, targets


def first_batch(sets: Datasets, **more: Any) -> Batch:
    loader = Loader(sets.train, global_batch_size=4, seed=0, share=Share(0, 1), **more)
    batch = loader.at(0)
    loader.close()
    assert batch is not None
    return batch


def fetch(name: str, root: str | None = None) -> str:
    """Return what `toolkit data fetch` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        data.run(Namespace(verb="fetch", names=[name], root=root))
    return out.getvalue().rstrip("\n")


def images_of(seed: int, *shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    """Write the format of http://yann.lecun.com/exdb/mnist. Two zero bytes, type 8 (uint8), rank, sizes, values."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    path.write_bytes(header + values.tobytes())


def write_mnist(folder: Path) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Write 12 training and 5 eval images; return the training ones."""
    for part, count, seed in (("t10k", 5, 1), ("train", 12, 0)):
        images, labels = images_of(seed, count, 28, 28), (np.arange(count) % 10).astype(np.uint8)
        write_idx(folder / f"raw/{part}-images-idx3-ubyte", images)
        write_idx(folder / f"raw/{part}-labels-idx1-ubyte", labels)
    return images, labels


def write_cifar10(root: Path, monkeypatch: pytest.MonkeyPatch) -> NDArray[np.uint8]:
    """Write CIFAR-10's batches with 4 images each, as the data set's page describes them.

    Their MD5 sums are put into torchvision. Returns all images.
    """
    from torchvision.datasets import CIFAR10

    folder = root / "cifar-10-batches-py"
    folder.mkdir()

    def write(name: str, content: dict[str, Any]) -> list[str]:
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return [name, hashlib.md5(data).hexdigest()]

    rows = images_of(3, 24, 3072)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    sums = [
        write(name, {"data": rows[4 * number : 4 * number + 4], "labels": [number % 10, 1, 2, 3]})
        for number, name in enumerate(names)
    ]
    name, md5 = write("batches.meta", {"label_names": [str(digit) for digit in range(10)]})
    monkeypatch.setattr(CIFAR10, "train_list", sums[:5])
    monkeypatch.setattr(CIFAR10, "test_list", sums[5:])
    monkeypatch.setattr(CIFAR10, "meta", {"filename": name, "key": "label_names", "md5": md5})
    return rows.reshape(-1, 3, 32, 32)


def write_image_folder(root: Path, size: int = 40) -> None:
    for number, name in enumerate(("train/cat", "train/dog", "val/cat", "val/dog")):
        (root / name).mkdir(parents=True)
        for index in range(3):
            Image.fromarray(images_of(10 * number + index, size, size, 3)).save(root / name / f"{index}.png")


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST")])
def test_mnist_files_become_tensors_read_at_once(name: str, folder: str, tmp_path: Path) -> None:
    images, labels = write_mnist(tmp_path / folder)
    sets = build_datasets(DataConfig(name=name, root=str(tmp_path)))
    assert (len(sets.train), len(sets.eval), sets.classes, sets.sample_shape) == (12, 5, 10, (1, 28, 28))
    assert isinstance(sets.train, BatchedSamples)
    inputs, targets = all_of(sets.train)
    mean, std = {"mnist": (0.1307, 0.3081), "fashion_mnist": (0.2860, 0.3530)}[name]
    expected = (torch.from_numpy(images).float() / 255 - mean) / std
    torch.testing.assert_close(inputs, expected.unsqueeze(1), atol=1e-5, rtol=0)
    assert targets.tolist() == labels.tolist()


def test_broken_mnist_files_are_reported_with_the_way_out(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST")
    (tmp_path / "MNIST/raw/train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03" + bytes(12) + b"cut")
    with pytest.raises(DataMissingError, match=r"as they were published(?s:.)*toolkit data fetch mnist --root"):
        build_datasets(DataConfig(name="mnist", root=str(tmp_path)))


def test_images_are_resized_to_the_size_asked_for(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST")
    plain = build_datasets(DataConfig(name="mnist", root=str(tmp_path)))
    large = build_datasets(DataConfig(name="mnist", root=str(tmp_path), image_size=32))
    assert large.sample_shape == tuple(first_batch(large).inputs.shape[1:]) == (1, 32, 32)
    expected = functional.interpolate(all_of(plain.eval)[0], size=(32, 32), mode="bilinear")
    torch.testing.assert_close(all_of(large.eval)[0], expected)


def test_cifar10_batches_become_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = write_cifar10(tmp_path, monkeypatch)
    sets = build_datasets(DataConfig(name="cifar10", root=str(tmp_path)))
    assert (len(sets.train), len(sets.eval), sets.classes, sets.sample_shape) == (20, 4, 10, (3, 32, 32))
    inputs, targets = all_of(sets.train)
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    expected = (torch.from_numpy(rows[:20]).float() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(inputs, expected, atol=1e-5, rtol=0)
    assert targets.tolist()[:8] == [0, 1, 2, 3, 1, 1, 2, 3]


def test_a_damaged_cifar10_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cifar10(tmp_path, monkeypatch)
    with (tmp_path / "cifar-10-batches-py/data_batch_2").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataMissingError, match=r"toolkit data fetch cifar10 --root .*/published\n") as refused:
        build_datasets(DataConfig(name="cifar10", root=str(tmp_path)))
    assert "emove" not in str(refused.value), "they may be the user's own"


@pytest.mark.parametrize("content", [b"", b"text", None], ids=["empty", "text", "torn"])
def test_a_picture_that_cannot_be_read_is_named_by_its_path(tmp_path: Path, content: bytes | None) -> None:
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
        Image.fromarray(np.random.default_rng(1).integers(0, 255, (64, 64, 3), np.uint8)).save(
            tmp_path / split / "cat/one.png"
        )
    path = tmp_path / "train/cat/one.png"
    path.write_bytes(path.read_bytes()[:3000] if content is None else content)
    sets = build_datasets(DataConfig(name="image_folder", root=str(tmp_path)))
    with pytest.raises(OSError, match=f"{path} is not a complete image"):
        cast(Any, sets.train)[0]


@pytest.mark.parametrize("name", ["cifar10", "image_folder"])
def test_augmentation_depends_on_the_position_alone_and_not_on_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "cifar10":
        write_cifar10(tmp_path, monkeypatch)
    else:
        write_image_folder(tmp_path)
    config = DataConfig(name=name, root=str(tmp_path), image_size=None if name == "cifar10" else 28)
    sets, plain = (build_datasets(replace(config, augment=augment)) for augment in (True, False))
    inline, worked, still = first_batch(sets), first_batch(sets, workers=1), first_batch(plain)
    assert torch.equal(inline.inputs, worked.inputs)
    assert torch.equal(inline.targets, still.targets)
    assert not torch.equal(inline.inputs, still.inputs)
    assert inline.inputs.shape == (4, *sets.sample_shape)


def test_an_image_folder_is_read_and_cut_to_size(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    sets = build_datasets(DataConfig(name="image_folder", root=str(tmp_path), image_size=28))
    assert (len(sets.train), len(sets.eval), sets.classes, sets.sample_shape) == (6, 6, 2, (3, 28, 28))
    batch = first_batch(sets)
    assert (batch.inputs.shape, batch.inputs.dtype) == ((4, 3, 28, 28), torch.float32)
    assert torch.equal(batch.inputs, first_batch(sets).inputs)


def test_evaluation_images_are_normalised_centre_crops(tmp_path: Path) -> None:
    write_image_folder(tmp_path, size=32)  # 28 * 256 / 224: nothing to resize, so the crop can be checked by hand
    sets = build_datasets(DataConfig(name="image_folder", root=str(tmp_path), image_size=28))
    pixels = torch.from_numpy(images_of(20, 32, 32, 3)[2:30, 2:30]).permute(2, 0, 1) / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(cast(Samples, sets.eval)[0][0], (pixels - mean.view(3, 1, 1)) / std.view(3, 1, 1))


def test_what_comes_in_at_the_edge_of_a_shifted_image_is_black(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not 0, which after the normalisation is a grey."""
    write_cifar10(tmp_path, monkeypatch)
    for name in ("digits", "cifar10"):
        train: Any = build_datasets(DataConfig(name=name, root=str(tmp_path), augment=True)).train
        black, shifted = train._dataset.background, torch.stack([train[0][0] for _ in range(40)])
        assert (black < -0.8).all()
        edges = shifted[..., 0, :] == black[..., 0]
        assert edges.all(1).all(1).any(), f"{name}: of 40 images some have moved down"


def fake_download(monkeypatch: pytest.MonkeyPatch, write: Any) -> None:
    from torchvision.datasets import MNIST

    def download(_: MNIST, root: Any, train: bool = True, download: bool = False) -> None:
        assert download
        print("Downloading")
        write(Path(root) / "MNIST")

    monkeypatch.setattr(MNIST, "__init__", download)


def test_fetch_moves_a_whole_download_into_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_download(monkeypatch, write_mnist)
    assert fetch("mnist", str(tmp_path / "new")) == f"mnist is in {tmp_path}/new/MNIST"
    assert capsys.readouterr().out == ""  # stdout belongs to the command
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["MNIST"]
    monkeypatch.undo()
    assert len(build_datasets(DataConfig(name="mnist", root=str(tmp_path / "new"))).train) == 12
    assert fetch("mnist", str(tmp_path / "new")).endswith("already")


def test_fetch_without_internet_says_what_was_tried_and_what_to_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> None:
        write_idx(folder / "raw/train-labels-idx1-ubyte", np.zeros(3, np.uint8))
        raise URLError("Network is unreachable")

    fake_download(monkeypatch, fail)
    with pytest.raises(DataMissingError) as caught:
        fetch("mnist", str(tmp_path))
    for part in ("https://", "Network is unreachable", f"{tmp_path}/MNIST/raw/t10k-images-idx3-ubyte"):
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []  # half a download is no data set


WEIGHTS = "ResNet18_Weights.IMAGENET1K_V1"


def test_published_weights_are_fetched_checked_and_found_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"fc.weight": torch.ones(2, 3)}, tmp_path / "made.pth")
    digest = hashlib.sha256((tmp_path / "made.pth").read_bytes()).hexdigest()
    served = (tmp_path / "made.pth").rename(tmp_path / f"resnet18-{digest[:8]}.pth")
    monkeypatch.setenv("TOOLKIT_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("torchvision.models.get_weight", lambda name: SimpleNamespace(url=served.as_uri()))
    with pytest.raises(ConfigError, match=rf"toolkit data fetch {WEIGHTS} --root {tmp_path}/data"):
        origin.find(WEIGHTS)
    assert fetch(WEIGHTS) == f"{WEIGHTS} is in {tmp_path}/data/weights/{WEIGHTS}.pth"
    assert torch.equal(weights.read_weights(origin.find(WEIGHTS)).tensors["fc.weight"], torch.ones(2, 3))
    assert fetch(WEIGHTS).endswith("already")


def test_damaged_weights_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = tmp_path / "resnet18-00000000.pth"
    served.write_bytes(b"half of it")
    monkeypatch.setattr("torchvision.models.get_weight", lambda name: SimpleNamespace(url=served.as_uri()))
    with pytest.raises(DataMissingError, match="invalid hash value"):
        fetch(WEIGHTS, str(tmp_path / "data"))
    assert list((tmp_path / "data/weights").iterdir()) == []


def test_weights_that_torchvision_does_not_have_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="torchvision has no weights ResNet19_Weights"):
        fetch("ResNet19_Weights.IMAGENET1K_V1", str(tmp_path))


def test_fetch_does_not_touch_an_incomplete_data_set(tmp_path: Path) -> None:
    write_mnist(tmp_path / "MNIST")
    (tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(RequestError, match="incomplete; to download all of it elsewhere"):
        fetch("mnist", str(tmp_path))


def test_fetch_cannot_fetch_an_image_folder(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="train/CLASS/IMAGE"):
        fetch("image_folder", str(tmp_path))


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_fetch_says_where_nothing_is_to_be_fetched(name: str, tmp_path: Path) -> None:
    assert "nothing to fetch" in fetch(name, str(tmp_path))


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
def test_a_missing_data_set_is_refused_with_the_command_that_fetches_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataMissingError) as caught:
        dataset_catalog.check_datasets(DataConfig(name=name, root=str(tmp_path)))
    assert str(caught.value).startswith("data.root: ")
    assert f"\n    toolkit data fetch {name} --root {tmp_path}\n" in str(caught.value)
    assert "login node" in str(caught.value)


def test_the_command_survives_a_root_with_a_space(tmp_path: Path) -> None:
    assert fetch_command("mnist", tmp_path / "my data").endswith(f"--root '{tmp_path}/my data'")


def test_one_missing_file_is_named(tmp_path: Path) -> None:
    for path in files_of("mnist", tmp_path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    dataset_catalog.check_datasets(DataConfig(name="mnist", root=str(tmp_path)))
    gone = tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte"
    gone.unlink()
    with pytest.raises(DataMissingError, match=str(gone)):
        dataset_catalog.check_datasets(DataConfig(name="mnist", root=str(tmp_path)))


def test_an_image_folder_without_classes_is_told_its_layout(tmp_path: Path) -> None:
    with pytest.raises(DataMissingError, match=f"{tmp_path}/train/CLASS/IMAGE"):
        dataset_catalog.check_datasets(DataConfig(name="image_folder", root=str(tmp_path)))


def test_image_folders_whose_classes_differ_are_refused(tmp_path: Path) -> None:
    for folder in ("train/cat", "train/dog", "val/dog"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(DataMissingError, match="not in both: cat"):
        dataset_catalog.check_datasets(DataConfig(name="image_folder", root=str(tmp_path)))
    (tmp_path / "val/cat").mkdir()
    dataset_catalog.check_datasets(DataConfig(name="image_folder", root=str(tmp_path)))


def test_a_missing_data_set_says_where_its_folder_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusal() -> str:
        with pytest.raises(RequestError) as caught:
            validate(load_config(None, ["data.name=mnist"]))
        assert caught.value.exit_code == 2
        return str(caught.value)

    monkeypatch.setenv("TOOLKIT_DATA", "/no/data")
    assert "is not in /no/data (TOOLKIT_DATA): " in refusal()
    assert "toolkit data fetch mnist" in refusal()
    monkeypatch.setenv("TOOLKIT_DATA", "~nobody9/x")
    assert refusal() == "data.root: there is no user whose home folder '~nobody9/x' could be in"
