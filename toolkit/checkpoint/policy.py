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


def steps_between_copies(copy_s: float, background_s: float, step_s: float) -> int:
    """Steps from one copy in memory to the next: 1 % of the time at the most, and not before the one is complete."""
    if step_s <= 0:
        return 1
    return max(1, math.ceil(copy_s / (MOST_OVERHEAD * step_s)), math.ceil(2 * background_s / step_s))


class CopyClock:
    """At which steps the state is copied into memory: every so many, or for ``auto`` as often as is cheap.

    The seconds of all ranks are added up at each copy, and from the sums each rank finds the same next step.
    """

    def __init__(self, every: int | str) -> None:
        self.is_auto = every == "auto"
        self._every = 1 if isinstance(every, str) else every
        self._next = 0  #: for auto: the step that the next copy is due at
        self._last_step: int | None = None
        self._last_s = self._copy_s = 0.0  #: when the last copy had been made, and how long the training waited for it

    def is_due(self, step: int) -> bool:
        """Whether the state is to be copied after ``step`` steps."""
        return step >= self._next if self.is_auto else step % self._every == 0

    def figures(self, step: int, began_s: float, background_s: float) -> dict[str, float]:
        """Return what the ranks are to add up before the copy of ``step``, which began at ``began_s``, of any clock.

        ``background_s``: how long the copy before took to be complete.
        """
        steps = 0 if self._last_step is None else step - self._last_step
        step_s = (began_s - self._last_s) / steps if steps else 0.0
        return dict(zip(_FIGURES, (self._copy_s, background_s, step_s), strict=True))

    def agree(self, step: int, sums: Mapping[str, float]) -> int | None:
        """Set the next step from all ranks' figures; return the new number of steps between two if it is another."""
        if not self.is_auto:
            return None
        before, self._every = self._every, steps_between_copies(*(sums[name] for name in _FIGURES))
        self._next = step + self._every
        return self._every if self._every != before else None

    def copied(self, step: int, copy_s: float, now_s: float) -> None:
        """Take that the training waited ``copy_s`` for the copy of ``step``, until now."""
        self._last_step, self._copy_s, self._last_s = step, copy_s, now_s


_FIGURES = ("copy_s", "background_s", "step_s")


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
