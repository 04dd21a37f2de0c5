"""The tests of plugins start as unit tests do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.conftest import (  # noqa: F401
    cache_folder_of_its_own,
    cache_folders,
    log_as_at_the_start,
    no_modules_of_earlier_tests,
    pytest_collection_finish,
    tmp_path,
)
from toolkit import registry

#: Plugins that a plugin works with: what its tests show is both together.
BESIDE: dict[str, tuple[str, ...]] = {
    "after": ("disk", "init_from", "sweep", "why"),
    "completion": ("checkpoints", "disk", "hangs", "images", "sweep", "tokens", "why"),
    "inference": ("after", "checkpoints", "init_from"),
    "pipeline": ("tokens",),
    "report": ("monitor", "why"),
    "site": ("spares",),
    "sweep": ("after", "completion", "disk", "inference", "logs", "why"),
    "tensor": ("tokens",),
    "topology": ("spares",),
    "watch": ("sweep",),
}


@pytest.fixture(autouse=True)
def plugin_alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave beside the core the plugin whose folder the test is in, and those that it is made for."""
    name = request.path.relative_to(Path(__file__).parent).parts[0]
    monkeypatch.setattr(registry, "BUILT_IN", tuple(sorted({name, *BESIDE.get(name, ())})))
    registry.built_in.cache_clear(), registry.plugins.cache_clear()
    yield
    registry.built_in.cache_clear(), registry.plugins.cache_clear()
