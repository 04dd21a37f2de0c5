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
    "Job",
    "JobConfig",
    "Loss",
    "PairMixing",
    "RawTokens",
    "Rows",
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
    from toolkit.strategies.objective import Forward, Loss, Rows
    from toolkit.train.job import Job
    from toolkit.train.start import current, start
    from toolkit.train.user_loop import TrainingRun

_HOMES = {
    "Batch": "toolkit.ranks.batch",
    "ConfigError": "toolkit.base.errors",
    "Custom": "toolkit.strategies",
    "Dataset": "toolkit.data.datasets",
    "Forward": "toolkit.strategies.objective",
    "Job": "toolkit.train.job",
    "JobConfig": "toolkit.config",
    "Loss": "toolkit.strategies.objective",
    "PairMixing": "toolkit.plugins.formats.images.photographs",
    "RawTokens": "toolkit.plugins.formats.shards.raw_tokens",
    "Rows": "toolkit.strategies.objective",
    "Run": "toolkit.run.submission.handle",
    "ShardedData": "toolkit.plugins.formats.shards.dataset",
    "Share": "toolkit.ranks.batch",
    "Streams": "toolkit.plugins.formats.streams",
    "TokenWindows": "toolkit.plugins.formats.tokens.windows",
    "TrainingRun": "toolkit.train.user_loop",
    "build_datasets": "toolkit.data.datasets",
    "current": "toolkit.train.start",
    "find": "toolkit.run.submission.handle",
    "load_config": "toolkit.config",
    "load_tokens": "toolkit.plugins.formats.tokens.windows",
    "runs": "toolkit.run.submission.handle",
    "staged": "toolkit.base.staged",
    "start": "toolkit.train.start",
    "submit": "toolkit.run.submission.submit",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """Return the public names. Without it a shell's completion shows what is imported here instead."""
    return [*__all__, "__version__"]
