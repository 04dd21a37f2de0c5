"""Files that seem to belong to other users: only root could give them away."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

STRANGER = 54321


def give(uid: int, paths: Iterable[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``paths`` seem to belong to ``uid``."""
    plain = os.stat
    given = {plain(path, follow_symlinks=False).st_ino for path in paths}

    def stat(target: Any, *args: Any, **options: Any) -> os.stat_result:
        found = plain(target, *args, **options)
        return os.stat_result((*found[:4], uid, *found[5:])) if found.st_ino in given else found

    monkeypatch.setattr(os, "stat", stat)
