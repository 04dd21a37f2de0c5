"""Builds the layout of ddp with ``strategy.compression``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from toolkit.config import STATELESS, StrategyConfig, TrainConfig
from toolkit.plugins.compression.compressed import Compressed
from toolkit.plugins.compression.overlapped import Overlapped
from toolkit.ranks.session import Session
from toolkit.strategies.layouts import Layout


def build(config: StrategyConfig, session: Session, train: TrainConfig, how: dict[str, Any]) -> Layout:
    """Return the layout. ``how`` is what all layouts take."""
    # NCCL's collectives are only enqueued. What keeps nothing for the next step is sent during the backward pass then.
    keeps_nothing = config.compression in STATELESS and not config.compression_layers
    if keeps_nothing and dist.get_backend() == "nccl":
        how |= {"channels_last": train.channels_last, "find_unused": config.find_unused}
        return Overlapped(session, compression=config.compression, **how)
    return Compressed(session, config=config, channels_last=train.channels_last, **how)
