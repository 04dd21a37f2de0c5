from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.base.errors import ConfigError
from toolkit.config import DataConfig, catalog


def test_checking_files_loads_neither_torch_nor_numpy() -> None:
    code = "import sys, toolkit.config.catalog; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_data_sets_without_files_are_always_there(name: str, tmp_path: Path) -> None:
    catalog.check_datasets(DataConfig(name=name, root=str(tmp_path / "none")))


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
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        catalog.entry_of("digist")


@pytest.mark.parametrize(
    ("name", "image_size", "shape"),
    [("digits", None, (1, 8, 8)), ("digits", 32, (1, 32, 32)), ("synthetic", None, (3, 32, 32))],
)
def test_sample_shapes_follow_the_image_size(name: str, image_size: int | None, shape: tuple[int, int, int]) -> None:
    assert catalog.sample_shape(DataConfig(name=name, image_size=image_size)) == shape
