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
#: What an older torch lacks, and the first one that has it.
MUON, TENSOR = ("optim.name: muon", (2, 9)), ("strategy.name: tensor", (2, 7))
#: Over gloo older ones sum gradients where FSDP asks for the mean.
SHARDS_ON_CPUS = "weights that are sharded on CPUs (strategy.name: fsdp, zero; strategy.mesh.shards)", (2, 9)


@cache
def installed() -> str | None:
    """Return the version as the package states it, ``2.7.0+rocm6.3``; None where no package of torch is installed."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def is_before(version: tuple[int, int]) -> bool:
    """True if an older torch is installed. 2.7.0a0+79aa174.nv25.04 of a container counts as 2.7."""
    found = re.match(r"(\d+)\.(\d+)", installed() or "")
    return found is not None and (int(found[1]), int(found[2])) < version


def refuse_missing(package: str = "torch", what: str = "the ranks", extra: str | None = None) -> None:
    """Raise ConfigError where this Python lacks a package, which an ``extra`` of the toolkit installs."""
    if sys.modules.get(package) is None and find_spec(package) is None:
        how = f"pip install 'slurm-batch-toolkit[{extra}]'" if extra else "install one that is built for the nodes"
        raise ConfigError(
            f"{package} is not installed for {sys.executable}, and {what} need it: {how} (docs/site.md), or install "
            "the toolkit in the Python that has it, a script's own for example, and start this from there"
        )


def refuse_older(asked: Iterable[tuple[str, tuple[int, int]]] = ()) -> None:
    """Raise ConfigError if torch is too old for the toolkit, or for one of what is ``asked``, with what that needs.

    A torch that is not installed here, or whose version is no number, is not refused.
    """
    for what, since in (("torch", OLDEST), *asked):
        if is_before(since):
            raise ConfigError(f"{what}: needs torch {since[0]}.{since[1]} or newer, and {sys.prefix} has {installed()}")
