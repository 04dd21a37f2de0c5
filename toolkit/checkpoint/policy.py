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
MAX_OVERHEAD = 0.01
SHORTEST_S = 10.0
FAILURES = ("crashed", "hang", "out_of_memory", "node_failure")


def interval_s(blocked_s: float, written_s: float, between_failures_s: float) -> float:
    """Return the seconds from one save to the next, by Young's formula.

    Saving takes at most 1 % of the time, and no save begins before the last one is written.
    """
    best = math.sqrt(2 * blocked_s * between_failures_s)
    return max(best, blocked_s / MAX_OVERHEAD, 2 * written_s, SHORTEST_S)


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
        """Return the worth of a checkpoint, higher is better; None where the metric is missing or not a number."""
        value = None if self.best is None else metrics.get(self.best.removeprefix("-"))
        if not isinstance(value, (int, float)) or math.isnan(value):
            return None
        return -value if str(self.best).startswith("-") else value
