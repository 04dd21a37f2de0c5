"""The keys that a run may change while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.config.schema import JobConfig

#: These take effect between two steps, and nothing has to be built anew.
LIVE = (
    *("optim.lr", "optim.min_lr"),
    *("train.log_every", "train.eval_every"),
    *("checkpoint.every_steps", "checkpoint.every_min", "checkpoint.keep", "checkpoint.keep_every"),
)
#: A loop of one's own has its own learning rate and its own evaluations.
LIVE_IN_OWN_LOOPS = tuple(key for key in LIVE if key != "train.eval_every" and not key.startswith("optim."))


def set_values(config: JobConfig, values: Mapping[str, Any]) -> None:
    """Set ``values`` by key, all of them of ``LIVE``."""
    for key, value in values.items():
        section, name = key.split(".")
        setattr(getattr(config, section), name, value)
