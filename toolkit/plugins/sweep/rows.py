"""Rows of sweeps for `toolkit status`, `toolkit watch` and `toolkit sweep`: one row a sweep, or one a point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.base.errors import DamagedFileError
from toolkit.cli import columns
from toolkit.cli.run_rows import RunRow, unreadable_row
from toolkit.files import rundir
from toolkit.files.run_files import UNREADABLE, RunState, state_word
from toolkit.files.rundir import RunDir
from toolkit.plugins.sweep.sweep_folder import Point, SweepDir, point_of

#: Returns the rows of runs, see `toolkit.cli.run_rows`.
RowsOfRuns = Callable[[Sequence[RunDir]], list[RunRow]]

#: States of points besides those of runs.
LOST, REMOVED = "lost", "removed"
#: A sweep is in the first of these states that one of its points has: what continues counts before what has ended, and
#: what went wrong before what is done.
_IMPORTANCE = (
    *(RunState.RUNNING, RunState.STOPPING, RunState.RESTARTING, RunState.STARTING, RunState.REQUEUED, RunState.QUEUED),
    *(RunState.FAILED, LOST, UNREADABLE, "unknown", RunState.STOPPED, RunState.CANCELLED),
)
#: A run that cannot be read may work.
_TO_RETRY = (LOST, RunState.FAILED, RunState.CANCELLED, RunState.STOPPED)
#: Metrics to compare runs by, where neither the sweep nor the config names one.
_USUAL = ("eval/accuracy", "-eval/loss", "-train/loss")


@dataclass(frozen=True)
class PointRow:
    """A point with the row of its run. A run whose folder was removed has an empty one."""

    point: Point
    run: RunDir
    row: RunRow

    @property
    def state(self) -> str:
        """Return the state, without Slurm's reason for a job that waits: :attr:`why` says it in words."""
        state = str(self.row.state)
        return state_word(state) if self.row.slurm == "PENDING" else state

    @property
    def why(self) -> str | None:
        if self.state == REMOVED:
            return "its run folder was removed, so it is not run again; another --name runs it again"
        return self.row.why or columns.waits_for(self.row) or None

    @property
    def is_to_retry(self) -> bool:
        """True if the point has ended without its result, or will never start."""
        return state_word(self.state) in _TO_RETRY


def of_points(sweep: SweepDir, rows_of: RowsOfRuns) -> list[PointRow]:
    """Return every point, in the order of its submission. Raises DamagedFileError."""
    points = sweep.points()
    runs = [sweep.run_of(point) for point in points]
    rows = {row.path: row for row in rows_of([run for run in runs if run.config.exists()])}
    return [
        PointRow(point, run, rows.get(str(run.path)) or RunRow(run.id, run.name, str(run.path), REMOVED))
        for point, run in zip(points, runs, strict=True)
    ]


def newest(runs: Sequence[RunDir], sweeps: Sequence[Path], rows_of: RowsOfRuns, most: int = 10) -> list[RunRow]:
    """Return the rows of the ``most`` newest runs and sweeps, oldest first. A sweep stands for its points' runs."""
    single, stamped = group_by_sweep(runs, sweeps)
    entries: list[tuple[str, RunDir | SweepDir]] = [*((run.id, run) for run in single), *stamped]
    shown = [entry for _, entry in sorted(entries, key=lambda each: each[0])[-most:]]
    rows = iter(rows_of([entry for entry in shown if isinstance(entry, RunDir)]))
    return [next(rows) if isinstance(entry, RunDir) else of_sweep(entry, rows_of) for entry in shown]


def group_by_sweep(runs: Sequence[RunDir], sweeps: Sequence[Path]) -> tuple[list[RunDir], list[tuple[str, SweepDir]]]:
    """Return the runs that are no points; and each sweep after the stamp that the ids of its runs begin with.

    A sweep whose ``sweep.json`` cannot be read leaves its runs as they are.
    """
    stamped, stamps = list[tuple[str, SweepDir]](), set[str]()
    for sweep in map(SweepDir, sweeps):
        try:
            record = sweep.record()
        except DamagedFileError:  # its row says so
            record = None
        if record is not None:
            stamps.add(record.stamp)
        stamped.append((rundir.id_time(sweep.path.stat().st_mtime) if record is None else record.stamp, sweep))
    # Few other runs begin with a stamp, and only of these a file is read.
    return [run for run in runs if run.id.rpartition("-")[0] not in stamps or point_of(run) is None], stamped


def of_sweep(sweep: SweepDir, rows_of: RowsOfRuns) -> RunRow:
    """Return the row that stands for all points of a sweep. Its ``points`` are their number by state."""
    try:
        found, record = of_points(sweep, rows_of), sweep.record()
        metric = metric_of(sweep, found)
    except (DamagedFileError, OSError) as error:
        return unreadable_row(sweep.name, "sweep", sweep.path, error)
    points = count_states(each.state for each in found)
    return RunRow(
        sweep.name,
        f"sweep of {len(found)}",
        str(sweep.path),
        next((str(state) for state in _IMPORTANCE if state in points), RunState.COMPLETED),
        executor=found[0].row.executor if found else "slurm",
        submitted=0.0 if record is None else record.created,
        updated=max((at for each in found if (at := each.row.updated) is not None), default=None),
        points=points,
        # Of its best point, and only what they are compared by.
        metrics={metric.removeprefix("-"): value_of(each, metric) for each in ranked(found, metric)[:1]},
    )


def count_states(states: Iterable[str]) -> dict[str, int]:
    """Return how many are in each state, the most first. ``running? (silent)`` counts as running."""
    return dict(Counter(map(state_word, states)).most_common())


def metric_of(sweep: SweepDir, found: Sequence[PointRow]) -> str:
    """Return the metric that runs are compared by, as in ``checkpoint.keep_best``."""
    record = sweep.record()
    if record is not None and record.metric is not None:
        return record.metric
    known = metrics_of(found)
    return next((name for name in _USUAL if name.lstrip("-") in known), _USUAL[0])


def metrics_of(found: Sequence[PointRow]) -> list[str]:
    return sorted({name for each in found for name in each.row.metrics})


def value_of(each: PointRow, metric: str) -> float | None:
    value = each.row.metrics.get(metric.removeprefix("-"))
    return value if isinstance(value, (int, float)) else None


def ranked(found: Sequence[PointRow], metric: str) -> list[PointRow]:
    sign = 1 if metric.startswith("-") else -1
    measured = [each for each in found if value_of(each, metric) is not None]
    return sorted(measured, key=lambda each: sign * (value_of(each, metric) or 0.0))


def shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
