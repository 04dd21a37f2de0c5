"""How the points of a sweep stand.

Runs are read from their own files. One question to Slurm is about all points that have not started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from toolkit.base.errors import DamagedFileError, SlurmError
from toolkit.base.procfs import Life
from toolkit.files.run_files import RunResult, RunState, state_word, waits_until
from toolkit.files.rundir import RunDir
from toolkit.plugins.sweep import sweep_folder
from toolkit.plugins.sweep.sweep_folder import Array, ArrayRecord, Point, SweepDir
from toolkit.run.records import submitted_run
from toolkit.run.records.submitted_run import RunJobs, RunStanding
from toolkit.slurm import cluster_name, states
from toolkit.slurm import states as slurm_states
from toolkit.slurm.jobs import JobStatus, base_id
from toolkit.slurm.states import Phase

if TYPE_CHECKING:  # a supervisor that waits for a sweep does without the listings
    from toolkit.cli.run_rows import RunRow

#: Asks Slurm about jobs. A job that Slurm does not know is None in the answer.
Ask = Callable[[Iterable[str]], Mapping[str, JobStatus | None]]
#: Returns the rows of runs, see `toolkit.cli.show`.
RowsOfRuns = Callable[[Sequence[RunDir]], list["RunRow"]]

#: States of points that have no run.
NOT_SUBMITTED, LOST, REMOVED = "not submitted", "lost", "removed"
#: States of runs that have a result.
_ENDED = tuple(state for state in RunState if state.is_over)


@dataclass(frozen=True)
class PointStanding:
    """A point and how it stands. ``row`` is that of `toolkit status`, None where it has no run."""

    point: Point
    run: RunDir
    state: str
    job_id: str | None = None
    why: str | None = None
    row: RunRow | None = None
    executor: str = "slurm"  #: of ``job_id``
    job: RunJobs | None = None  #: the job of its list, which may not be the one that its run has

    @property
    def is_to_retry(self) -> bool:
        """True if the point has ended without its result, or will never start."""
        ended_early = (LOST, RunState.FAILED, RunState.CANCELLED, RunState.STOPPED)
        return state_word(self.state) in ended_early

    @property
    def metrics(self) -> Mapping[str, Any]:
        return {} if self.row is None else self.row.metrics


def standings(sweep: SweepDir, ask: Ask, rows_of: RowsOfRuns) -> list[PointStanding]:
    """Return every point, in the order of its submission. Raises DamagedFileError where the sweep cannot be read."""
    newest = sweep_folder.newest(sweep.arrays())
    records = {array: array.record() for array in dict.fromkeys(array for _, array, _ in newest.values())}
    started = dict.fromkeys(_started(sweep, [point for point, _, _ in newest.values()]))
    jobs = {id_: array.job_of(point, index, records[array]) for id_, (point, array, index) in newest.items()}
    # One question for all: also the rows below are made from its answer.
    is_queued = {
        id_
        for id_, (point, array, _) in newest.items()
        if point.run not in started or _is_again(sweep.run_of(point), array, records[array])
    }
    answers, is_answered = _answers(ask, [job for id_ in is_queued if (job := jobs[id_]) is not None])
    rows = {row.path: row for row in rows_of([RunDir(sweep.runs / run) for run in started])}
    is_local = any(record is not None and record.executor == "local" for record in records.values())
    works_here, begun = is_local and sweep.works_here(), sweep.begun()
    found = []
    for id_, (point, array, _) in newest.items():
        record, job = records[array], jobs[id_]
        run, job_id = (sweep.run_of(point), None) if job is None else (job.run, job.ids[0])
        row = rows.get(str(run.path))
        stand = None if job is None else answers.get(job)
        state, why = _waiting_state(record, job_id, stand, works_here)
        is_again = id_ in is_queued and state in (RunState.QUEUED, RunState.STARTING)
        executor = "slurm" if record is None else record.executor
        # Without Slurm's answer a run that may still work keeps its own state.
        if row is not None and not (is_again and (is_answered or row.state in _ENDED)):
            state, why = row.state, row.why or waits_until(row.after) or None
            if row.job_id:
                job_id, executor = row.job_id, row.executor
        elif point.after is not None and state == RunState.QUEUED and why in (None, "Dependency"):
            why = waits_until(point.after.names())
        elif state == RunState.QUEUED and why is not None:
            why = states.in_words(why)
        elif row is None and id_ in begun and sweep.was_removed(point):
            state, why = REMOVED, "its run folder was removed, so it is not run again; another --name runs it anew"
        found.append(PointStanding(point, run, state, job_id, why, row, executor, job))
    return found


def _started(sweep: SweepDir, points: Sequence[Point]) -> list[str]:
    """Return the runs that have a folder. Folders are listed: a question for each of thousands would take long."""
    there: dict[str, set[str]] = {}
    for name in {point.run.partition("/")[0] for point in points}:
        parent = sweep.runs / name
        there[name] = {path.name for path in parent.iterdir()} if parent.is_dir() else set()
    started = []
    for point in points:
        name, _, id_ = point.run.partition("/")
        if id_ in there[name] and (sweep.runs / point.run / "config.yaml").exists():
            started.append(point.run)
    return started


def _is_again(run: RunDir, array: Array, record: ArrayRecord | None) -> bool:
    """Return what `sweep_folder.is_again` does. Of a run that cannot be read its row tells."""
    try:
        return sweep_folder.is_again(run, array, record)
    except DamagedFileError:
        return False


def may_start_again(run: RunDir, ask: Ask) -> bool:
    """True if its sweep has submitted an ended run again, and it may still start. Also if Slurm does not answer.

    A point that works on this machine counts as such until all points of its sweep here have ended.
    """
    retry = sweep_folder.retry_of(run)
    if retry is None:
        return False
    array, job = retry
    if job is None:
        record = array.record()
        return record is not None and record.executor == "local" and array.sweep.works_here()
    answers, _ = _answers(ask, [job])
    return job not in answers or not answers[job].is_over


def _answers(ask: Ask, jobs: Sequence[RunJobs]) -> tuple[Mapping[RunJobs, RunStanding], bool]:
    """Return how the jobs stand that are of this cluster, and whether Slurm has answered."""
    here = cluster_name.name_here() if any(job.cluster for job in jobs) else ""
    asked = [job for job in jobs if not job.is_elsewhere(here)]
    try:
        found = ask([id_ for job in asked for id_ in job.ids]) if asked else {}
    except SlurmError:
        return {}, False
    return {job: submitted_run.of_jobs(job, found, here) for job in asked}, True


_NO_PROCESS = "no process runs this sweep's points here: logs/local.log in its folder may say why, and retry starts one"


def _waiting_state(
    record: ArrayRecord | None, job_id: str | None, stand: RunStanding | None, works_here: bool
) -> tuple[str, str | None]:
    """Return the state of a point without a run, and why."""
    if record is not None and record.executor == "local":
        return ("queued", None) if works_here else (LOST, _NO_PROCESS)
    if job_id is None:
        return NOT_SUBMITTED, "the submission was interrupted; the same `toolkit sweep` command completes it"
    if stand is None or stand.life is Life.UNSEEN:
        return "queued", None  # Slurm does not answer, or its answer is older than the job
    status = stand.job
    if status is None:
        return LOST, f"job {job_id} is gone and has not started its run"
    if status.is_over:
        # The same text for all such points: they are named together.
        why = f"the job ended ({status.state}) before its run began, as on a full disk: `toolkit sweep retry` is next"
        return (RunState.CANCELLED.value, None) if status.state == "CANCELLED" else (LOST, why)
    is_waiting = slurm_states.phase(status.state) is Phase.PENDING
    return ("queued", status.reason) if is_waiting else (RunState.STARTING.value, None)


class UnfinishedPoint(NamedTuple):
    """A point that another run waits for, and what may still bring it to its end."""

    run: RunDir
    result: RunResult | None
    jobs: Sequence[RunJobs]
    is_again: bool  #: whether the sweep has submitted it again: then its result is not final
    works_here: bool  #: whether a process on this machine will start it


def unfinished_points(path: Path) -> Iterator[UnfinishedPoint]:
    """Yield the points that have not completed. One whose run was removed is over."""
    sweep = SweepDir(path)
    newest, begun = sweep_folder.newest(sweep.arrays()), sweep.begun()
    if not newest:
        raise DamagedFileError(f"sweep {sweep.name} has no points: {sweep.path}")
    works_here = sweep.works_here()
    for point, array, index in newest.values():
        run = sweep.run_of(point)
        result, listed = run.result(), array.record()
        is_here = works_here and listed is not None and listed.executor == "local"
        is_done = result is not None and result.state is RunState.COMPLETED
        if is_done or (point.id in begun and sweep.was_removed(point)):
            continue
        # Ids of whole arrays: there may be thousands of points.
        of_point = [job for job in (array.job_of(point, index, listed), submitted_run.of(run)) if job is not None]
        jobs = tuple(replace(job, ids=tuple(dict.fromkeys(map(base_id, job.ids)))) for job in of_point)
        is_again = result is not None and sweep_folder.is_again(run, array, listed)
        works_here = is_here and (result is None or is_again)
        yield UnfinishedPoint(run, result, () if works_here and result is None else jobs, is_again, works_here)
