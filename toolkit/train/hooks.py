"""What a job may do during its training; nothing by default."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Hooks:
    """Methods that the loop calls on every rank, between two steps. Each does the same on all ranks."""

    def on_epoch_start(self, epoch: int) -> None:
        """Prepare an epoch, counted from 0. Called again where a run resumes within it."""

    def on_epoch_end(self, epoch: int, metrics: Mapping[str, float]) -> None:
        """Take note of an epoch's end, with the last figure of each metric.

        If that end is evaluated, called after it: where a stop cut the evaluation short, the resumed run calls it.
        """

    def speed(self, samples_per_s: float) -> Mapping[str, float]:
        """Return more figures of the speed by tag, such as tokens per second. Called at each logging step.

        ``samples_per_s`` are those of all ranks together.
        """
        return {}

    def is_done(self, evaluations: Sequence[Mapping[str, float]]) -> bool:
        """Return True to end the training early. Called after each evaluation.

        ``evaluations`` are the figures of all so far (``eval/loss``), those before a resume included. So a job need not
        keep what its decision depends on.
        """
        return False
