"""pipeline: each rank has some of the model's layers, see :mod:`.strategy`."""

from toolkit.strategies.pipeline.strategy import Pipeline

__all__ = ["Pipeline"]
