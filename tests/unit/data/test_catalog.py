from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.base.errors import ConfigError, DataMissingError
from toolkit.config import DataConfig, catalog


def test_checking_files_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, toolkit.config.catalog; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_data_sets_without_files_are_always_there(name: str, tmp_path: Path) -> None:
    catalog.check_datasets(DataConfig(name=name, root=str(tmp_path / "none")))


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
def test_a_missing_data_set_is_refused_with_the_command_that_fetches_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataMissingError) as caught:
        catalog.check_datasets(DataConfig(name=name, root=str(tmp_path)))
    assert str(caught.value).startswith("data.root: ")
    assert f"\n    toolkit data fetch {name} --root {tmp_path}\n" in str(caught.value)
    assert "login node" in str(caught.value)


def test_the_command_survives_a_root_with_a_space(tmp_path: Path) -> None:
    assert catalog.fetch_command("mnist", tmp_path / "my data").endswith(f"--root '{tmp_path}/my data'")


def test_one_missing_file_is_named(tmp_path: Path) -> None:
    for file in catalog.CATALOG["mnist"].files:
        path = tmp_path / "MNIST" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    catalog.check_datasets(DataConfig(name="mnist", root=str(tmp_path)))
    gone = tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte"
    gone.unlink()
    with pytest.raises(DataMissingError, match=str(gone)):
        catalog.check_datasets(DataConfig(name="mnist", root=str(tmp_path)))


def test_root_is_the_config_then_the_environment_then_data_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TOOLKIT_DATA", raising=False)
    assert catalog.data_root(None) == tmp_path / "data"
    monkeypatch.setenv("TOOLKIT_DATA", "/shared/data")
    assert catalog.data_root(None) == Path("/shared/data")
    assert catalog.data_root("mine") == tmp_path / "mine"


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'mnist'"):
        catalog.entry_of("minst")


def test_an_image_folder_without_classes_is_told_its_layout(tmp_path: Path) -> None:
    with pytest.raises(DataMissingError, match=f"{tmp_path}/train/CLASS/IMAGE"):
        catalog.check_datasets(DataConfig(name="image_folder", root=str(tmp_path)))


def test_image_folders_whose_classes_differ_are_refused(tmp_path: Path) -> None:
    for folder in ("train/cat", "train/dog", "val/dog"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(DataMissingError, match="not in both: cat"):
        catalog.check_datasets(DataConfig(name="image_folder", root=str(tmp_path)))
    (tmp_path / "val/cat").mkdir()
    catalog.check_datasets(DataConfig(name="image_folder", root=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "image_size", "shape"),
    [("digits", None, (1, 8, 8)), ("digits", 32, (1, 32, 32)), ("image_folder", None, (3, 224, 224))],
)
def test_sample_shapes_follow_the_image_size(name: str, image_size: int | None, shape: tuple[int, int, int]) -> None:
    assert catalog.sample_shape(DataConfig(name=name, image_size=image_size)) == shape
