"""How much of a disk in memory copies may take."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.base import this_node
from toolkit.plugins.staging import room


def test_copies_take_half_of_the_memory_that_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(this_node, "file_system", lambda folder: "tmpfs")
    monkeypatch.setattr(this_node, "available_bytes", lambda: 1000)
    assert room.room_bytes(tmp_path) == 500
