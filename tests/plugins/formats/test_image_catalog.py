from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.base.errors import DataMissingError, RequestError
from toolkit.config import DataConfig, catalog, load_config, validate
from toolkit.plugins.formats.images.catalog import fetch_command, files_of


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10"])
def test_a_missing_data_set_is_refused_with_the_command_that_fetches_it(name: str, tmp_path: Path) -> None:
    with pytest.raises(DataMissingError) as caught:
        catalog.check_datasets(DataConfig(name=name, root=str(tmp_path)))
    assert str(caught.value).startswith("data.root: ")
    assert f"\n    toolkit data fetch {name} --root {tmp_path}\n" in str(caught.value)
    assert "login node" in str(caught.value)


def test_the_command_survives_a_root_with_a_space(tmp_path: Path) -> None:
    assert fetch_command("mnist", tmp_path / "my data").endswith(f"--root '{tmp_path}/my data'")


def test_one_missing_file_is_named(tmp_path: Path) -> None:
    for path in files_of("mnist", tmp_path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    catalog.check_datasets(DataConfig(name="mnist", root=str(tmp_path)))
    gone = tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte"
    gone.unlink()
    with pytest.raises(DataMissingError, match=str(gone)):
        catalog.check_datasets(DataConfig(name="mnist", root=str(tmp_path)))


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
