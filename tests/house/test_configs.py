"""The configs that come with the toolkit."""

from pathlib import Path

import pytest

from tests.pages import ROOT
from toolkit.config import load_config, may_resume_with, validate


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_config_is_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.config.validation.check_datasets", lambda config: None)  # fetched on the login node
    monkeypatch.chdir(ROOT)
    validate(load_config(path, site=False))


def test_the_recipe_is_valid_with_a_folder_of_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for split in ("train", "val"):
        (tmp_path / split / "cat").mkdir(parents=True)
    validate(load_config("configs/imagenet_resnet50.yaml", [f"data.root={tmp_path}"], site=False))


@pytest.mark.parametrize("strategy", ["pipeline", "auto", "local_sgd", "parameter_server"])
def test_a_run_of_ddp_goes_on_with_a_strategy_of_a_plugin(strategy: str) -> None:
    assert may_resume_with("strategy.name", "ddp", strategy)
