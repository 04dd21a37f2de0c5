"""The folder of a sweep, ``runs/.sweeps/NAME/``: what was asked for, and which runs were submitted.

Each job array has a record (``arrays/0001-TOKEN.json``) with its points in the order of its elements, and its batch
script next to it. Slurm may remember the script of an array that was given up: no two have one name. A point is a run
like any other. Its folder is made before the array is submitted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.base import fsio, logs
from toolkit.base.errors import DamagedFileError, RequestError, RunNotFoundError, did_you_mean
from toolkit.files import rundir
from toolkit.files.records import FileRecord, JsonRecord
from toolkit.files.run_files import Executor, Moment, SweepPoint, Word
from toolkit.files.rundir import SWEEPS, RunDir

log = logs.get(__name__)


@dataclass(frozen=True)
class SweepRecord(FileRecord):
    """``sweep.json``: what was asked for last."""

    config: str
    created: Moment
    stamp: Word  #: begins the id of each of its runs
    metric: str | None = None
    max_running: int | None = None


@dataclass(frozen=True)
class Point(JsonRecord):
    """A point of a sweep. ``id`` follows from the keys that decide its result."""

    id: Word
    run: str  #: name and id of its run
    values: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ArrayRecord(FileRecord):
    """``arrays/NNNN.json``: points that were submitted together. Only jobs with this token may run them."""

    points: tuple[Point, ...]
    token: Word
    executor: Executor
    is_array: bool  #: False without Slurm, and where a site has no job arrays: then it has one point
    job_id: Word | None = None  #: a process without Slurm; None while it is being submitted
    cluster: str = ""  #: whose number that is


@dataclass(frozen=True)
class SweepDir:
    """Paths and files of one sweep."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def as_run(self) -> RunDir:
        """Return the folder as a run's, for the batch script. Its sources are at the same place."""
        return RunDir(self.path)

    def run_of(self, point: Point) -> RunDir:
        return RunDir(self.path.parent.parent / point.run)

    def record(self) -> SweepRecord | None:
        """Return ``sweep.json``; None if there is none. Raises DamagedFileError, here and below, or OSError."""
        return SweepRecord.read(self.path / "sweep.json")

    def arrays(self) -> dict[Path, ArrayRecord]:
        """Return the records of the arrays by their paths, oldest first."""
        paths = fsio.entries(self.path / "arrays", "[0-9]*.json")
        return {path: record for path in paths if (record := ArrayRecord.read(path)) is not None}

    def next_array(self, token: str) -> Path:
        """Return the path of the next array's record. No other submitter gets it."""
        folder = fsio.make_dir(self.path / "arrays")
        last = max((int(path.stem.partition("-")[0]) for path in fsio.entries(folder, "[0-9]*-*.json")), default=0)
        return folder / f"{last + 1:04d}-{token}.json"

    def points(self) -> list[Point]:
        """Return every point that was submitted, each once."""
        arrays = self.arrays().values()
        return list({point.id: point for array in arrays for point in array.points}.values())

    @contextlib.contextmanager
    def locked(self, *, waits: bool = False) -> Iterator[None]:
        """Keep other submitters out. Wait for one that is at work, or raise RequestError.

        Where the file system has no locks, two submitters may list the same points. No point runs twice all the same:
        its run has one folder and one owner.
        """
        rundir.make_root(self.path.parent.parent)
        path = fsio.make_dir(self.path) / "lock"
        if (fd := fsio.try_lock(path)) is None:
            if not waits:
                raise RequestError(
                    f"sweep {self.name}: another `toolkit sweep` is submitting its points; try again when it has ended"
                )
            log.warning("sweep %s: waiting for another `toolkit sweep`, which submits its points", self.name)
            fd = fsio.lock(path)
        try:
            yield
        finally:
            os.close(fd)


def find(name: str) -> SweepDir:
    """Return the sweep of this name. Raises RequestError that says which there are."""
    sweep = of_name(name)
    if (sweep.path / "sweep.json").exists():
        return sweep
    names = [path.name for path in rundir.sweep_paths()]
    there = f"{did_you_mean(name, names)}there are: {', '.join(names)}" if names else "there are none"
    raise RequestError(f"no sweep {name!r} under {rundir.runs_root()}; {there}")


def of_name(name: str) -> SweepDir:
    """Return the folder of a sweep that need not exist."""
    return SweepDir(rundir.runs_root() / SWEEPS / name)


def point_of(run: RunDir) -> SweepPoint | None:
    """Return the run's point in its sweep. None also where the file cannot be read: the run's own row names it."""
    try:
        return run.point()
    except DamagedFileError:
        return None


def single_runs(text: str, by_name: Sequence[RunDir], root: Path) -> Sequence[RunDir]:
    """Return those of ``by_name``, the runs of the name ``text``, that it means.

    A sweep with another name leaves the config's name to the newest run that is not a point. Raises RunNotFoundError if
    ``text`` means all points of a sweep.
    """
    newest = point_of(by_name[-1]) if by_name else None
    sweep = None if newest is None else newest.sweep
    if newest is not None and sweep != text:
        alone = next((run for run in reversed(by_name) if point_of(run) is None), None)
        if alone is not None:
            return [alone]
    if not by_name and (root / SWEEPS / text / "sweep.json").exists():
        sweep = text
    if sweep is None:
        return by_name
    raise RunNotFoundError(
        f"{text!r} names the points of sweep {sweep}: `toolkit sweep status {sweep}` lists their runs, and "
        f"`toolkit sweep stop {sweep}` ends them; one of them is named by its last eight digits",
        sweep,
    )
