"""The evaluations of a training, on all ranks. Each counts every sample once, on any number of ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias
from zlib import crc32

import torch
from torch import Tensor

from toolkit import hang
from toolkit.base import logs
from toolkit.base.errors import JobCodeError, ToolkitError, listing
from toolkit.data.randomness import reseed
from toolkit.metrics.goodput import TimeBreakdown
from toolkit.ranks.agreement import STOP
from toolkit.ranks.batch import Batch
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json
from toolkit.strategies.objective import WEIGHT, Measure, Sums, where
from toolkit.strategies.protocol import Strategy

log = logs.get(__name__)

#: Returns the figures of one evaluation by name (``accuracy``), or None where it was cut short because the second
#: argument said so. Called on every rank; the result is equal on every rank. It must call the second argument after
#: each batch: an evaluation that does not for half of ``dist.timeout_s`` is taken for a hang.
Evaluate: TypeAlias = Callable[[Strategy, Callable[[], bool]], Mapping[str, float] | None]


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

        ``evaluations`` are the figures of all so far (``eval/loss``), those before a resume included.
        """
        return False


class Evaluations:
    """Evaluates, and asks the job's hooks whether its training is done."""

    def __init__(
        self,
        session: Session,
        strategy: Strategy,
        breakdown: TimeBreakdown,
        evaluate: Evaluate | None,
        hooks: Hooks,
        seed: int,
    ) -> None:
        self._session, self._strategy, self._breakdown = session, strategy, breakdown
        self._evaluate, self._hooks, self._seed = evaluate, hooks, seed
        self.are_made = evaluate is not None
        self.newest: int | None = None  #: the step that was evaluated last
        #: The figures of each evaluation. Only a job that decides by them needs them, in memory and in checkpoints.
        self._figures: list[dict[str, float]] = []
        self._keeps_figures = type(hooks).is_done is not Hooks.is_done

    def evaluate(self, step: int) -> dict[str, float] | None:
        """Return the figures after ``step`` steps as ``eval/<name>``. None: a stop has cut it short."""
        assert self._evaluate is not None
        self._session.activity.phase = hang.EVALUATING
        # One that is made up for after a resume draws the same.
        reseed(self._seed, -1 - step, self._strategy.share.index)
        means = self._evaluate(self._strategy, self._is_interrupted)
        if means is None:  # the stop follows at the next boundary
            log.info("step %d: evaluation cut short to stop", step)
            return None
        figures = {f"eval/{name}": value for name, value in means.items()}
        log.info("step %d: %s", step, ", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
        self.newest = step
        if self._keeps_figures:
            self._figures.append(figures)
        return figures

    def _is_interrupted(self) -> bool:
        """Report progress. True if the evaluation must end early for a stop; the resumed run evaluates again."""
        self._session.activity.note_progress()
        self._breakdown.add("evaluation")
        return self._session.gate.pending == STOP

    def are_enough(self) -> bool:
        """True if the job says, by the figures so far, that its training is done."""
        return bool(self._figures) and self._hooks.is_done(self._figures)

    def state(self) -> dict[str, Json]:
        """Return what a checkpoint must hold."""
        return {"evaluated": self.newest, **({"evaluations": [*self._figures]} if self._figures else {})}

    def restore(self, saved: Mapping[str, Any], step: int) -> None:
        """Continue from a :meth:`state` of the checkpoint of ``step``."""
        self.newest = step if saved.get("evaluated") == step else None
        self._figures = [dict(figures) for figures in saved.get("evaluations", ())]


def evaluate(
    strategy: Strategy,
    batches: Iterable[Batch | None],
    size: int,
    measure: Measure,
    is_interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Return the mean of each figure of ``measure``, equal on every rank.

    All ranks must call it. Means are over all ``size`` samples, or by the figure's own weight; nan where that adds up
    to 0. Of :class:`~toolkit.strategies.objective.Gathered` it returns those of all samples, in order.

    ``is_interrupted`` is called after each batch. When it is true on any rank, the evaluation ends early, with None on
    every rank. All ranks still enter the final sum, or those that were not cut would wait forever.

    ``batches`` is this rank's part of the eval set, unpadded. Every rank has the same number of batches, the last ones
    None where its part has ended. Sums and counts are added in float64, in which counts are exact up to 2**53. Raises
    ToolkitError when the ranks together did not see exactly ``size`` samples, and JobCodeError when not every batch
    has the same figures.
    """
    strategy.synchronize()
    sums: dict[str, Tensor] = {}
    count = 0
    rows: list[Sums] = []
    names: _Names | None = None
    cut = False
    for batch in batches:
        part = strategy.evaluate(batch, measure)
        if part.count or part.values:  # else this rank's part of the set has ended
            here = sorted(part.values), sorted(part.rows)
            if here != (names or here):
                raise _differ(measure, f"for one batch it returned {_listed(names)}, for another {_listed(here)}")
            names = here
        count += part.count
        if part.rows:
            rows.append(part)
        for name, value in part.values.items():
            sums[name] = sums[name] + value.double() if name in sums else value.double()
        cut = is_interrupted()
        if strategy.evaluates_together:  # a rank that ended alone would leave the others waiting in their next batch
            cut = bool(strategy.sum({_CUT: float(cut)})[_CUT])
        if cut:
            break
    # The sum below goes by the place of a name: with other names on one rank it would add up different figures. A rank
    # whose samples are counted by another has no rows.
    digests = {_NAMES: _digest(names[0]) if names else 0.0, _ROWS: _digest(names[1]) if names and count else 0.0}
    if odd := _odd_ranks(strategy.by_rank(digests).values()):
        who = f"the figures of rank {listing(odd)} differ from those of the others"
        raise _differ(measure, f"{who}, and those of this rank are {_listed(names)}")
    # One sum tells every rank the totals, and whether any rank was cut or has rows.
    ends = {_COUNT: float(count), _CUT: float(cut), _ROWS: float(bool(rows))}
    totals = strategy.sum({**{name: sums[name] for name in sorted(sums)}, **ends})
    counted, was_interrupted, has_rows = totals.pop(_COUNT), totals.pop(_CUT), totals.pop(_ROWS)
    if was_interrupted:
        return None
    # A sample that was seen twice, or by no rank, would make the means wrong without a sign.
    if counted != size:
        raise ToolkitError(
            f"evaluation looked at {counted:.0f} samples, the eval set has {size}: the figures would be wrong; "
            "the ranks' parts must tile the set without padding"
        )
    figures: dict[str, Any] = {}
    for name in sums or totals:  # in the job's order where this rank has samples
        if not name.endswith(WEIGHT):
            # A figure without a weight of its own is divided by the number of samples.
            weight = totals.get(name + WEIGHT, size)
            figures[name] = totals[name] / weight if weight else math.nan
    # Rows are gathered on all ranks or on none: a rank without samples has none of its own, and must join in.
    if has_rows:
        figures |= _gathered(strategy, rows)
    return figures


#: Names that no figure of a measure has.
_COUNT, _CUT, _ROWS, _NAMES = "\0count", "\0cut", "\0rows", "\0names"

#: The names of what an evaluation returned for a batch: of the sums, and of the rows.
_Names: TypeAlias = tuple[list[str], list[str]]


def _listed(names: _Names | None) -> str:
    sums, rows = names or ([], [])
    return ", ".join([name.replace(WEIGHT, " (its weight)") for name in sums] + rows) or "none"


def _digest(names: list[str]) -> float:
    """Return a number that is equal for equal names, and never 0."""
    return 1.0 + crc32(repr(names).encode())


def _odd_ranks(digests: Iterable[Tensor]) -> list[str]:
    """Return the ranks whose digest, in any of ``digests`` (ranks,), is not the most common one. 0 counts as none."""
    odd: set[int] = set()
    for digest in digests:
        by_rank = {rank: number for rank, number in enumerate(digest.tolist()) if number}
        usual = Counter(by_rank.values()).most_common(1)
        odd |= {rank for rank, number in by_rank.items() if number != usual[0][0]}
    return [str(rank) for rank in sorted(odd)]


def _differ(measure: Measure, what: str) -> JobCodeError:
    return JobCodeError(
        f"{where(measure)}: {what}; return each figure for every batch: toolkit.Loss.sum(values[mask].sum(), "
        "mask.sum()) is a mean over some of the samples, of which a batch may have none"
    )


def _gathered(strategy: Strategy, batches: Sequence[Sums]) -> dict[str, Tensor]:
    """Return the rows of all ranks by name, in the order of the eval set. A collective."""
    own: tuple[Tensor, dict[str, Tensor]] | None = None
    if batches:
        positions = [sums.positions for sums in batches if sums.positions is not None]
        rows = {name: torch.cat([sums.rows[name].cpu() for sums in batches]) for name in batches[0].rows}
        own = (torch.cat(positions), rows)
    parts = [part for part in strategy.gather(own) if part is not None]
    order = torch.cat([positions for positions, _ in parts]).argsort()
    return {name: torch.cat([rows[name] for _, rows in parts])[order] for name in parts[0][1]}
