"""Files that seem to belong to other users: only root could give them away."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

STRANGER = 54321


def give(uid: int, paths: Iterable[Path], monkeypatch: pytest.MonkeyPatch, gid: int | None = None) -> None:
    """Let ``paths`` seem to belong to ``uid``, and to the group ``gid``. None: to their own."""
    plain = os.stat
    given = {plain(path, follow_symlinks=False).st_ino for path in paths}

    def stat(target: Any, *args: Any, **options: Any) -> os.stat_result:
        found = plain(target, *args, **options)
        if found.st_ino not in given:
            return found
        return os.stat_result((*found[:4], uid, found.st_gid if gid is None else gid, *found[6:]))

    monkeypatch.setattr(os, "stat", stat)
