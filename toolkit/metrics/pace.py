"""The ranks' own step times compared: what TensorBoard gets, and which nodes are stragglers.

A rank's own time of a step is the time that no other rank can lengthen: getting its data and the forward pass, up to
where the last backward pass begins to wait for the others' gradients. It shows a slow CPU, GPU, disk or loader. It does
not show a slow network, which makes both sides wait.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from functools import cache
from typing import Any

from toolkit.metrics.stragglers import Stragglers, usual_of
from toolkit.ranks.session import Session

#: In a larger world a curve for each rank would fill the event file, and no screen could show them.
MOST_CURVES = 64


class Pace:
    """Compares the ranks' own times of a step, on rank 0."""

    def __init__(self, session: Session) -> None:
        self.rank, self.world_size = session.rank, session.world_size
        # Each rank leaves its node's name in the store; rank 0 reads the names of slow ranks only.
        self._store = session.store
        self._store.set(_host_key(self.rank), os.environ.get("SLURMD_NODENAME") or socket.gethostname())
        self._stragglers = Stragglers(cache(self._host_of))

    def compare(self, own_s: Sequence[float]) -> dict[str, float]:
        """Return scalars that compare the ranks' own seconds a step. Empty for one rank, and on all but rank 0."""
        if self.rank != 0 or self.world_size == 1:
            return {}
        self._stragglers.update(own_s)
        slowest, usual = max(range(len(own_s)), key=own_s.__getitem__), usual_of(own_s)
        figures = {
            "world/own_step_s": usual,
            "world/slowest_rank": float(slowest),
            "world/slowest_ratio": own_s[slowest] / usual if usual else float("nan"),
        }
        if self.world_size <= MOST_CURVES:
            digits = len(str(self.world_size - 1))
            curves = {f"world_own_step_s/rank_{rank:0{digits}}": own for rank, own in enumerate(own_s) if own}
            figures |= curves
        return figures

    @property
    def stragglers(self) -> list[dict[str, Any]]:
        """Return the nodes that are or were slow for long."""
        return [straggler.to_json() for straggler in self._stragglers.named()]

    def _host_of(self, rank: int) -> str:
        return self._store.get(_host_key(rank)).decode()


def _host_key(rank: int) -> str:
    return f"toolkit/host/{rank}"
