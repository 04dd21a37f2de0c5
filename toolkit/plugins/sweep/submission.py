"""Submits the points of a sweep that were not submitted yet, as job arrays.

A submission that is killed loses no point and doubles none. The order of the writes ensures that. A list of points is
written with a token and without a job id, then sbatch is called, then the id is written. The next call of the command
finds a list without an id and asks Slurm for the job of its script. If there is none, the list is submitted with
another token. If the first sbatch was only slow, the elements of its array find that their token is no longer the
list's, and end.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from toolkit import config as configs
from toolkit.base import fsio, logs, reading
from toolkit.base.errors import DamagedFileError, RequestError, SlurmRefusedError
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.run_files import AfterRecord
from toolkit.files.rundir import RunDir
from toolkit.plugins.sweep import learnt, points, sweep_folder
from toolkit.plugins.sweep.points import CheckedPoint
from toolkit.plugins.sweep.request import Options, SweepRequest
from toolkit.plugins.sweep.sweep_folder import Array, ArrayRecord, Point, SweepDir, SweepRecord
from toolkit.run.prepare import new_run as prepare
from toolkit.run.prepare import snapshot
from toolkit.run.prepare.new_run import refuse_unfit
from toolkit.run.records import ownership
from toolkit.run.submission import executors
from toolkit.run.submission.executors import choose_executor
from toolkit.run.submission.submit import awaited
from toolkit.slurm import cluster_name
from toolkit.slurm.commands import Slurm, SlurmCommands

#: The most jobs, one a point, where a site has no job arrays. More would overload its controller.
MOST_SINGLE_JOBS = 200
_NO_METRIC = "runs are compared by --metric, such as eval/accuracy, or -eval/loss: less is better"

log = logs.get(__name__)


@dataclass(frozen=True)
class Submitted:
    """What a call has submitted. ``known`` points were in the sweep before."""

    sweep: SweepDir
    executor: str
    points: Sequence[CheckedPoint]
    new: int
    jobs: Sequence[str]

    @property
    def known(self) -> int:
        return len(self.points) - self.new


def check(
    request: SweepRequest, project: Path, executor: str, waits_for: AfterRecord | None = None
) -> list[CheckedPoint]:
    """Return all points of the request. Raises ConfigError or RequestError before anything is written."""
    refuse_unfit(sweep_folder.of_name("x").runs)
    if executor == "debug":
        raise RequestError("executor: a sweep cannot be debugged in this process; submit one of its points with debug")
    # Optuna learns from the points that the sweep has tried.
    before: list[learnt.Tried] = []
    metric = ""
    if request.options.optuna is not None:
        config = _config(request, project, ())
        sweep = _sweep(request, config)
        metric = _metric(request, config) or getattr(sweep.record(), "metric", None) or ""
        if not metric:
            raise RequestError(f"--optuna: {_NO_METRIC}")
        before = learnt.tried(sweep, metric)
    return list(points.checked(request, project, executor, waits_for, before, metric))


def _config(request: SweepRequest, project: Path, found: Sequence[CheckedPoint]) -> JobConfig:
    """Return the config of the first point. Without points, return the one without the swept keys."""
    if found:
        return points.config_of(found[0])
    return prepare.load(request.config, request.fixed, project, sweep=True)


def _sweep(request: SweepRequest, config: JobConfig) -> SweepDir:
    return sweep_folder.of_name(request.options.name or config.name)


def _metric(request: SweepRequest, config: JobConfig) -> str | None:
    return request.options.metric or config.checkpoint.keep_best


def submit(
    request: SweepRequest,
    project: Path,
    executor: str = "auto",
    slurm: SlurmCommands | None = None,
    after: str | Sequence[str] = (),
) -> Submitted:
    """Submit the points of the request that its sweep does not have yet. Raises ToolkitError.

    An interrupted submission of the sweep is completed first. New points start when ``after`` has completed.
    """
    chosen = choose_executor(executor)
    slurm = slurm or Slurm()
    waits_for = awaited(after, chosen, slurm.show_jobs)
    found = check(request, project, chosen, waits_for)
    config = _config(request, project, found)
    sweep = _sweep(request, config)
    if waits_for is not None:
        _refuse_circle(waits_for, sweep)
    if chosen == "local":
        return _submit_locally(request, project, sweep, found, waits_for)
    with sweep.locked():
        if request.options.optuna is not None:  # another submitter may have drawn since then
            found = check(request, project, chosen, waits_for)
        size = _array_size(slurm, request.options, len(found))
        record = _prepare(sweep, request, project, config)
        placements = _placements(sweep, found)
        jobs = [job for array in unsent(sweep) for job in submit_array(array, record, slurm, placements)]
        new = _new_points(sweep, found, waits_for)
        for group in alike(new):
            for batch in batches(group, size):
                array = add_list(sweep, record, batch, "slurm", is_array=size > 0)
                jobs += submit_array(array, record, slurm)
    return Submitted(sweep, chosen, found, len(new), jobs)


def _submit_locally(
    request: SweepRequest,
    project: Path,
    sweep: SweepDir,
    found: Sequence[CheckedPoint],
    waits_for: AfterRecord | None,
) -> Submitted:
    from toolkit.plugins.sweep import local

    with sweep.locked():
        if request.options.optuna is not None:
            found = check(request, project, "local", waits_for)
        record = _prepare(sweep, request, project, _config(request, project, found))
        new = _new_points(sweep, found, waits_for)
        if new:
            add_list(sweep, record, new, "local", is_array=False)
    local.start(sweep)
    return Submitted(sweep, "local", found, len(new), [])


def _array_size(slurm: SlurmCommands, options: Options, count: int) -> int:
    """Return how many points an array may have; 0 where the site has no arrays."""
    size = slurm.settings().max_array_size
    if size > 1:
        return size
    if options.max_running is not None:
        raise RequestError(
            f"--max-running: a limit is a job array's, and this site has none (MaxArraySize={size}); leave it out"
        )
    if count > MOST_SINGLE_JOBS:
        raise RequestError(
            f"this site has no job arrays (MaxArraySize={size}), and {count} single jobs would be too many at once; "
            f"take {MOST_SINGLE_JOBS} points or fewer"
        )
    log.warning("this site has no job arrays (MaxArraySize=%d): each point becomes a job of its own", size)
    return 0


def _prepare(sweep: SweepDir, request: SweepRequest, project: Path, config: JobConfig) -> SweepRecord:
    """Write what all points share, unless it is there: the sources and the first config. Return the record."""
    before = sweep.record()
    options = request.options
    record = before or SweepRecord(
        name=sweep.name,
        config=str(request.config),
        created=time.time(),
        stamp=rundir.id_time(time.time()),
        metric=None,
        max_running=None,
    )
    # What this call says replaces what earlier ones said.
    said = {"metric": _metric(request, config), "max_running": options.max_running}
    record = record.replace(config=str(request.config), **{key: v for key, v in said.items() if v is not None})
    for name in ("arrays", "logs"):
        fsio.make_dir(sweep.path / name)
    if config.job != configs.FOREIGN_JOB:
        snapshot.take_first(project, sweep.path)
    if not sweep.base.exists():
        fsio.write_atomic(sweep.base, configs.dump_config(config))
    if record != before:
        sweep.write_record(record)
    return record


def _placements(sweep: SweepDir, found: Sequence[CheckedPoint]) -> dict[str, dict[str, Any]]:
    """Return where each point is to run, and for how long, by its id.

    These are changes of the sweep's first config.
    """
    base = points.settings_of(configs.load_config(sweep.base, site=False))
    return {
        point.id: {key: value for key, value in point.changes(base).items() if _is_placement(key)} for point in found
    }


def _new_points(sweep: SweepDir, found: Iterable[CheckedPoint], waits_for: AfterRecord | None) -> list[Point]:
    """Return the points that are in no list of the sweep, as lines of one. Raises DamagedFileError."""
    known = sweep_folder.newest(sweep.arrays())
    taken = {point.run for point, _, _ in known.values()}
    record = sweep.record()
    assert record is not None
    base = points.settings_of(configs.load_config(sweep.base, site=False))
    new = []
    for point in found:
        if point.id in known:
            continue
        # A run's id ends with eight digits, of which two points may share some. Another sweep of the same second has
        # others for an equal point.
        config_name = point.settings.get("name", JobConfig().name)
        digits = hashlib.sha256(f"{sweep.name} {point.id}".encode()).hexdigest()
        names = (f"{config_name}/{record.stamp}-{digits[at : at + 8]}" for at in range(9))
        run = next(name for name in names if name not in taken)
        taken.add(run)
        new.append(Point(point.id, run, point.values, point.changes(base)))
    return new if waits_for is None else [point.replace(after=waits_for) for point in new]


def alike(new: Sequence[Point]) -> Iterator[list[Point]]:
    """Yield the points in groups that ask Slurm for the same nodes. All elements of an array have one size."""

    def asked(point: Point) -> str:
        return repr(sorted((key, value) for key, value in point.changes.items() if key.startswith("cluster.")))

    for _, group in groupby(sorted(new, key=asked), asked):
        yield list(group)


def batches(new: Sequence[Point], size: int) -> Iterator[Sequence[Point]]:
    """Yield as many points at a time as an array may have. Without arrays that is one."""
    for start in range(0, len(new), max(1, size)):
        yield new[start : start + max(1, size)]


def add_list(sweep: SweepDir, record: SweepRecord, batch: Iterable[Point], executor: str, *, is_array: bool) -> Array:
    """Write the next list of points, which no job runs yet."""
    array = sweep.next_array()
    array.write_record(ArrayRecord(secrets.token_hex(8), executor, is_array=is_array, job_id=None))
    write_points(array, dict(enumerate(batch)))
    return array


def write_points(array: Array, by_index: Mapping[int, Point]) -> None:
    """Write the list of the points by their places in the array."""
    lines = (point.replace(index=index) for index, point in by_index.items())
    fsio.write_atomic(array.points_path, b"".join(fsio.json_line(line.to_json()) for line in lines))


def unsent(sweep: SweepDir) -> list[Array]:
    """Return the lists of points that have no Slurm job yet. Their submission was interrupted."""
    arrays = []
    for array in sweep.arrays():
        record = array.record()
        if record is None or (record.executor == "slurm" and record.job_id is None):
            arrays.append(array)
    return arrays


def submit_array(
    array: Array,
    sweep_record: SweepRecord,
    slurm: SlurmCommands,
    placements: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[str]:
    """Submit a list of points, unless Slurm has its job already; return the job's id. Raises SlurmError.

    A list that is longer than the number of jobs that a user may have is submitted in parts, as many as there is room
    for. ``placements``: by id, changes that points get before. The partition of an earlier submission may have been
    wrong.
    """
    record = array.record()
    # An interrupted submission may have reached Slurm.
    job_id = slurm.job_of_script(str(array.script)) if array.script.exists() else None
    if job_id is None:
        is_array = record is None or record.is_array
        record = ArrayRecord(secrets.token_hex(8), "slurm", is_array=is_array, job_id=None, submitted=time.time())
        array.write_record(record)
        _place(array, placements or {})
        script, options = _script(array, sweep_record, record, slurm)
        fsio.write_atomic(array.script, script)
        try:
            with snapshot.at_home(array.sweep.path):
                job_id = slurm.sbatch([*options, str(array.script)])
        except SlurmRefusedError as error:
            rest = _second_half(array, record) if _TOO_MANY_JOBS in str(error) else None
            if rest is not None:
                parts = [submit_array(part, sweep_record, slurm, placements) for part in (array, rest)]
                return [job for jobs in parts for job in jobs]
            left = sum(len(each.points()) for each in unsent(array.sweep))
            raise RequestError(
                f"sweep {array.sweep.name}: {left} points are not submitted: {error}\n"
                "Nothing is lost: the same command submits what is missing, when there is room or with other cluster.* "
                "values"
            ) from error
    if record is None:
        # Slurm has the job, and the record was removed. The job knows its array by the token.
        token = re.search(rf"export {ownership.TOKEN_VARIABLE}=(\w+)", reading.read_text(array.script))
        if token is None:
            raise DamagedFileError(
                f"{array.script} names no token, and the record beside it is gone; cancel its job by hand"
            )
        record = ArrayRecord(token[1], "slurm", is_array=len(array.points()) > 1, job_id=None)
    array.write_record(record.replace(job_id=job_id, cluster=cluster_name.name_here()))
    return [job_id]


#: In the names of the limits on a user's, an account's or a QOS's jobs; sbatch prints ``AssocMaxSubmitJobLimit``.
_TOO_MANY_JOBS = "SubmitJob"


def _second_half(array: Array, record: ArrayRecord) -> Array | None:
    """Move the second half of an unsent list into a list of its own. None for a single point."""
    listed = array.points()
    half = len(listed) // 2
    if not half:
        return None
    rest = array.sweep.next_array()
    rest.write_record(record.replace(token=secrets.token_hex(8)))
    write_points(rest, dict(enumerate(listed[half:])))
    write_points(array, dict(enumerate(listed[:half])))
    return rest


def _place(array: Array, placements: Mapping[str, Mapping[str, Any]]) -> None:
    """Let the points of a list run where ``placements`` says, by their ids.

    No job has the list yet. Points that are not in ``placements`` stay as they are.
    """
    before, after = array.by_index(), {}
    for index, point in before.items():
        others = {key: value for key, value in point.changes.items() if not _is_placement(key)}
        changes = {**others, **placements[point.id]} if point.id in placements else point.changes
        after[index] = point.replace(changes=changes)
    if after != before:
        write_points(array, after)


def _is_placement(key: str) -> bool:
    return key.startswith("cluster.") and points.is_beside(key)


def _script(
    array: Array, sweep_record: SweepRecord, record: ArrayRecord, slurm: SlurmCommands
) -> tuple[str, list[str]]:
    """Return the batch script of an array, and sbatch's options. submitit makes the script, as for a run."""
    from submitit.slurm.slurm import _make_sbatch_string

    sweep, listed = array.sweep, array.by_index()
    if not listed:
        raise DamagedFileError(f"{array.points_path} has no points; use another --name")
    config = configs.load_config(sweep.base, site=False)
    for key, value in listed[min(listed)].changes.items():
        configs.put(config, key.split("."), value)
    values = executors.slurm_parameters(config, sweep.as_run, record.token)
    options = []
    if record.is_array:
        limit = sweep_record.max_running
        options.append(f"--array=0-{max(listed)}" + (f"%{limit}" if limit else ""))
        # The limit is for all arrays together: they run one after the other.
        before = [each.record() for each in sweep.arrays() if each.number < array.number]
        here = cluster_name.name_here() if limit else ""
        arrays = [each for each in before if each is not None and each.is_array and each.cluster in ("", here)]
        jobs = [each.job_id for each in arrays if each.job_id is not None]
        awaited_jobs = jobs[-1:] if limit else []
    else:
        awaited_jobs = []
    awaited_jobs += _jobs_awaited_by(listed.values(), sweep, slurm)
    if awaited_jobs:  # on the command line, where it would replace one that the config has for all points
        own = values["additional_parameters"].get("dependency")
        after = f"afterany:{':'.join(awaited_jobs)}"
        options.append(f"--dependency={own + ',' if own else ''}{after}")
    command = f"{executors.exec_python()} -u -m toolkit.plugins.sweep.element {shlex.quote(str(array.points_path))}"
    text = _make_sbatch_string(command=command, folder=sweep.path / "logs", **values)
    name = "%A_%a.out" if record.is_array else "%j.out"
    options.append(f"--output={sweep.path}/logs/{name}")
    return str(text), options


def _jobs_awaited_by(points: Iterable[Point], sweep: SweepDir, slurm: SlurmCommands) -> list[str]:
    """Return the jobs that must have ended before the first point can start. Others find it out when they start."""
    point = next((each for each in points if each.after is not None), None)
    if point is None or point.after is None:
        return []
    run = sweep.run_of(point)
    if run.config.exists() and run.after() is None:  # it has waited long enough, and runs again
        return []
    from toolkit.plugins.sweep import awaited

    return list(awaited.outlook(point.after, slurm.show_jobs).jobs)


def _refuse_circle(record: AfterRecord, sweep: SweepDir) -> None:
    """Raise RequestError if what is to be waited for waits for the sweep. (A run is newer than what it names.)"""
    way, seen = [*record.sweeps, *record.runs], set[str]()
    while way:
        path = way.pop()
        if path == str(sweep.path):
            raise RequestError(
                f"--after: {record.names()[0]} would wait for itself: the points are to be added to sweep "
                f"{sweep.name}, for which it waits; use another --name"
            )
        if path in seen:
            continue
        seen.add(path)
        # What the run, or the points of the sweep, in this folder wait for.
        if Path(path).parent.name == rundir.SWEEPS:
            points = sweep_folder.newest(SweepDir(Path(path)).arrays())
            others = [point.after for point, _, _ in points.values()]
        else:
            others = [RunDir(Path(path)).after()]
        for other in others:
            way += [] if other is None else [*other.sweeps, *other.runs]
