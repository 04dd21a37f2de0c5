"""The section strategy.local_sgd of a config. It imports nothing of toolkit.config, which imports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from toolkit.limits import STEPS, Factor, Momentum, OneOf, Range, Steps


@dataclass
class LocalSgdConfig:
    """How often the ranks of ``strategy.name: local_sgd`` meet, and what they make of their weights then."""

    round_steps: Steps = 8  #: steps that each rank makes by itself
    after_steps: Annotated[int, Range(0, STEPS)] = 0  #: steps of ordinary ddp before the first round
    #: the mean of the weights; diloco: a step of an outer SGD towards it
    outer: Annotated[str, OneOf("average", "diloco")] = "average"
    outer_lr: Factor = 0.7  #: of diloco
    outer_momentum: Momentum = 0.9  #: of diloco
