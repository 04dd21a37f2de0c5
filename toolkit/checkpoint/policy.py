"""How often a save by time pays off, and which checkpoints are kept.

Young (1974) and Daly (2006): where a save costs C and failures come every M on average, the least time is lost by
saving every sqrt(2 C M). C is the time that the training waits. Writing in the background costs nothing, but must be
done before the next save begins.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.base.errors import ConfigError
from toolkit.checkpoint.manifest import Manifest
from toolkit.files.run_files import AttemptRecord

#: Presumed before a run has failed: one failure a day and run, which large clusters see with some hundred GPUs.
PRESUMED_S = 86_400.0
MOST_OVERHEAD = 0.01
SHORTEST_S = 10.0
FAILURES = ("crashed", "hang", "out_of_memory", "node_failure")


def interval_s(blocked_s: float, written_s: float, between_failures_s: float) -> float:
    """Return the seconds from one save to the next, by Young's formula.

    Saving takes at most 1 % of the time, and no save begins before the last one is written.
    """
    best = math.sqrt(2 * blocked_s * between_failures_s)
    return max(best, blocked_s / MOST_OVERHEAD, 2 * written_s, SHORTEST_S)


def steps_between_copies(copy_s: float, background_s: float, step_s: float) -> int:
    """Return the steps from one copy in memory to the next.

    Copying takes at most 1 % of the time, and no copy begins before the last one is complete.
    """
    if step_s <= 0:
        return 1
    return max(1, math.ceil(copy_s / (MOST_OVERHEAD * step_s)), math.ceil(2 * background_s / step_s))


class CopyClock:
    """The steps at which the state is copied into memory.

    They are every N steps, or with ``auto`` as often as is cheap. The seconds of all ranks are added up at each copy,
    and from the sums each rank computes the same next step.
    """

    def __init__(self, every: int | str) -> None:
        self.is_auto = every == "auto"
        self._every = 1 if isinstance(every, str) else every
        self._next = 0  #: for auto: the step at which the next copy is due
        self._last_step: int | None = None
        self._last_s = self._copy_s = 0.0  #: when the last copy had been made, and how long the training waited for it

    def is_due(self, step: int) -> bool:
        """True if the state is to be copied after ``step`` steps."""
        return step >= self._next if self.is_auto else step % self._every == 0

    def figures(self, step: int, began_s: float, background_s: float) -> dict[str, float]:
        """Return the figures that the ranks add up before the copy of ``step``.

        The copy began at ``began_s`` of any one clock. ``background_s``: how long the previous copy took to be
        complete.
        """
        steps = 0 if self._last_step is None else step - self._last_step
        step_s = (began_s - self._last_s) / steps if steps else 0.0
        return dict(zip(_FIGURES, (self._copy_s, background_s, step_s), strict=True))

    def agree(self, step: int, sums: Mapping[str, float]) -> int | None:
        """Set the next step from all ranks' sums. Return the new distance in steps if it has changed."""
        if not self.is_auto:
            return None
        before = self._every
        copy_s, background_s, step_s = (sums[name] for name in _FIGURES)
        self._every = steps_between_copies(copy_s, background_s, step_s)
        self._next = step + self._every
        return self._every if self._every != before else None

    def copied(self, step: int, copy_s: float, now_s: float) -> None:
        """Record that the training waited ``copy_s`` for the copy of ``step``, until ``now_s``."""
        self._last_step, self._copy_s, self._last_s = step, copy_s, now_s


_FIGURES = ("copy_s", "background_s", "step_s")


def between_failures_s(attempts: Sequence[AttemptRecord]) -> float:
    """Return the mean seconds between failures of the attempts. One failure, after a day, is presumed before them."""
    # A clock that was set back would give an attempt less than no time.
    seconds = sum(max(0.0, attempt.ended - attempt.started) for attempt in attempts)
    return (PRESUMED_S + seconds) / (1 + sum(attempt.cause in FAILURES for attempt in attempts))


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay when a new one is committed.

    The ``newest`` N stay, those of every step that ``every`` divides, and the one that is ``best`` by a metric
    (``eval/accuracy``; ``-eval/loss``: the lowest).
    """

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
        """Return the steps to keep of valid checkpoints, newest first.

        The newest with finite weights always stays, and the newest that a rollback may go back to.
        """
        steps = [manifest.step for manifest in manifests]
        finite = [manifest.step for manifest in manifests if manifest.meta.get("finite", True)]
        # Stops save inside a row of skipped steps, too; a rollback needs one from before the row.
        in_a_row = [(manifest.meta.get("skipped_steps") or {}).get("waits", False) for manifest in manifests]
        settled = [step for step, waits in zip(steps, in_a_row, strict=True) if not waits]
        stay = {*steps[: self.newest], *finite[:1], *settled[:1]}
        if self.every:
            stay |= {step for step in steps if step % self.every == 0}
        best = self.best_of(manifests)
        return stay if best is None else {*stay, best}

    def best_of(self, manifests: Iterable[Manifest]) -> int | None:
        """Return the step of the best one that was evaluated; None: none was. Of equals it is the oldest."""
        ranked: list[tuple[float, int]] = []
        for manifest in manifests:
            figure = self.figure(manifest.meta.get("metrics") or {})
            # The metrics in a checkpoint whose own step was not evaluated are an earlier step's.
            if figure is not None and manifest.meta.get("evaluated") == manifest.step:
                ranked.append((-figure, manifest.step))
        return min(ranked)[1] if ranked else None

    def figure(self, metrics: Mapping[str, Any]) -> float | None:
        """Return what a checkpoint with these metrics is worth; higher is better.

        None where the metric that counts is missing or not a number.
        """
        value = None if self.best is None else metrics.get(self.best.removeprefix("-"))
        if not isinstance(value, (int, float)) or math.isnan(value):
            return None
        return -value if str(self.best).startswith("-") else value
