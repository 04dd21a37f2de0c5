"""Rows of sweeps for `toolkit status` and `toolkit watch`: one row a sweep, or one a point."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from toolkit.base.errors import DamagedFileError
from toolkit.cli import selection
from toolkit.cli.run_rows import RunRow, unreadable
from toolkit.files import rundir
from toolkit.files.run_files import UNREADABLE, RunState, state_word
from toolkit.files.rundir import RunDir
from toolkit.plugins.sweep import sweep_folder
from toolkit.plugins.sweep.states import LOST, NOT_SUBMITTED, REMOVED, Ask, PointStanding, RowsOfRuns, standings
from toolkit.plugins.sweep.sweep_folder import SweepDir
from toolkit.slurm import shared_queue
from toolkit.slurm.jobs import JobStatus

#: A sweep is in the first of these states that one of its points has: what goes on counts before what has ended, and
#: what went wrong before what is done.
_IMPORTANCE = (
    *(RunState.RUNNING, RunState.STOPPING, RunState.STARTING, RunState.REQUEUED, RunState.QUEUED),
    *(NOT_SUBMITTED, RunState.FAILED, LOST, UNREADABLE, RunState.STOPPED, RunState.CANCELLED),
)


def newest(runs: Sequence[RunDir], sweeps: Sequence[Path], rows_of: RowsOfRuns, most: int = 10) -> list[RunRow]:
    """Return the rows of the ``most`` newest runs and sweeps, oldest first.

    A sweep stands for the runs of its points.
    """
    single, stamped = fold(runs, sweeps)
    entries: list[tuple[str, RunDir | SweepDir]] = [*((run.id, run) for run in single), *stamped]
    shown = [entry for _, entry in sorted(entries, key=lambda each: each[0])[-most:]]
    rows = iter(rows_of([entry for entry in shown if isinstance(entry, RunDir)]))
    return [next(rows) if isinstance(entry, RunDir) else row_of(entry, rows_of) for entry in shown]


def fold(runs: Sequence[RunDir], sweeps: Sequence[Path]) -> tuple[list[RunDir], list[tuple[str, SweepDir]]]:
    """Return the runs that are no points; and each sweep after the stamp that the ids of its runs begin with."""
    stamped = [(_stamp(sweep), sweep) for sweep in map(SweepDir, sweeps)]
    # Few other runs begin with a stamp, and only of these a file is read.
    stamps = {stamp for stamp, _ in stamped}
    return [run for run in runs if run.id.rpartition("-")[0] not in stamps or not _is_point(run)], stamped


def _stamp(sweep: SweepDir) -> str:
    """Return what the ids of a sweep's runs begin with. Where that cannot be read it is one that no run has."""
    try:
        record = sweep.record()
    except DamagedFileError:
        record = None
    return rundir.id_time(sweep.path.stat().st_mtime) if record is None else record.stamp


def started(name: str) -> tuple[Path, list[RunDir]]:
    """Return the folder of a sweep, and the runs of its points that have started."""
    sweep = sweep_folder.of_name(name)
    points = sweep_folder.newest(sweep.arrays())
    return sweep.path, [run for point, _, _ in points.values() if (run := sweep.run_of(point)).config.exists()]


def ask_shared(jobs: Iterable[str]) -> Mapping[str, JobStatus | None]:
    """Return Slurm's answer about jobs. All processes of the user share it. Raises SlurmError."""
    return shared_queue.of_user().show_jobs(jobs)


def unfolded(runs: Sequence[RunDir], sweeps: Sequence[Path], args: Namespace, rows_of: RowsOfRuns) -> list[RunRow]:
    """Return a row for each run, and for each point that has not started. ``--since`` and ``--name`` are applied."""
    points, bad = list[PointStanding](), list[RunRow]()
    for sweep in map(SweepDir, sweeps):
        try:
            points += standings(sweep, ask_shared, lambda _: [])
        except DamagedFileError as error:
            bad.append(unreadable(sweep.name, "sweep", sweep.path, error))
    waiting = {each.run: each for each in points if each.state != REMOVED and not each.run.config.exists()}
    kept = selection.by_place(sorted([*runs, *waiting], key=lambda run: run.id), args)
    started = iter(rows_of([run for run in kept if run not in waiting]))
    return [*bad, *(_of_point(waiting[run]) if run in waiting else next(started) for run in kept)]


def row_of(sweep: SweepDir, rows_of: RowsOfRuns, ask: Ask = ask_shared) -> RunRow:
    """Return the row that stands for all points of a sweep. Its ``points`` are their number by state."""
    try:
        found, record = standings(sweep, ask, rows_of), sweep.record()
    except DamagedFileError as error:
        return unreadable(sweep.name, "sweep", sweep.path, error)
    points = count_states(each.state for each in found)
    return RunRow(
        sweep.name,
        f"sweep of {len(found)}",
        str(sweep.path),
        next((str(state) for state in _IMPORTANCE if state in points), RunState.COMPLETED),
        executor=found[0].executor if found else "slurm",
        submitted=0.0 if record is None else record.created,
        updated=max((at for each in found if each.row and (at := each.row.updated) is not None), default=None),
        points=points,
    )


def _is_point(run: RunDir) -> bool:
    """True for a run of a sweep. Where the file cannot be read that says so, its own row names it."""
    try:
        return run.point() is not None
    except DamagedFileError:
        return False


def _of_point(each: PointStanding) -> RunRow:
    run = each.run
    return RunRow(run.id, run.name, str(run.path), each.state, job_id=each.job_id, executor=each.executor, why=each.why)


def count_states(states: Iterable[str]) -> dict[str, int]:
    """Return how many are in each state, the most first. ``running? (silent)`` counts as running."""
    return dict(Counter(map(state_word, states)).most_common())
