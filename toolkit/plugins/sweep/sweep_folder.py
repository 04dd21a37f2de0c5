"""The folder of a sweep, ``runs/.sweeps/NAME/``: its request, its points and their job arrays.

Each submission adds a list of points (``arrays/0001.jsonl``), the batch script, and a record with the job's id. These
files are all that is known of a sweep: they are only ever added to, and each is written in one step.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit import config as configs
from toolkit.base import fsio
from toolkit.base.errors import DamagedFileError, RequestError, nearest
from toolkit.files import rundir
from toolkit.files.records import FileRecord
from toolkit.files.run_files import (
    AfterRecord,
    Executor,
    Moment,
    RunState,
    RunStatus,
    SweepPoint,
    Word,
)
from toolkit.files.rundir import RunDir
from toolkit.run.records.submitted_run import RunJobs


@dataclass(frozen=True)
class SweepRecord(FileRecord):
    """``sweep.json``: what was asked for last."""

    name: str
    config: str
    created: Moment
    stamp: Word  #: begins the id of each of its runs, so that a point has the same run folder for ever
    metric: str | None = None
    max_running: int | None = None


@dataclass(frozen=True)
class Point(FileRecord):
    """A line of ``arrays/NNNN.jsonl``: a point, and how its config differs from ``base.yaml``."""

    id: Word
    run: str  #: name and id of its run
    values: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)
    after: AfterRecord | None = None  #: what must have completed before it starts
    index: int | None = None  #: its element of the array; None until the list is written


@dataclass(frozen=True)
class ArrayRecord(FileRecord):
    """``arrays/NNNN.json``: how a list of points was submitted. Only jobs with this token may run them."""

    token: Word
    executor: Executor
    is_array: bool = True  #: False where a site has no job arrays: then it is a job for one point
    job_id: Word | None = None  #: None until sbatch has answered
    cluster: str = ""  #: whose number that is
    submitted: Moment | None = None  #: just before sbatch was asked


@dataclass(frozen=True)
class Array:
    """A list of points that was submitted together, or is to be."""

    sweep: SweepDir
    number: int

    @property
    def points_path(self) -> Path:
        return self.sweep.path / "arrays" / f"{self.number:04d}.jsonl"

    @property
    def script(self) -> Path:
        return self.points_path.with_suffix(".sh")

    def record(self) -> ArrayRecord | None:
        return ArrayRecord.read(self.points_path.with_suffix(".json"))

    def write_record(self, record: ArrayRecord) -> None:
        fsio.write_json(self.points_path.with_suffix(".json"), record.to_json())

    def points(self) -> list[Point]:
        return list(self.by_index().values())

    def by_index(self) -> dict[int, Point]:
        """Return the points by their index in the array."""
        points = Point.read_lines(self.points_path)
        return {point.index: point for point in points if point.index is not None}

    def job_of(self, point: Point, index: int, record: ArrayRecord | None) -> RunJobs | None:
        """Return the job for the point at ``index``."""
        if record is None or record.job_id is None:
            return None
        job = f"{record.job_id}_{index}" if record.is_array else record.job_id
        return RunJobs(self.sweep.run_of(point), (job,), record.cluster, self.sweep.name)


@dataclass(frozen=True)
class SweepDir:
    """Paths and files of one sweep."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def runs(self) -> Path:
        """Return the folder for runs."""
        return self.path.parent.parent

    @property
    def base(self) -> Path:
        """Return the config of the first point, from which those of the others differ."""
        return self.path / "base.yaml"

    @property
    def as_run(self) -> RunDir:
        """Return the folder as a run's, for the batch script. Its sources are at the same place."""
        return RunDir(self.path)

    def record(self) -> SweepRecord | None:
        """Return ``sweep.json``; None if there is none. Raises DamagedFileError."""
        return SweepRecord.read(self.path / "sweep.json")

    def write_record(self, record: SweepRecord) -> None:
        fsio.write_json(self.path / "sweep.json", record.to_json())

    def arrays(self) -> list[Array]:
        """Return the lists of points, oldest first."""
        names = (path.stem for path in (self.path / "arrays").glob("*.jsonl"))
        return [Array(self, number) for number in sorted(int(name) for name in names if re.fullmatch(r"\d{4,9}", name))]

    def next_array(self) -> Array:
        arrays = self.arrays()
        return Array(self, arrays[-1].number + 1 if arrays else 1)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other submitters out. Raises RequestError if one is at work.

        Where the file system has no locks, two submitters may list the same points. No point runs twice all the same:
        its run has one folder and one owner.
        """
        rundir.make_root(self.path.parents[1])
        fd = fsio.try_lock(fsio.make_dir(self.path) / "lock")
        if fd is None:
            raise RequestError(f"sweep {self.name}: another `toolkit sweep` submits its points at this moment")
        try:
            yield
        finally:
            os.close(fd)

    def run_of(self, point: Point) -> RunDir:
        return RunDir(self.runs / point.run)

    def was_removed(self, point: Point) -> bool:
        """True if the point has had a run folder, and somebody has removed it. It is not run again by itself."""
        return (self.path / "begun" / point.id).exists() and not self.run_of(point).path.exists()

    def begun(self) -> set[str]:
        """Return the ids of the points that have, or have had, a run folder."""
        folder = self.path / "begun"
        return {path.name for path in folder.iterdir()} if folder.is_dir() else set()

    def make_run(self, point: Point, submitted: float) -> RunDir:
        """Return the run of a point; make its folder unless it is there. What an interrupted start left is completed.

        Raises DamagedFileError where the sweep's own files cannot be read.
        """
        run, sweep = self.run_of(point), self.record()
        if run.config.exists():
            self._mark_begun(point)
            return run
        if sweep is None:
            raise DamagedFileError(f"{self.path / 'sweep.json'} is missing: how its points are to be run is not known")
        for folder in (run.logs, run.checkpoints, run.tensorboard, run.submitit):
            fsio.make_dir(folder)
        code = rundir.code_in(self.path)
        if code.is_dir():
            rundir.link_code(run.path, os.path.relpath(code, run.path / rundir.COPIES))
        config = configs.load_config(self.base, site=False)
        for key, value in point.changes.items():
            configs.put(config, key.split("."), value)
        place = SweepPoint(self.name, point.id, point.values, metric=sweep.metric)
        fsio.write_json(run.path / "point.json", place.to_json())
        run.write_status(RunStatus(state=RunState.QUEUED, run=point.run, updated=submitted))
        if point.after is not None:
            fsio.write_json(run.after_path, point.after.to_json())
        # The config comes last: a folder that has one is a whole run.
        fsio.write_atomic(run.config, configs.dump_config(config))
        self._mark_begun(point)
        return run

    def _mark_begun(self, point: Point) -> None:
        mark = self.path / "begun" / point.id
        if not mark.exists():
            fsio.make_dir(mark.parent, parents=0)
            fsio.write_atomic(mark, b"", durable=False)

    def local_lock(self) -> int | None:
        """Take the lock of the process that runs the sweep's points on this machine.

        Return its descriptor; None if another process holds it.
        """
        return fsio.try_lock(self.path / "local.lock")

    def works_here(self) -> bool:
        """True if a process runs the sweep's points on this machine."""
        fd = self.local_lock()
        if fd is not None:
            os.close(fd)
        return fd is None


def find(name: str) -> SweepDir:
    """Return the sweep of this name. Raises RequestError that says which there are."""
    sweep = of_name(name)
    if (sweep.path / "sweep.json").exists():
        return sweep
    names = [path.name for path in rundir.sweep_paths()]
    there = f"{nearest(name, names)}there are: {', '.join(names)}" if names else "there are none"
    raise RequestError(f"no sweep {name!r} under {rundir.runs_root()}; {there}")


def of_name(name: str) -> SweepDir:
    """Return the folder of a sweep that need not exist."""
    return SweepDir(rundir.runs_root() / rundir.SWEEPS / name)


def is_again(run: RunDir, array: Array, record: ArrayRecord | None) -> bool:
    """True if ``array`` submits a run again, and neither a job nor this machine's process has taken it yet.

    The run has a folder already. A run that was lost has no result.
    """
    result = run.result()
    if record is None or (result is not None and result.state is RunState.COMPLETED):
        return False
    owner = run.owner()
    if owner is not None and record.executor == "slurm":
        return owner.token != record.token
    # It was stopped before a job had it, or needs none. The list is newer than its result if it submits the run again.
    try:
        return (run.path / "result.json").stat().st_mtime_ns < array.points_path.stat().st_mtime_ns
    except FileNotFoundError:
        return False


def retry_of(run: RunDir) -> tuple[Array, RunJobs | None] | None:
    """Return the list by which its sweep has submitted an ended run again, and the list's job for it.

    None if there is no such list, or if the run has started by it.
    """
    place, owner, result = run.point(), run.owner(), run.result()
    if place is None or (result is not None and result.state is RunState.COMPLETED):
        return None
    for array in reversed(SweepDir(run.path.parent.parent / rundir.SWEEPS / place.sweep).arrays()):
        record = array.record()
        if record is None:
            continue
        if owner is not None and owner.token == record.token:  # the last list that has started the run
            return None
        for index, point in array.by_index().items():
            if point.id == place.id:
                return array, array.job_of(point, index, record)
    return None


def newest(arrays: Sequence[Array]) -> dict[str, tuple[Point, Array, int]]:
    """Return each point by its id, with its last array and its index there."""
    found: dict[str, tuple[Point, Array, int]] = {}
    for array in arrays:
        for index, point in array.by_index().items():
            found[point.id] = (point, array, index)
    return found
