"""Distributed PyTorch batch jobs on Slurm: submit from a login node, resume by themselves.

``from toolkit import submit`` is the Python door; ``toolkit --help`` lists the commands. Importing this package loads
neither torch nor submitit: names below are looked up on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["JobConfig", "Run", "TrainingRun", "load_config", "start", "submit"]

if TYPE_CHECKING:
    from toolkit.config import JobConfig, load_config
    from toolkit.launch.submit import Run, submit
    from toolkit.train.own_loop import TrainingRun, start

_HOMES = {
    "JobConfig": "toolkit.config",
    "load_config": "toolkit.config",
    "Run": "toolkit.launch.submit",
    "submit": "toolkit.launch.submit",
    "TrainingRun": "toolkit.train.own_loop",
    "start": "toolkit.train.own_loop",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
