"""Submits the points of a sweep as job arrays: those that are new, and again those that have no result. Ends a sweep.

A submission that is killed loses no point and doubles none. First the run folders are made, then a record lists them
with a token and without a job id, then sbatch is called, then the id is written. The next call of the command finds a
record without an id and asks Slurm for the job of its script. If there is none, its runs are submitted with another
token. If the first sbatch was only slow, its jobs find that the runs have another owner, and end.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shlex
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit import config as configs
from toolkit.base import fsio, logs
from toolkit.base.errors import RequestError, SlurmRefusedError
from toolkit.config import JobConfig
from toolkit.config.layers import dump_configs
from toolkit.files import rundir
from toolkit.files.run_files import AfterRecord, RunState, SweepPoint
from toolkit.files.rundir import RunDir
from toolkit.plugins.sweep import awaited, learnt, local, request, sweep_folder
from toolkit.plugins.sweep.axes import refuse_many
from toolkit.plugins.sweep.request import CheckedPoint, Options, SweepRequest
from toolkit.plugins.sweep.sweep_folder import ArrayRecord, Point, SweepDir, SweepRecord
from toolkit.run.attempt.journal import write_ended
from toolkit.run.job import nodes
from toolkit.run.prepare import snapshot
from toolkit.run.prepare.new_run import load, refuse_unfit
from toolkit.run.records import ownership, stop_request, submitted_run
from toolkit.run.records.stop_request import Intent
from toolkit.run.records.submitted_run import RunJobs, RunStanding
from toolkit.run.requeue.follow_up import RUN_VARIABLE
from toolkit.run.submission import executors
from toolkit.run.submission import submit as single
from toolkit.run.submission.executors import choose_executor
from toolkit.run.submission.handle import attach
from toolkit.slurm import cluster_name
from toolkit.slurm.commands import Slurm, SlurmCommands
from toolkit.slurm.jobs import base_id

#: The most jobs, one a point, where a site has no job arrays. More would overload its controller.
MOST_SINGLE_JOBS = 200
_NO_METRIC = "runs are compared by --metric, such as eval/accuracy, or -eval/loss: less is better"

log = logs.get(__name__)


@dataclass(frozen=True)
class Submitted:
    """What a call has submitted. ``known`` points were in the sweep before."""

    sweep: SweepDir
    points: Sequence[CheckedPoint]
    new: int
    jobs: Sequence[str]

    @property
    def known(self) -> int:
        return len(self.points) - self.new


def check(
    asked: SweepRequest, project: Path, executor: str, waits_for: AfterRecord | None = None
) -> list[CheckedPoint]:
    """Return all points of the request. Raises ConfigError or RequestError before anything is written."""
    refuse_unfit(rundir.runs_root())
    if executor == "debug":
        raise RequestError("executor: a sweep cannot be debugged in this process; submit one of its points with debug")
    # Optuna learns from the points that the sweep has tried.
    before: list[learnt.Tried] = []
    metric = ""
    if asked.options.optuna is not None:
        config = _config(asked, project, ())
        sweep = _sweep(asked, config)
        metric = _metric(asked, config) or getattr(sweep.record(), "metric", None) or ""
        if not metric:
            raise RequestError(f"--optuna: {_NO_METRIC}")
        before = learnt.tried(sweep, metric)
    return request.checked(asked, project, executor, waits_for, before, metric)


def _config(asked: SweepRequest, project: Path, found: Sequence[CheckedPoint]) -> JobConfig:
    """Return the config of the first point. Without points, return the one without the swept keys."""
    return found[0].config if found else load(asked.config, asked.fixed, project, sweep=True)


def _sweep(asked: SweepRequest, config: JobConfig) -> SweepDir:
    return sweep_folder.of_name(asked.options.name or config.name)


def _metric(asked: SweepRequest, config: JobConfig) -> str | None:
    return asked.options.metric or config.checkpoint.keep_best


def submit(
    asked: SweepRequest,
    project: Path,
    executor: str = "auto",
    slurm: SlurmCommands | None = None,
    after: str | Sequence[str] = (),
) -> Submitted:
    """Submit the points of the request that its sweep does not have yet. Raises ToolkitError.

    An interrupted submission of the sweep is completed first. New points start when ``after`` has completed.
    """
    chosen, slurm = choose_executor(executor), slurm or Slurm()
    waits_for = single.awaited(after, chosen, slurm.show_jobs)
    found = check(asked, project, chosen, waits_for)
    config = _config(asked, project, found)
    sweep = _sweep(asked, config)
    if waits_for is not None:
        _refuse_circle(waits_for, sweep)
    with sweep.locked():
        if asked.options.optuna is not None:  # another submitter may have drawn since then
            found = check(asked, project, chosen, waits_for)
        size = _array_size(slurm, asked.options, len(found)) if chosen == "slurm" else len(found)
        record = _prepare(sweep, asked, project, config)
        new = _new_points(sweep, record, found)
        sender = _Sender(sweep, record, chosen, slurm, size)
        jobs, _ = sender.complete()
        jobs += sender.send_new(new, waits_for)
    return Submitted(sweep, found, len(new), jobs)


def retry(sweep: SweepDir, points: Sequence[Point], slurm: SlurmCommands | None = None) -> list[str]:
    """Submit these points again, and what an interrupted submission left. Return the ids of the arrays.

    Each continues from its run's last checkpoint. Raises RequestError for a sweep without its record.
    """
    record = sweep.record()
    if record is None:
        raise RequestError(f"sweep {sweep.name}: {sweep.path / 'sweep.json'} is missing; submit the sweep again")
    if not sweep.arrays():
        return []
    with sweep.locked():
        # The points run where the newest ones ran.
        executor, slurm = [array.executor for array in sweep.arrays().values()][-1], slurm or Slurm()
        size = slurm.settings().max_array_size if executor == "slurm" else len(points)
        sender = _Sender(sweep, record, executor, slurm, size)
        jobs, completed = sender.complete()
        return jobs + sender.send_again([point for point in points if point.id not in completed])


def _array_size(slurm: SlurmCommands, options: Options, count: int) -> int:
    """Return how many points an array may have; at most 1 where the site has no arrays."""
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
    return size


def _prepare(sweep: SweepDir, asked: SweepRequest, project: Path, config: JobConfig) -> SweepRecord:
    """Write what all points share: the sources, unless they are there, and what was asked for. Return the record."""
    before, now = sweep.record(), time.time()
    record = before or SweepRecord(str(asked.config), now, rundir.id_time(now), metric=None, max_running=None)
    # What this call says replaces what earlier ones said.
    said = {"metric": _metric(asked, config), "max_running": asked.options.max_running}
    record = record.replace(
        config=str(asked.config), **{key: value for key, value in said.items() if value is not None}
    )
    fsio.make_dir(sweep.path / "logs")
    if config.job != configs.FOREIGN_JOB:
        snapshot.take_first(project, sweep.path)
    elif snapshot.home_of(sweep.path) is None:
        snapshot.note_folder(sweep.as_run)
    if record != before:
        sweep.write_record(record)
    return record


def _new_points(sweep: SweepDir, record: SweepRecord, found: Sequence[CheckedPoint]) -> list[tuple[Point, JobConfig]]:
    """Return the points that the sweep does not have, with their configs. Raises DamagedFileError, or RequestError."""
    known = sweep.points()
    ids, runs = {point.id for point in known}, {point.run for point in known}
    new = []
    for each in found:
        if each.id in ids:
            continue
        # A run's id ends with eight digits, of which two points may share some. Another sweep of the same second has
        # others for an equal point.
        digits = hashlib.sha256(f"{sweep.name} {each.id}".encode()).hexdigest()
        names = (f"{each.config.name}/{record.stamp}-{digits[at : at + 8]}" for at in range(9))
        run = next(name for name in names if name not in runs)
        runs.add(run)
        new.append((Point(each.id, run, each.values), each.config))
    refuse_many(len(known) + len(new), f"sweep {sweep.name}")
    return new


# --------------------------------------------------------------------------------------------------------------- arrays


class _Sender:
    """Submits points of a sweep as arrays of at most ``size``."""

    def __init__(self, sweep: SweepDir, record: SweepRecord, executor: str, slurm: SlurmCommands, size: int) -> None:
        self._sweep, self._record, self._executor, self._slurm, self._size = sweep, record, executor, slurm, size

    def complete(self) -> tuple[list[str], set[str]]:
        """Complete interrupted submissions. Return the new jobs, and the ids of all points that have one by now."""
        queued, left, dead = list[Point](), list[Point](), list[Path]()
        for path, array in self._sweep.arrays().items():
            if array.job_id is not None:
                continue
            script = path.with_suffix(".sh")
            job = self._slurm.job_of_script(str(script)) if script.exists() else None
            own = [point for point in array.points if self._is_left(point, array.token)]
            if job is not None:
                self._note(path, array, job)
                queued += own
            else:
                left += own
                dead.append(path)
        jobs = self.send_again(left)
        _remove(dead)
        return jobs, {point.id for point in (*queued, *left)}

    def _is_left(self, point: Point, token: str) -> bool:
        """True if the point belongs to its interrupted submission with this token still."""
        run = self._sweep.run_of(point)
        owner = run.owner()
        return (owner is None or owner.token == token) and run.config.exists() and run.result() is None

    def send_new(self, points: Sequence[tuple[Point, JobConfig]], waits_for: AfterRecord | None) -> list[str]:
        """Make the runs of new points and submit them. Leave nothing of those that Slurm refuses."""
        jobs, left = list[str](), len(points)
        for array in self._arrays(points):
            texts = dump_configs(config for _, config in array)
            runs = [
                _make_run(self._sweep, self._record, point, text, waits_for)
                for (point, _), text in zip(array, texts, strict=True)
            ]
            try:
                sent = self._send(array)
            except SlurmRefusedError as error:
                for run in runs:
                    fsio.remove_tree(run.path)
                how = "the same command submits them when there is room, or with fewer values or other cluster.* values"
                raise self._not_submitted(left, error, how) from error
            jobs += self._note(*sent)
            left -= len(array)
        return jobs

    def send_again(self, points: Sequence[Point]) -> list[str]:
        """Submit runs that exist. Those that Slurm refuses stay as they are."""
        jobs, left = list[str](), len(points)
        for each in points:
            rundir.refuse_code_of_others(self._sweep.run_of(each))
        known = [(each, configs.load_config(self._sweep.run_of(each).config, site=False)) for each in points]
        for array in self._arrays(known):
            folders = [self._sweep.run_of(point).path for point, _ in array]
            names = ("owner.json", "status.json", "intent.json", "nodes.json", "result.json")
            try:
                with fsio.unchanged_on_error(*(folder / name for folder in folders for name in names)):
                    sent = self._send(array)
            except SlurmRefusedError as error:
                how = f"`toolkit sweep retry {self._sweep.name}` submits them when there is room"
                raise self._not_submitted(left, error, how) from error
            jobs += self._note(*sent)
            left -= len(array)
        return jobs

    def _not_submitted(self, count: int, error: SlurmRefusedError, how: str) -> RequestError:
        return RequestError(
            f"sweep {self._sweep.name}: {count} points are not submitted: {error}\nNothing is lost: {how}"
        )

    def _arrays(self, points: Sequence[tuple[Point, JobConfig]]) -> Iterator[Sequence[tuple[Point, JobConfig]]]:
        """Yield the points of each array. All of its jobs ask Slurm for the same."""
        if self._executor == "local":
            if points:
                yield points
            return
        alike: dict[str, list[tuple[Point, JobConfig]]] = {}
        for point, config in points:
            asked = repr(executors.slurm_parameters(config, self._sweep.as_run, ""))
            alike.setdefault(asked, []).append((point, config))
        size = max(1, self._size)
        for group in alike.values():
            for start in range(0, len(group), size):
                yield group[start : start + size]

    def _send(self, points: Sequence[tuple[Point, JobConfig]]) -> tuple[Path, ArrayRecord, str]:
        """Submit runs as one array. Return its record, which has no job yet, and its job. Raises SlurmError."""
        sweep, path, token = self._sweep, self._sweep.next_array(), secrets.token_hex(8)
        is_array = self._executor == "slurm" and self._size > 1
        array = ArrayRecord(tuple(point for point, _ in points), token, self._executor, is_array=is_array)
        fsio.write_json(path, array.to_json())
        taken: dict[RunDir, int] = {}
        try:
            for point in array.points:
                run = sweep.run_of(point)
                taken[run] = ownership.take(run, ownership.number_of(run))
                ownership.submit_as(run, self._executor, taken[run], token, durable=False)
                stop_request.clear(run)
                nodes.forget(run)
                run.clear_result()
                executors.note_queued(run)
            job = local.start(path) if self._executor == "local" else self._sbatch(path, array, points[0][1])
        except BaseException as error:
            for run, number in taken.items():
                run.give_back_number(number)
            if isinstance(error, SlurmRefusedError):
                _remove([path])
            raise
        return path, array, job

    def _note(self, path: Path, array: ArrayRecord, job: str) -> list[str]:
        """Record the job of an array, for each of its runs and then for all. Return it, if it is one of Slurm."""
        for index, point in enumerate(array.points):
            run = self._sweep.run_of(point)
            owner = run.owner()
            if owner is not None and owner.token == array.token:
                ownership.note_jobs(run, owner, f"{job}_{index}" if array.is_array else job, durable=False)
        cluster = cluster_name.name_here() if array.executor == "slurm" else ""
        fsio.write_json(path, array.replace(job_id=job, cluster=cluster).to_json())
        return [job] if array.executor == "slurm" else []

    def _sbatch(self, path: Path, array: ArrayRecord, config: JobConfig) -> str:
        """Write the array's batch script and submit it; return the job's id."""
        values = executors.slurm_parameters(config, self._sweep.as_run, array.token)
        limit = self._record.max_running if array.is_array else None
        options = [f"--output={self._sweep.path}/logs/{'%A_%a' if array.is_array else '%j'}.out"]
        if array.is_array:
            options.append(f"--array=0-{len(array.points) - 1}" + (f"%{limit}" if limit else ""))
        waits_for = [*(self._last_array() if limit else []), *self._jobs_awaited_by(array.points)]
        if waits_for:  # on the command line, where it would replace one that the config has for all points
            own = values["additional_parameters"].get("dependency")
            options.append(f"--dependency={own + ',' if own else ''}afterany:{':'.join(waits_for)}")
        script = path.with_suffix(".sh")
        fsio.write_atomic(script, _script(self._sweep, array, values))
        with snapshot.at_home(self._sweep.path):
            return self._slurm.sbatch([*options, str(script)])

    def _last_array(self) -> list[str]:
        """Return the job of the array before. The limit is for all arrays together: they run one after the other."""
        here = cluster_name.name_here()
        arrays = [each for each in self._sweep.arrays().values() if each.is_array and each.cluster in ("", here)]
        return [each.job_id for each in arrays if each.job_id is not None][-1:]

    def _jobs_awaited_by(self, points: Sequence[Point]) -> list[str]:
        """Return the jobs that must have ended before the first point can start. Others find it out when they start."""
        records = (self._sweep.run_of(point).after() for point in points)
        record = next((each for each in records if each is not None), None)
        return [] if record is None else list(awaited.outlook(record, self._slurm.show_jobs).jobs)


def _script(sweep: SweepDir, array: ArrayRecord, values: Mapping[str, Any]) -> str:
    """Return the batch script of an array. Each job supervises its run, and logs into that run's folder."""
    from submitit.slurm.slurm import _make_sbatch_string

    run, job = f"${RUN_VARIABLE}", "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
    which = [
        "runs=(",
        *(shlex.quote(point.run) for point in array.points),
        ")",
        f"export {RUN_VARIABLE}={shlex.quote(str(sweep.path.parent.parent))}/${{runs[${{SLURM_ARRAY_TASK_ID:-0}}]}}",
        f'[ -e "{run}/config.yaml" ] || {{ echo "there is no {run}/config.yaml"; exit 1; }}',
        f'exec >> "{run}/submitit/{job}_0_log.out" 2>&1',
    ]
    ignore_signals, *others = values["setup"]
    command = f'{executors.exec_python()} -m toolkit supervise "{run}/config.yaml"'
    values = {**values, "setup": [ignore_signals, *which, *others]}
    return str(_make_sbatch_string(command=command, folder=sweep.path / "logs", **values))


def _make_run(sweep: SweepDir, record: SweepRecord, point: Point, config: str, waits_for: AfterRecord | None) -> RunDir:
    """Make the run of a point, whatever an interrupted submission has left of it. No job knows it yet.

    There may be 2,000 of them: no file is flushed, here and later.
    """
    run, code = sweep.run_of(point), rundir.code_in(sweep.path)
    if run.owner_number() is not None:
        raise RequestError(
            f"run {run.id} is a point of sweep {sweep.name}, and no record in {sweep.path / 'arrays'} has it; use "
            "another --name"
        )
    for folder in (run.logs, run.checkpoints, run.tensorboard, run.submitit):
        fsio.make_dir(folder)
    if code.is_dir():
        rundir.link_code(run.path, os.path.relpath(code, run.path / rundir.COPIES))
    else:
        snapshot.note_folder(run)
    place = SweepPoint(sweep.name, point.id, point.values, metric=record.metric)
    fsio.write_json(run.path / "point.json", place.to_json(), durable=False)
    if waits_for is not None:
        fsio.write_json(run.after_path, waits_for.to_json(), durable=False)
    fsio.write_atomic(run.config, config, durable=False)
    return run


def _remove(arrays: Iterable[Path]) -> None:
    for path in arrays:
        path.unlink(missing_ok=True)
        path.with_suffix(".sh").unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------------------------- stop


def stop(sweep: SweepDir, slurm: SlurmCommands | None = None) -> tuple[int, int]:
    """Cancel the points that wait, and stop those at work; return how many of each.

    A point at work commits a checkpoint and ends. Slurm is called at most three times, for all of them. Raises
    RequestError where their jobs are on another cluster.
    """
    runs = [run for point in sweep.points() if (run := sweep.run_of(point)).result() is None and run.path.is_dir()]
    owners = {run: run.owner() for run in runs}
    jobs = {
        run: submitted_run.of(run) for run, owner in owners.items() if owner is not None and owner.executor == "slurm"
    }
    _refuse_elsewhere(sweep, [*jobs.values()])
    waiting, working = list[RunDir](), list[RunDir]()
    slurm = slurm or Slurm()
    before = _standings(jobs, slurm)
    for run, owner in owners.items():
        if owner is not None and owner.executor == "local" and not (handle := attach(run)).is_over():
            (working if owner.serves else waiting).append(run)
            handle.stop()
        elif run in before and not before[run].is_over:
            (waiting if ownership.waits(before[run].job) else working).append(run)
            # The request comes first: a job that starts at this moment finds it.
            stop_request.ask(run, Intent.STOP)
    queued = {run: jobs[run] for run in waiting if run in jobs}
    if queued:
        slurm.cancel_waiting(sorted({base_id(id_) for of_run in queued.values() for id_ in of_run.ids}))
        # A job may have started before it could be cancelled: then its supervisor writes the result.
        for run, stand in _standings(queued, slurm).items():
            if stand.is_over and run.result() is None:
                write_ended(run, RunState.STOPPED, "stopped while it waited in the queue")
    return len(waiting), len(working)


def _standings(jobs: Mapping[RunDir, RunJobs], slurm: SlurmCommands) -> dict[RunDir, RunStanding]:
    """Return how the jobs of each run stand. Asks Slurm once."""
    wanted = sorted({id_ for of_run in jobs.values() for id_ in of_run.ids})
    answers = slurm.show_jobs(wanted) if wanted else {}
    return {run: submitted_run.of_jobs(of_run, answers) for run, of_run in jobs.items()}


def _refuse_elsewhere(sweep: SweepDir, jobs: Sequence[RunJobs]) -> None:
    """Raise RequestError if one of the jobs is on another cluster."""
    here = cluster_name.name_here() if any(job.cluster for job in jobs) else ""
    there = next((job.cluster for job in jobs if job.is_elsewhere(here)), None)
    if there is not None:
        raise RequestError(
            f"sweep {sweep.name} has jobs on the cluster {there}, and this is {here}: "
            f"`toolkit sweep stop {sweep.name}` there stops it"
        )


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
            other = SweepDir(Path(path))
            runs = [other.run_of(point) for point in other.points()]
        else:
            runs = [RunDir(Path(path))]
        for waits_for in (run.after() for run in runs):
            way += [] if waits_for is None else [*waits_for.sweeps, *waits_for.runs]
