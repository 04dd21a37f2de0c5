"""The configs that come with the toolkit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import ROOT
from toolkit.config import load_config, validate


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_config_is_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.config.validation.check_datasets", lambda config: None)  # fetched on the login node
    monkeypatch.chdir(ROOT)
    validate(load_config(path, site=False))
