"""The section strategy.pipeline of a config. It imports nothing of toolkit.config, which imports it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from toolkit.limits import Count, OneOf, Range


@dataclass
class PipelineConfig:
    """How micro-batches go through the stages of a pipeline."""

    #: gpipe keeps the activations of all micro-batches; interleaved idles less and sends more
    schedule: Annotated[str, OneOf("1f1b", "gpipe", "interleaved")] = "1f1b"
    micro_batches: Count | None = None  #: parts of a pipeline's samples; null: four for each rank of it, if so many fit
    split: list[str] = field(default_factory=list)  #: the layer that each stage but the first begins with; empty: even
    stages_per_rank: Annotated[int, Range(2, 1000)] = 2  #: with interleaved
