"""What torch here is built for."""

from __future__ import annotations

import pytest
import torch

from toolkit import registry
from toolkit.devices import accelerator, kinds


def test_plugins_are_not_searched_for_a_kind_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search of the installed packages would be made by every rank at its start."""
    monkeypatch.setattr(accelerator, "_built_for", lambda: torch.device("xpu"))
    monkeypatch.setattr(registry, "find", lambda *words: pytest.fail(f"searched for {words}"))
    accelerator.built_for.cache_clear()
    try:
        assert accelerator.built_for() is kinds.XPU
    finally:
        accelerator.built_for.cache_clear()
