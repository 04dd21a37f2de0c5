"""Submits the points of a sweep as job arrays: those that are new, and again those that have no result. Ends a sweep.

A submission that is killed loses no point and doubles none. First the run folders are made, then a record lists them
with a token and without a job id, then sbatch is called, then the id is written. The next call of the command finds a
record without an id and asks Slurm for the job of its script. If there is none, its runs are submitted with another
token. If the first sbatch was only slow, its jobs find that the runs have another owner, and end.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from toolkit import config as configs
from toolkit.base import fsio, logs
from toolkit.base.errors import RequestError, RunLockedError, SlurmError, SlurmRefusedError, ToolkitError
from toolkit.base.procfs import Liveness
from toolkit.config import JobConfig, yaml_core
from toolkit.config.script_arguments import escaped
from toolkit.files import rundir
from toolkit.files.run_files import DependencyRecord, RunState, SweepPoint
from toolkit.files.rundir import RunDir
from toolkit.plugins.sweep import awaited, axes, local, request, sweep_folder
from toolkit.plugins.sweep.request import CheckedPoint, Options, SweepRequest
from toolkit.plugins.sweep.sweep_folder import ArrayRecord, Point, SweepDir, SweepRecord
from toolkit.run.attempt.journal import write_ended
from toolkit.run.job import nodes
from toolkit.run.prepare import snapshot
from toolkit.run.prepare.new_run import load, refuse_unfit
from toolkit.run.records import ownership, submitted_run, user_requests
from toolkit.run.records.submitted_run import RunJobs, RunLiveness
from toolkit.run.records.user_requests import Intent
from toolkit.run.requeue.follow_up import RUN_VARIABLE
from toolkit.run.submission import executors
from toolkit.run.submission import submit as single
from toolkit.run.submission.executors import choose_executor
from toolkit.slurm import cluster_name
from toolkit.slurm.commands import Slurm, SlurmCommands
from toolkit.slurm.jobs import base_id

#: The most jobs, one a point, where a site has no job arrays. More would overload its controller.
MOST_SINGLE_JOBS = 200

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
    asked: SweepRequest, project: Path, executor: str, waits_for: DependencyRecord | None = None
) -> list[CheckedPoint]:
    """Return all points of the request. Raises ConfigError or RequestError before anything is written."""
    refuse_unfit(rundir.runs_root())
    if executor == "debug":
        raise RequestError("executor: a sweep cannot be debugged in this process; submit one of its points with debug")
    # Optuna learns from the points that the sweep has tried.
    before: list[axes.Tried] = []
    metric = ""
    if asked.options.optuna is not None:
        config = load(asked.config, asked.fixed, project, sweep=True)
        sweep = sweep_folder.of_name(asked.options.name or config.name)
        metric = _metric(asked, config) or getattr(sweep.record(), "metric", None) or ""
        if not metric:
            raise RequestError(
                "--optuna: runs are compared by --metric, such as eval/accuracy, or -eval/loss: less is better"
            )
        before = axes.tried(sweep, metric)
    return request.check_points(asked, project, executor, waits_for, before, metric)


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
    config = found[0].config if found else load(asked.config, asked.fixed, project, sweep=True)
    sweep = sweep_folder.of_name(asked.options.name or config.name)
    if waits_for is not None:
        _refuse_circle(waits_for, sweep)
    with sweep.locked():
        if asked.options.optuna is not None:  # another submitter may have drawn since then
            found = check(asked, project, chosen, waits_for)
        size = _array_size(slurm, asked.options, len(found)) if chosen == "slurm" else len(found)
        record = _prepare(sweep, asked, project, config)
        sender = _Sender(sweep, record, chosen, slurm, size)
        sender.complete()
        new = _new_points(sweep, record, found)
        sender.send_new(new, waits_for)
    return Submitted(sweep, found, len(new), sender.jobs)


def retry(sweep: SweepDir, points: Sequence[Point], slurm: SlurmCommands | None = None) -> tuple[list[str], set[str]]:
    """Submit those of the points again that have ended, and what an interrupted submission left.

    Return the ids of the arrays and of all points in them. Raises RequestError for a sweep without its record.
    """
    record = sweep.record()
    if record is None:
        raise RequestError(f"sweep {sweep.name}: {sweep.path / 'sweep.json'} is missing; submit the sweep again")
    if not sweep.arrays():
        return [], set()
    with sweep.locked():
        # The points run where the newest ones ran.
        executor, slurm = [array.executor for array in sweep.arrays().values()][-1], slurm or Slurm()
        size = slurm.settings().max_array_size if executor == "slurm" else len(points)
        sender = _Sender(sweep, record, executor, slurm, size)
        sender.complete()
        sender.send_again(_ended(sweep, points, slurm))
        return sender.jobs, sender.sent


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
    record = before or SweepRecord(str(asked.config), now, rundir.id_time(now))
    # What this call asks for replaces what earlier ones asked for.
    new = {"metric": _metric(asked, config), "max_running": asked.options.max_running}
    record = record.replace(config=str(asked.config), **{key: value for key, value in new.items() if value is not None})
    fsio.make_dir(sweep.path / "logs")
    if config.job != configs.SCRIPT_JOB:
        snapshot.take_if_missing(project, sweep.path)
    elif snapshot.submit_folder(sweep.path) is None:
        snapshot.note_folder(sweep.as_run)
    if record != before:
        fsio.write_json(sweep.path / "sweep.json", record.to_json())
    return record


def _new_points(sweep: SweepDir, record: SweepRecord, found: Sequence[CheckedPoint]) -> list[_Unsent]:
    """Return the points that the sweep does not have. Raises DamagedFileError, or RequestError."""
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
        name = next(name for name in names if name not in runs)
        runs.add(name)
        point = Point(each.id, name, each.values)
        new.append(_Unsent(point, sweep.run_of(point), each.config))
    axes.refuse_many(len(known) + len(new), f"sweep {sweep.name}")
    return new


@dataclass(frozen=True)
class _Unsent:
    """A point to be submitted. A submitter who takes its run after the owner of ``number`` keeps it."""

    point: Point
    run: RunDir
    config: JobConfig
    number: int = 0


class _Sender:
    """Submits points of a sweep as arrays of at most ``size``. ``jobs`` and ``sent`` are the ids so far."""

    def __init__(self, sweep: SweepDir, record: SweepRecord, executor: str, slurm: SlurmCommands, size: int) -> None:
        self._sweep, self._record, self._executor, self._slurm, self._size = sweep, record, executor, slurm, size
        self.jobs, self.sent = list[str](), set[str]()

    def complete(self) -> None:
        """Complete interrupted submissions. Their records keep only points that no other record has."""
        self.send_again(_left(self._sweep, self._slurm))
        arrays = self._sweep.arrays()
        sent = {point.id for array in arrays.values() if array.job_id is not None for point in array.points}
        for path, array in arrays.items():
            if array.job_id is not None:
                continue
            # A run without a config was being removed, because Slurm had refused it: the same command makes it anew.
            rest = [each for each in array.points if each.id not in sent and self._sweep.run_of(each).config.exists()]
            if rest:
                fsio.write_json(path, array.replace(points=tuple(rest)).to_json())
            else:
                _remove(path)

    def send_new(self, points: Sequence[_Unsent], waits_for: DependencyRecord | None) -> None:
        """Make the runs of new points and submit them. Leave nothing of those that Slurm refuses."""
        how = "the same command submits them when there is room, or with fewer values or other cluster.* values"
        with self._explained(len(points), how):
            for array in self._arrays(points):
                texts = _dump(each.config for each in array)
                _for_each(partial(_make_run, self._sweep, self._record, waits_for), zip(array, texts, strict=True))
                self._send(array, is_new=True)

    def send_again(self, points: Sequence[_Unsent]) -> None:
        """Submit runs that exist, each from its last checkpoint. Those that Slurm refuses stay as they are."""
        for each in points:
            rundir.refuse_untrusted_code(each.run)
        with self._explained(len(points), f"`toolkit sweep retry {self._sweep.name}` submits them when there is room"):
            for array in self._arrays(points):
                self._send(array, is_new=False)

    @contextlib.contextmanager
    def _explained(self, count: int, how: str) -> Iterator[None]:
        """Raise RequestError that says what to do if Slurm refuses some of the ``count`` points."""
        before = len(self.sent)
        try:
            yield
        except SlurmRefusedError as error:
            left = count - (len(self.sent) - before)
            raise RequestError(
                f"sweep {self._sweep.name}: {left} points are not submitted: {error}\nNothing is lost: {how}"
            ) from error

    def _arrays(self, points: Sequence[_Unsent]) -> Iterator[Sequence[_Unsent]]:
        """Yield the points of each array. All of its jobs ask Slurm for the same."""
        if self._executor == "local":
            if points:
                yield points
            return
        alike: dict[str, list[_Unsent]] = {}
        for each in points:
            asked = repr(executors.slurm_parameters(each.config, self._sweep.as_run, ""))
            alike.setdefault(asked, []).append(each)
        size = max(1, self._size)
        for group in alike.values():
            for start in range(0, len(group), size):
                yield group[start : start + size]

    def _send(self, points: Sequence[_Unsent], *, is_new: bool) -> None:
        """Submit runs as one array, except those that somebody else submits at this moment. Raises SlurmError."""
        taken = list[tuple[_Unsent, int]]()
        for each in points:
            try:
                taken.append((each, ownership.take(each.run, each.number)))
            except RunLockedError as error:
                log.warning("%s", error)
        if not taken:
            return
        token = secrets.token_hex(8)
        path, is_array = self._sweep.next_array(token), self._executor == "slurm" and self._size > 1
        array = ArrayRecord(tuple(each.point for each, _ in taken), token, self._executor, is_array=is_array)
        fsio.write_json(path, array.to_json())

        def become_owner(each: _Unsent, number: int) -> None:
            ownership.submit_as(each.run, self._executor, number, token)
            executors.note_queued(each.run)

        try:
            with contextlib.ExitStack() as stack:
                for each, number in () if is_new else taken:
                    stack.enter_context(ownership.restored_on_error(each.run, number))
                    user_requests.clear_intent(each.run)
                    nodes.forget(each.run)
                    # Before this submission is the owner: who knows of it must find no earlier result.
                    each.run.clear_result()
                _for_each(become_owner, taken)
                job = local.start(path) if self._executor == "local" else self._sbatch(path, array, points[0].config)
        except SlurmRefusedError:
            # The record goes last: it names what is left if this is interrupted.
            for each, _ in taken if is_new else ():
                each.run.config.unlink(missing_ok=True)
                fsio.remove_tree(each.run.path)
            _remove(path)
            raise
        _note(self._sweep, path, array, job)
        self.sent |= {point.id for point in array.points}
        if self._executor == "slurm":
            self.jobs.append(job)
            with contextlib.suppress(SlurmError):  # it only says what Slurm's queue says, too
                executors.warn_if_held(self._slurm.show_job(job), f"toolkit sweep stop {self._sweep.name}")

    def _sbatch(self, path: Path, array: ArrayRecord, config: JobConfig) -> str:
        """Write the array's batch script and submit it; return the job's id."""
        values = executors.slurm_parameters(config, self._sweep.as_run, array.token)
        limit = self._record.max_running if array.is_array else None
        options = [f"--output={self._sweep.path}/logs/{'%A_%a' if array.is_array else '%j'}.out"]
        if array.is_array:
            options.append(f"--array=0-{len(array.points) - 1}" + (f"%{limit}" if limit else ""))
        waits_for: list[str] = []
        if limit:  # it is for all arrays together: they run one after the other
            here = cluster_name.name_here()
            arrays = [each for each in self._sweep.arrays().values() if each.is_array and each.cluster in ("", here)]
            waits_for = [each.job_id for each in arrays if each.job_id is not None][-1:]
        # Jobs that must have ended before the first point can start. The other points find theirs when they start.
        records = (self._sweep.run_of(point).dependencies() for point in array.points)
        if (record := next((each for each in records if each is not None), None)) is not None:
            waits_for += awaited.prerequisites(record, self._slurm.show_jobs).jobs
        if waits_for:  # on the command line, where it would replace one that the config has for all points
            other = values["additional_parameters"].get("dependency")
            options.append(f"--dependency={other + ',' if other else ''}afterany:{':'.join(waits_for)}")
        script = path.with_suffix(".sh")
        fsio.write_atomic(script, _script(self._sweep, array, values))
        with snapshot.in_submit_folder(self._sweep.path):
            return self._slurm.sbatch([*options, str(script)])


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
    command = f'{executors.python_exec_line()} -m toolkit supervise "{run}/config.yaml"'
    values = {**values, "setup": [ignore_signals, *which, *others]}
    return str(_make_sbatch_string(command=command, folder=sweep.path / "logs", **values))


def _for_each(write: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
    """Write the files of each run, of some at a time: a server's disk takes milliseconds for each of 10,000 flushes."""
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda each: write(*each), arguments):
            pass


def _dump(configs_: Iterable[JobConfig]) -> Iterator[str]:
    """Yield the text of each config. What many of them have in common is written once: that takes 20 ms."""
    known: dict[str, str] = {}
    for config in configs_:
        text = ""
        for key, value in escaped(asdict(config)).items():
            section = repr((key, value))
            if section not in known:
                known[section] = yaml_core.dump({key: value})
            text += known[section]
        yield text


def _make_run(
    sweep: SweepDir, record: SweepRecord, waits_for: DependencyRecord | None, new: _Unsent, config: str
) -> None:
    """Make the run of a point, in place of what an interrupted submission has left of it. No job knows it yet."""
    run, code = new.run, rundir.code_in(sweep.path)
    if run.config.exists() and run.owner_number() is not None:
        raise RequestError(
            f"run {run.id} is a point of sweep {sweep.name}, and no record in {sweep.path / 'arrays'} has it; use "
            "another --name"
        )
    fsio.remove_tree(run.path)
    for folder in (run.logs, run.checkpoints, run.tensorboard, run.submitit):
        fsio.make_dir(folder)
    if code.is_dir():
        rundir.link_code(run.path, os.path.relpath(code, run.path / rundir.COPIES))
    else:
        snapshot.note_folder(run)
    place = SweepPoint(sweep.name, new.point.id, new.point.values, metric=record.metric)
    fsio.write_json(run.path / "point.json", place.to_json())
    if waits_for is not None:
        fsio.write_json(run.after_path, waits_for.to_json())
    fsio.write_atomic(run.config, config)


def _note(sweep: SweepDir, path: Path, array: ArrayRecord, job: str) -> None:
    """Record the job of an array, for each of its runs and then for all."""

    def note(index: int, point: Point) -> None:
        run = sweep.run_of(point)
        owner = run.owner()
        if owner is not None and owner.token == array.token:
            ownership.note_jobs(run, owner, f"{job}_{index}" if array.is_array else job)

    _for_each(note, enumerate(array.points))
    cluster = cluster_name.name_here() if array.executor == "slurm" else ""
    fsio.write_json(path, array.replace(job_id=job, cluster=cluster).to_json())


def _remove(array: Path) -> None:
    array.unlink(missing_ok=True)
    array.with_suffix(".sh").unlink(missing_ok=True)


@contextlib.contextmanager
def _spared(run: RunDir, unread: dict[RunDir, Exception]) -> Iterator[None]:
    """Note a run with a file that cannot be read, which must not keep other runs from being sent or stopped."""
    try:
        yield
    except (ToolkitError, OSError) as error:
        unread[run] = error


def _left(sweep: SweepDir, slurm: SlurmCommands) -> list[_Unsent]:
    """Record the jobs of interrupted submissions. Return the points that have none, each once."""
    left, unread = dict[RunDir, _Unsent](), dict[RunDir, Exception]()
    for path, array in sweep.arrays().items():
        if array.job_id is not None:
            continue
        script = path.with_suffix(".sh")
        job = slurm.job_of_script(str(script)) if script.exists() else None
        if job is not None:
            _note(sweep, path, array, job)
            continue
        for point in array.points:
            run = sweep.run_of(point)
            with _spared(run, unread):
                if (jobs := submitted_run.run_jobs(run)).is_elsewhere():
                    log.warning("run %s is not submitted again: its job is on the cluster %s", run.id, jobs.cluster)
                    continue
                number, owner = ownership.number_of(run), run.owner()
                is_ours = owner is None or owner.token == array.token
                if is_ours and run.result() is None and run.config.exists():
                    left[run] = _Unsent(point, run, configs.load_config(run.config, site=False), number)
    _warn(unread)
    return list(left.values())


def _ended(sweep: SweepDir, points: Sequence[Point], slurm: SlurmCommands) -> list[_Unsent]:
    """Return those of the points that have ended and are not completed. Asks Slurm once."""
    ended, unread = list[_Unsent](), dict[RunDir, Exception]()
    runs = {sweep.run_of(point): point for point in points}
    # The numbers come first: a run that is resumed from now on belongs to that submission.
    numbers = {run: ownership.number_of(run) for run in runs}
    stands = _standings(runs, slurm, unread)
    for run, stand in stands.items():
        with _spared(run, unread):
            result = run.result()
            if stand.is_over if result is None else result.state is not RunState.COMPLETED:
                config = configs.load_config(run.config, site=False)
                ended.append(_Unsent(runs[run], run, config, numbers[run]))
    _warn(unread)
    return ended


def _warn(unread: Mapping[RunDir, Exception]) -> None:
    for run, error in unread.items():
        log.warning("run %s is left out: %s", run.id, error)


def _standings(
    runs: Iterable[RunDir], slurm: SlurmCommands, unread: dict[RunDir, Exception]
) -> dict[RunDir, RunLiveness]:
    """Return how the jobs or processes of each run stand. Asks Slurm once."""
    stands, jobs = dict[RunDir, RunLiveness](), dict[RunDir, RunJobs]()
    for run in runs:
        with _spared(run, unread):
            owner, of_run = run.owner(), submitted_run.run_jobs(run)
            executor = "slurm" if owner is None else owner.executor
            if executor == "slurm" and of_run.ids:
                jobs[run] = of_run
            else:
                stands[run] = submitted_run.liveness_without_job(run, executor)
    here = cluster_name.name_here() if any(of_run.cluster for of_run in jobs.values()) else ""
    wanted = sorted({id_ for of_run in jobs.values() if not of_run.is_elsewhere(here) for id_ in of_run.ids})
    answers = slurm.show_jobs(wanted) if wanted else {}
    for run, of_run in jobs.items():
        with _spared(run, unread):
            stands[run] = submitted_run.liveness_by_jobs(of_run, answers, here)
    return stands


def stop(sweep: SweepDir, slurm: SlurmCommands | None = None) -> tuple[int, int, Mapping[RunDir, Exception]]:
    """Cancel the points that wait, and ask those at work to commit a checkpoint and end.

    Return how many of each, and the runs with a file that cannot be read: these are asked, too. Waits for a submitter
    that is at work. Raises RequestError where their jobs are on another cluster.
    """
    slurm, unread = slurm or Slurm(), dict[RunDir, Exception]()
    runs, waiting, working = list[RunDir](), list[RunDir](), list[RunDir]()
    with sweep.locked(waits=True):
        unsent = {each.run for each in _left(sweep, slurm)}
        for run in map(sweep.run_of, sweep.points()):
            with _spared(run, unread):
                if run.path.is_dir() and run.result() is None:
                    runs.append(run)
        stands = _standings(runs, slurm, unread)
        for run in (run for run, stand in stands.items() if stand.life is Liveness.UNSEEN):
            if (jobs := submitted_run.run_jobs(run)).is_elsewhere():
                raise RequestError(
                    f"sweep {sweep.name} has jobs on the cluster {jobs.cluster}, and this is "
                    f"{cluster_name.name_here()}: `toolkit sweep stop {sweep.name}` there stops it"
                )
        for run in dict.fromkeys((*runs, *unread)):
            stand = stands.get(run)
            if stand is not None and stand.is_over and run not in unsent:
                continue  # it is lost
            with _spared(run, unread):
                # The request comes first: a job that starts at this moment finds it.
                user_requests.record_intent(run, Intent.STOP)
                owner = run.owner()
                has_turn = owner is None or owner.executor == "slurm" or owner.serves
                if stand is not None:
                    is_waiting = run in unsent or submitted_run.is_queued(stand.job) or not has_turn
                    (waiting if is_waiting else working).append(run)
        queued = [run for run in waiting if stands[run].job is not None]
        if queued:
            slurm.cancel_waiting(sorted({base_id(id_) for run in queued for id_ in stands[run].unfinished}))
        # A job may have started before it could be cancelled: then its supervisor writes the result.
        over = {run for run, stand in _standings(queued, slurm, unread).items() if stand.is_over}
        for run in (*unsent, *over):
            with _spared(run, unread):
                if run.result() is None:
                    write_ended(run, RunState.STOPPED, "stopped while it waited in the queue")
    return len(waiting), len(working), unread


def _refuse_circle(record: DependencyRecord, sweep: SweepDir) -> None:
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
        for waits_for in (run.dependencies() for run in runs):
            way += [] if waits_for is None else [*waits_for.sweeps, *waits_for.runs]
