"""The evaluations of a training, on all ranks. They are remembered over a resume."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from toolkit.base import logs
from toolkit.hang import activity
from toolkit.metrics.timesheet import Timesheet
from toolkit.ranks.session import Session
from toolkit.ranks.state import Json
from toolkit.ranks.stop import STOP
from toolkit.strategies.protocol import Strategy
from toolkit.train.hooks import Hooks
from toolkit.train.seeds import reseed

log = logs.get(__name__)

#: Returns the figures of one evaluation by name (``accuracy``), or None where it was cut short because the second
#: argument said so. Called on every rank; the result is equal on every rank. It must call the second argument after
#: each batch: an evaluation that does not for half of ``dist.timeout_s`` is taken for a hang.
Evaluate: TypeAlias = Callable[[Strategy, Callable[[], bool]], Mapping[str, float] | None]


class Evaluations:
    """Evaluates, and asks the job's hooks whether its training is done."""

    def __init__(
        self,
        session: Session,
        strategy: Strategy,
        sheet: Timesheet,
        evaluate: Evaluate | None,
        hooks: Hooks,
        seed: int,
    ) -> None:
        self._session, self._strategy, self._sheet = session, strategy, sheet
        self._evaluate, self._hooks, self._seed = evaluate, hooks, seed
        self.are_made = evaluate is not None
        self.newest: int | None = None  #: the step that was evaluated last
        #: The figures of each evaluation. Only a job that decides by them needs them, in memory and in checkpoints.
        self._figures: list[dict[str, float]] = []
        self._keeps_figures = type(hooks).is_done is not Hooks.is_done

    def evaluate(self, step: int) -> dict[str, float] | None:
        """Return the figures after ``step`` steps as ``eval/<name>``. None: a stop has cut it short."""
        assert self._evaluate is not None
        self._session.activity.phase = activity.EVALUATING
        reseed(
            self._seed, -1 - step, self._strategy.share.index
        )  # one that is made up for after a resume draws the same
        means = self._evaluate(self._strategy, self._is_cut)
        # The stop follows at the next boundary, and the resumed run evaluates this step.
        if means is None:
            log.info("step %d: evaluation cut short to stop", step)
            return None
        figures = {f"eval/{name}": value for name, value in means.items()}
        log.info("step %d: %s", step, ", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
        self.newest = step
        if self._keeps_figures:
            self._figures.append(figures)
        return figures

    def _is_cut(self) -> bool:
        """True if the evaluation must end early, for a stop, which has only seconds.

        The evaluation is made up for at the resume. It calls this after each batch, which also reports progress.
        """
        self._session.activity.note_progress()
        self._sheet.add("evaluation")
        return self._session.gate.pending == STOP

    def are_enough(self) -> bool:
        """True if the job says, by the figures so far, that its training is done."""
        return bool(self._figures) and self._hooks.is_done(self._figures)

    def state(self) -> dict[str, Json]:
        """Return what a checkpoint must hold."""
        saved: dict[str, Json] = {"evaluated": self.newest}
        if self._figures:
            saved["evaluations"] = [*self._figures]
        return saved

    def restore(self, saved: Mapping[str, Any], step: int) -> None:
        """Go on from a :meth:`state` of the checkpoint of ``step``."""
        self.newest = step if saved.get("evaluated") == step else None
        self._figures = [dict(figures) for figures in saved.get("evaluations", ())]
