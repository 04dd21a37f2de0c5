"""Which torch is installed, and what an older one lacks. It is read from the package, without importing torch.

What differs in calls only is in `toolkit.ranks.older_torch`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from importlib.util import find_spec

from toolkit.base.errors import ConfigError

OLDEST = (2, 6)
#: The first torch that has what a key asks for.
SINCE = {"optim.name: muon": (2, 9)}
#: The first torch that shards weights without a GPU.
SHARDS_ON_CPUS = "weights that are sharded on CPUs (strategy.name: fsdp, zero; strategy.mesh.shards)", (2, 8)


@cache
def installed() -> str | None:
    """Return the version as the package states it, ``2.7.0+rocm6.3``; None where no package of torch is installed."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def refuse_missing() -> None:
    """Raise ConfigError where this Python has no torch."""
    if installed() is None and "torch" not in sys.modules and find_spec("torch") is None:
        raise ConfigError(
            f"torch is not installed for {sys.executable}, and the ranks need it: install one that is built for the "
            "nodes (docs/site.md), or start this from the Python that has it"
        )


def refuse_older(asked: Iterable[tuple[str, tuple[int, int]]] = ()) -> None:
    """Raise ConfigError if torch is too old for the toolkit, or for one of what is ``asked``, with what that needs.

    A torch that is not installed here, or whose version is no number, is not refused.
    """
    version = installed() or ""
    # 2.7.0a0+79aa174.nv25.04 of a container counts as 2.7.
    found = re.match(r"(\d+)\.(\d+)", version)
    if not found:
        return
    have = int(found[1]), int(found[2])
    for what, since in (("torch", OLDEST), *asked):
        if have < since:
            raise ConfigError(f"{what}: needs torch {since[0]}.{since[1]} or newer, and {sys.prefix} has {version}")
