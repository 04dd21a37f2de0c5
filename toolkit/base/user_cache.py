"""The user's cache folder, for what can be thrown away at any time."""

from __future__ import annotations

import os
from pathlib import Path

from toolkit.base import fsio, trust


def cache_dir() -> Path | None:
    """Return this user's cache folder, made with mode 0700.

    None if it cannot be written, or if others may change it.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = fsio.expand(base) / "slurm-batch-toolkit"
    try:
        if not folder.is_absolute() or trust.reason_against(fsio.make_dir(folder)) is not None:
            return None
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None
