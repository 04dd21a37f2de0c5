"""A folder from which every shipped config is valid, without site defaults of a user."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def in_project(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TOOLKIT_SITE", raising=False)
    monkeypatch.delenv("TOOLKIT_DATA", raising=False)
