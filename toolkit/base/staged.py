"""Finds the copies of shared files on this node's own disk, which ``TOOLKIT_STAGED`` names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

#: JSON: the path of each copy on this node, by the path that it is a copy of.
VARIABLE = "TOOLKIT_STAGED"


def staged(path: str | Path) -> Path:
    """Return the copy of ``path`` on this node's disk, or ``path`` if it has none::

    >>> toolkit.staged("/data/train.tar")
    PosixPath('/data/train.tar')
    """
    return moved(Path(path), _copies())


def origin(path: str | Path) -> Path:
    """Return what ``path`` is a copy of; ``path`` itself if it is no copy. Other nodes know only the original."""
    return moved(Path(path), {copy: source for source, copy in _copies().items()})


def environment(copies: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process that is to use ``copies``. Programs of a copied environment come first."""
    if not copies:
        return dict(environ)
    search: list[str] = []
    for folder in environ.get("PATH", "").split(os.pathsep):
        copy = moved(Path(folder), copies)
        search += [folder] if copy == Path(folder) else [str(copy), folder]
    return {**environ, VARIABLE: json.dumps(dict(copies)), "PATH": os.pathsep.join(search)}


def _copies() -> dict[str, str]:
    return dict(json.loads(os.environ.get(VARIABLE) or "{}"))


def moved(path: Path, places: Mapping[str, str]) -> Path:
    """Return ``path`` below its new place, or itself if no file is there. A copy may have been removed."""
    absolute = path.absolute()
    for old, new in places.items():
        if absolute.is_relative_to(old):
            copy = Path(new) / absolute.relative_to(old)
            if copy.exists():
                return copy
    return path
