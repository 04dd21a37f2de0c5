"""Where a run's time went: seconds by name, since its submission, over all attempts.

The supervisor's clock tells when things happened, rank 0's how long each took (:class:`TimeBreakdown`). The two are
never compared, for they may differ by minutes. Unmeasured time is ``idle``, so the parts always sum to the wall time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from toolkit.base.durations import in_units
from toolkit.files.run_files import AttemptRecord, AttemptStart, RunProgress
from toolkit.files.rundir import RunDir

#: The parts that rank 0 measures, from its first step on; see `toolkit.metrics.goodput`.
MEASURED = ("training", "data_wait", "checkpoint", "evaluation")
#: ``replay`` is the time of steps that an earlier attempt had already made. ``idle`` is the rest: a step that was never
#: finished, the end of an attempt, time without a process.
PARTS = ("queue", "start_up", *MEASURED, "replay", "idle")
WORDS = {
    "queue": "in the queue",
    "start_up": "start-up",
    "data_wait": "waiting for data",
    "checkpoint": "saving",
    "evaluation": "evaluation",
    "replay": "repeated steps",
    "idle": "idle",
}

#: Decisions after which a run continues only if its user resumes it.
_ENDS_RUN = ("finish", "give_up")
#: Seconds of each of PARTS.
Ledger: TypeAlias = dict[str, float]


def of_attempt(start: AttemptStart, first_step: float | None, progress: RunProgress, until: float) -> Ledger:
    """Return where the time from ``start.since`` to ``until`` went.

    ``first_step`` is when the first step began, None before it; ``progress`` is rank 0's report. Steps that an earlier
    attempt had already made count as replay: their share of all steps made is taken from the steps' time, data
    included.
    """
    ledger = dict.fromkeys(PARTS, 0.0) | dict(progress.spent)
    ledger["queue"] = start.queue_s
    ledger["start_up"] = (until if first_step is None else first_step) - start.ready
    first, last = progress.step_start or 0, progress.step or 0
    share = max(0, min(last, start.best_step) - first) / (last - first) if last > first else 0.0
    ledger["replay"] = share * (ledger["training"] + ledger["data_wait"])
    ledger["training"] *= 1 - share
    ledger["data_wait"] *= 1 - share
    return _fitted(ledger, until - start.since)


def gained_s(progress: RunProgress, saved: int, saved_before: int) -> float:
    """Return the loop seconds of the steps that this attempt was the first to save.

    ``progress`` is rank 0's last report, which may be older than the checkpoint of step ``saved``, the newest after the
    attempt. ``saved_before`` is the newest ever before it. Evaluations and saves count by their steps.
    """
    first, last = progress.step_start, max(progress.step or 0, saved)
    if first is None or last <= first:
        return 0.0
    gained = max(0, saved - max(first, saved_before))
    return sum(progress.spent.values()) * gained / (last - first)


def ended_gap_s(attempts: Sequence[AttemptRecord], resumed: float | None = None) -> float:
    """Return the seconds in which the run had ended and waited for its user, who has resumed it.

    ``resumed`` is when the attempt without a line was submitted, None without one.
    """
    began = [*(line.begun for line in attempts[1:]), resumed]
    gaps = [(line.ended, then) for line, then in zip(attempts, began, strict=False) if line.decision in _ENDS_RUN]
    return sum(max(0.0, then - ended) for ended, then in gaps if then is not None)


def of_run(attempts: Sequence[Mapping[str, float]], submitted: float, now: float) -> Ledger:
    """Return the whole run's ledger from ``submitted`` to ``now``, by those of its attempts.

    A ledger is empty where nothing is known. Take :func:`ended_gap_s` from ``now``: that time is not the run's.
    """
    return _fitted({part: sum(ledger.get(part, 0.0) for ledger in attempts) for part in PARTS}, now - submitted)


def _fitted(ledger: Ledger, wall_s: float) -> Ledger:
    """Return the ledger with the rest as idle. If clocks were set and the rest is negative, shrink all parts."""
    known = {part: max(0.0, ledger[part]) for part in PARTS if part != "idle"}
    total_s, wall_s = sum(known.values()), max(0.0, wall_s)
    scale = wall_s / total_s if total_s > wall_s else 1.0
    return {part: scale * known[part] for part in known} | {"idle": max(0.0, wall_s - total_s)}


def ratio(ledger: Mapping[str, float]) -> float:
    """Return the share of the time that was spent on steps that count. It is 0 of no time."""
    wall_s = sum(ledger.get(part, 0.0) for part in PARTS)
    return ledger.get("training", 0.0) / wall_s if wall_s else 0.0


def as_json(ledger: Ledger) -> dict[str, float]:
    """Return the ledger for a file: rounded, with the ratio."""
    return {part: round(ledger[part], 3) for part in PARTS} | {"ratio": round(ratio(ledger), 4)}


def of_files(run: RunDir) -> dict[str, float] | None:
    """Return the ledger by the run's own files; None if nothing was measured.

    It goes up to the run's end or its last sign of life.
    """
    result = run.result()
    if result is not None and result.goodput:
        return dict(result.goodput)
    lines, status = run.attempts(), run.status()
    parts = [(line.begun, line.goodput, line.ended) for line in lines]
    away = ended_gap_s(lines)
    # The attempt that runs now has no line yet: take it from the status.
    is_new = all(line.attempt != status.attempt for line in lines)
    if is_new and status.goodput and status.started is not None and status.updated is not None:
        parts.append((status.submitted or status.started, status.goodput, status.updated))
        away = ended_gap_s(lines, parts[-1][0])
    ledgers = [ledger for _, ledger, _ in parts]
    if not any(ledgers):
        return None
    return as_json(of_run(ledgers, parts[0][0], parts[-1][2] - away))


def sentence(ledger: Mapping[str, float] | None) -> str:
    """Return the ledger as a sentence, empty for a run that reports nothing.

    Such as ``87 % of 1 h 12 min was training; 6 % start-up, 4 % repeated steps``.
    """
    if not ledger or not any(ledger.get(part) for part in MEASURED):
        return ""
    wall_s = sum(ledger.get(part, 0.0) for part in PARTS)
    rest = sorted(((ledger.get(part, 0.0) / wall_s, words) for part, words in WORDS.items()), reverse=True)
    others = ", ".join(f"{share:.0%} {words}" for share, words in rest if share >= 0.005)
    text = f"{ledger.get('training', 0.0) / wall_s:.0%} of {in_units(wall_s)} was training; {others}".replace("%", " %")
    return text.removesuffix("; ")


class TimeBreakdown:
    """Seconds by kind of work: a step, or what comes between two steps.

    Work is counted when it ends, with one reading of the clock. Work that has not ended is not counted, so a step in
    which the ranks die counts nothing.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._mark = clock()
        #: Never replaced by another dict, because the report thread reads it at any time.
        self.spent = dict.fromkeys(MEASURED, 0.0)

    def begin(self) -> None:
        """Start the clock as the first step begins. The time before is start-up."""
        self._mark = self._clock()

    def step_done(self, data_wait_s: float) -> None:
        """Count a step that has ended, and that waited ``data_wait_s`` for its data."""
        # The loop has measured the wait for data itself: what is left is training.
        now, spent = self._clock(), self.spent
        spent["training"] += now - self._mark - data_wait_s
        spent["data_wait"] += data_wait_s
        self._mark = now

    def add(self, name: str) -> None:
        """Count the time since the last mark as ``name``."""
        now = self._clock()
        self.spent[name] += now - self._mark
        self._mark = now

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count the block as ``name``. The time since the last step, such as reading the loss, is still training."""
        self.add("training")
        try:
            yield
        finally:
            self.add(name)
