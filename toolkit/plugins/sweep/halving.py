"""Successive halving of a sweep's runs, without a server (ASHA: Li et al. 2020, https://arxiv.org/abs/1810.05934).

A rung is a part of the run's steps: with 3, an 81st, a 27th, a ninth and a third of them. A run that comes to a rung
writes its metric into the sweep's folder and compares it with those that others have written there. It goes on if it is
among the best third, else its ranks commit a checkpoint and it ends. No run waits for others, so early runs go on more
easily.
"""

from __future__ import annotations

import math
from pathlib import Path

from toolkit.base import fsio, logs, reading
from toolkit.files.run_files import HALVED
from toolkit.plugins.sweep import sweep_folder
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.facts import Stop
from toolkit.run.supervise.context import Context
from toolkit.run.supervise.stop_path import StopPath

#: The most rungs: an eighty-first of the steps is the first one with 3.
MOST_RUNGS = 4

log = logs.get(__name__)


class Halving:
    """Compares one run with the others of its sweep."""

    def __init__(self, context: Context) -> None:
        self._folder = context.run.path.parent.parent / ".sweeps"
        try:
            self._point = context.run.point()
        except OSError as error:
            log.warning("the run goes on without being compared with its sweep's others: %s", error)
            self._point = None
        # A run that halving has ended, and that runs again, was resumed by its user: it goes on.
        if self._point and any(sweep_folder.is_halved(closed.line) for closed in context.journal.lines):
            self._point = None
        self._done = set[int]()  #: rungs that this run has passed

    def look(self, attempt: Attempt, stops: StopPath) -> None:
        """Ask the ranks to stop if the run falls behind at a rung.

        A run that has come to a rung goes on only if it is among the best there.
        """
        point, progress = self._point, attempt.progress
        if point is None or point.halving is None or point.metric is None or attempt.stop is not None:
            return
        step, total, value = progress.step, progress.total_steps, progress.metrics.get(point.metric.removeprefix("-"))
        if step is None or total is None or value is None:
            return
        for rung in range(1, MOST_RUNGS + 1):
            at = total // point.halving**rung
            # Each rung is judged once. A run at its last step has no steps left to save.
            if at < 1 or step < at or step >= total or rung in self._done:
                continue
            self._done.add(rung)
            place = self._folder / point.sweep / f"rung-{rung}"
            # A metric such as ``-loss`` is better when it is lower.
            sign = 1.0 if point.metric.startswith("-") else -1.0
            why = worse_than(place, point.id, sign * value, point.halving)
            note = why and f"{HALVED} at step {step}: {point.metric.removeprefix('-')} {value:g} is {why}"
            note = _remember(place / f"{point.id}.ended", note)
            if note:
                log.warning("%s", note)
                stops.ask(Stop.HALVING, note)
                return


def worse_than(place: Path, point: str, value: float, share: int) -> str | None:
    """Record the point's value at a rung, and return why its run must end.

    Return None for a run that goes on. A lower value is better. A record is the name of an empty file, so that one
    listing of the folder shows all. A point that has one was judged before, by an earlier job of its run.
    """
    try:
        known = dict(path.name.split("=", 1) for path in fsio.make_dir(place, parents=1).iterdir() if "=" in path.name)
        if point in known or not math.isfinite(value):
            return None if point in known else "not a number"
        (place / f"{point}={value!r}").touch(mode=fsio.FILE_MODE)
        others = sorted(float(text) for text in known.values())
    except (OSError, ValueError) as error:  # a full disk, or a damaged name: halving may be late, a run may not fail
        log.warning("%s: the run goes on without being compared: %s", place, error)
        return None
    count = len(others) + 1
    rank = sum(other < value for other in others) + 1
    best = max(1, count // share)
    return None if count < share or rank <= best else f"number {rank} of {count}, and the best {best} go on"


def _remember(place: Path, note: str | None) -> str | None:
    """Write down why the run ends. Without a note return that of an attempt which was lost before it could end."""
    try:
        if note:
            fsio.write_atomic(place, note)
        elif place.exists():
            return reading.read_text(place)
    except (OSError, UnicodeDecodeError) as error:
        log.warning("%s: an attempt that is lost now would go on in its next one: %s", place, error)
    return note
