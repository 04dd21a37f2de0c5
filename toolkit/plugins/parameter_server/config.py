"""The section strategy.parameter_server of a config. It imports nothing of toolkit.config, which imports it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from toolkit.limits import MANY, Count, OneOf, Range


@dataclass
class ParameterServerConfig:
    """Of ``strategy.name: parameter_server``: the first ranks are servers, the others workers."""

    servers: Count = 1  #: ranks that hold the weights; all others compute gradients
    #: async: each worker's gradient is applied as it comes; bounded: within limits, see staleness
    mode: Annotated[str, OneOf("sync", "async", "bounded")] = "sync"
    staleness: Annotated[int, Range(0, MANY)] = 4  #: with bounded: so many shares a worker may be ahead of the slowest
