"""Distributed PyTorch batch jobs on Slurm: submit from a login node, resume by themselves.

``from toolkit import submit`` is the way in from Python; ``toolkit --help`` lists the commands. Importing this package
loads neither torch nor submitit: the names below are looked up on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "ConfigError",
    "Custom",
    "Dataset",
    "Forward",
    "Gathered",
    "Job",
    "JobConfig",
    "Loss",
    "PairMixing",
    "RawTokens",
    "Run",
    "ShardedData",
    "Share",
    "Streams",
    "TokenWindows",
    "TrainingRun",
    "build_datasets",
    "current",
    "find",
    "load_config",
    "load_tokens",
    "runs",
    "staged",
    "start",
    "submit",
]

if TYPE_CHECKING:
    from toolkit.base.errors import ConfigError
    from toolkit.base.staged import staged
    from toolkit.config import JobConfig, load_config
    from toolkit.data.datasets import Dataset, build_datasets
    from toolkit.plugins.formats.images.photographs import PairMixing
    from toolkit.plugins.formats.shards.dataset import ShardedData
    from toolkit.plugins.formats.shards.raw_tokens import RawTokens
    from toolkit.plugins.formats.streams import Streams
    from toolkit.plugins.formats.tokens.windows import TokenWindows, load_tokens
    from toolkit.ranks.batch import Batch, Share
    from toolkit.run.submission.handle import Run, find, runs
    from toolkit.run.submission.submit import submit
    from toolkit.strategies import Custom
    from toolkit.strategies.objective import Forward, Gathered, Loss
    from toolkit.train.job import Job
    from toolkit.train.start import current, start
    from toolkit.train.user_loop import TrainingRun

_MODULES = {
    "toolkit.base.errors": ("ConfigError",),
    "toolkit.base.staged": ("staged",),
    "toolkit.config": ("JobConfig", "load_config"),
    "toolkit.data.datasets": ("Dataset", "build_datasets"),
    "toolkit.plugins.formats.images.photographs": ("PairMixing",),
    "toolkit.plugins.formats.shards.dataset": ("ShardedData",),
    "toolkit.plugins.formats.shards.raw_tokens": ("RawTokens",),
    "toolkit.plugins.formats.streams": ("Streams",),
    "toolkit.plugins.formats.tokens.windows": ("TokenWindows", "load_tokens"),
    "toolkit.ranks.batch": ("Batch", "Share"),
    "toolkit.run.submission.handle": ("Run", "find", "runs"),
    "toolkit.run.submission.submit": ("submit",),
    "toolkit.strategies": ("Custom",),
    "toolkit.strategies.objective": ("Forward", "Loss", "Gathered"),
    "toolkit.train.job": ("Job",),
    "toolkit.train.start": ("current", "start"),
    "toolkit.train.user_loop": ("TrainingRun",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names. Without it a shell's completion shows what is imported here instead."""
    return [*__all__, "__version__"]
