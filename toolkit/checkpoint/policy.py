"""How often a save by time pays, and which checkpoints stay.

Young (1974) and Daly (2006): where a save costs C and failures come every M on average, the least time is lost by
saving every sqrt(2 C M). What the training waits for is C; what is written behind its back costs nothing but must be
done before the next one begins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from toolkit.checkpoint.manifest import Manifest
from toolkit.errors import ConfigError

#: Before a run has failed: once a day and run, which is what large clusters see with some hundred GPUs.
PRESUMED_S = 86_400.0
MOST_OVERHEAD = 0.01
SHORTEST_S = 10.0
FAILURES = ("crashed", "hang", "out_of_memory", "node_failure")


def interval_s(blocked_s: float, written_s: float, between_failures_s: float) -> float:
    """Seconds from one save to the next: Young's, but for 1 % of the time at the most, and not before the one is
    written."""
    best = math.sqrt(2 * blocked_s * between_failures_s)
    return max(best, blocked_s / MOST_OVERHEAD, 2 * written_s, SHORTEST_S)


def between_failures_s(attempts: Sequence[Mapping[str, Any]]) -> float:
    """Mean seconds between failures, from the run's own attempts and one failure a day that is presumed before them."""
    seconds = sum((_time(a["ended"]) - _time(a["started"])).total_seconds() for a in attempts)
    return (PRESUMED_S + seconds) / (1 + sum(a["cause"] in FAILURES for a in attempts))


def _time(text: str) -> datetime:
    return datetime.fromisoformat(text)


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay when a new one is committed: the ``newest`` so many, those of every step that ``every``
    divides, and the one that is ``best`` by a metric (``eval/accuracy``; ``-eval/loss``: the lowest)."""

    newest: int = 2
    every: int | None = None
    best: str | None = None

    def __post_init__(self) -> None:
        if self.newest < 2:
            raise ConfigError(
                f"checkpoint.keep: {self.newest} is too few: with one checkpoint, damage to it loses the run; "
                "set it to 2 or more"
            )

    def steps(self, manifests: Sequence[Manifest]) -> set[int]:
        """Of valid checkpoints, newest first, the steps of those that stay; the newest with finite weights always."""
        steps = [manifest.step for manifest in manifests]
        finite = [manifest.step for manifest in manifests if manifest.meta.get("finite", True)]
        stay = set(steps[: self.newest] + finite[:1]) | {
            step for step in steps if self.every and step % self.every == 0
        }
        # metrics of a step that was not evaluated itself are an earlier one's
        evaluated = [m for m in manifests if m.meta.get("evaluated") == m.step]
        figures = {m.step: self.figure(m.meta.get("metrics") or {}) for m in evaluated}
        ranked = sorted((-figure, step) for step, figure in figures.items() if figure is not None)
        return stay | {step for _, step in ranked[:1]}

    def figure(self, metrics: Mapping[str, Any]) -> float | None:
        """What a checkpoint with these metrics is worth, higher is better; None where the one that counts is missing or
        no number."""
        value = None if self.best is None else metrics.get(self.best.removeprefix("-"))
        if not isinstance(value, (int, float)) or math.isnan(value):
            return None
        return -value if str(self.best).startswith("-") else value
