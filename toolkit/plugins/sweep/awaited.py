"""Finds out whether the runs that another run waits for have completed.

A run is more than one job of Slurm: it is requeued, and follow-up jobs take it over. So Slurm only keeps the waiting
job in the queue until the others' current jobs are over. Whether the others have completed is read from their results
when the waiting job starts, see `toolkit.plugins.sweep.waiting`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toolkit.base import trust
from toolkit.base.errors import DamagedFileError, RequestError, RunNotFoundError
from toolkit.config import JobConfig
from toolkit.files import rundir
from toolkit.files.run_files import DependencyRecord, RunResult, RunState
from toolkit.files.rundir import RunDir
from toolkit.plugins.sweep.sweep_folder import SweepDir
from toolkit.run.records import ownership, submitted_run
from toolkit.run.records.submitted_run import RunJobs, ShowJobs, SubmittedRun, submitter_of
from toolkit.slurm import cluster_name
from toolkit.slurm.jobs import base_id

#: Begins the cause of a run that has failed because it waited in vain.
NEVER_STARTED = "never started"


@dataclass(frozen=True)
class UnfinishedRun:
    """A run that has not completed, and what may still bring it to its end."""

    run: RunDir
    result: RunResult | None
    jobs: RunJobs | None = None  #: its Slurm jobs, if it has no result
    works_here: bool = False  #: whether it has a process on a machine without Slurm
    is_starting: bool = False  #: whether it is being submitted at this moment
    is_elsewhere: bool = False  #: whether another cluster has its job


@dataclass(frozen=True)
class Prerequisites:
    """The states of the runs that have not completed."""

    ended: Sequence[str]  #: a line for each run with a result that has not completed and no longer has a job
    lost: Sequence[str]  #: a line for each run without a result, a job or a process
    jobs: Sequence[str]  #: the ids of the jobs that are not over
    working: Sequence[UnfinishedRun]  #: those that may still complete

    @property
    def is_met(self) -> bool:
        """True if all have completed."""
        return not (self.ended or self.lost or self.working)


def prerequisites(record: DependencyRecord, show_jobs: ShowJobs) -> Prerequisites:
    """Return the states of all awaited runs. Asks Slurm once. Raises SlurmError, or DamagedFileError."""
    awaited = list(_unfinished(record))
    jobs = [each.jobs for each in awaited if each.jobs is not None]
    here = cluster_name.name_here() if any(of_run.cluster for of_run in jobs) else ""
    jobs = [of_run for of_run in jobs if not of_run.is_elsewhere(here)]
    asked = sorted({id_ for of_run in jobs for id_ in of_run.ids})
    answers = show_jobs(asked) if asked else {}
    unfinished = {id_ for of_run in jobs for id_ in submitted_run.liveness_by_jobs(of_run, answers, here).unfinished}
    ended, lost, working = list[str](), list[str](), list[UnfinishedRun]()
    for each in awaited:
        name = f"run {each.run.name}/{each.run.id}"
        is_elsewhere = each.jobs is not None and each.jobs.is_elsewhere(here)
        has_job = each.jobs is not None and not unfinished.isdisjoint(each.jobs.ids)
        if has_job or is_elsewhere or each.works_here or each.is_starting:
            working.append(replace(each, is_elsewhere=is_elsewhere))
        elif each.result is not None:
            state, why = each.result.state, each.result.why or ""
            # Of a run that has waited in vain as well the first words are enough: the rest may be a long chain.
            why = NEVER_STARTED if why.startswith(NEVER_STARTED) else why
            why = f" ({why})" if why and why != state else ""
            ended.append(f"{name} is {state}{why}; `toolkit resume {each.run.id}` continues it")
        elif each.run.path.is_dir():
            lost.append(f"{name} is lost: no job of it is left, and it has no result; `toolkit resume {each.run.id}`")
        else:
            lost.append(f"{name} has no folder")
    return Prerequisites(ended, lost, sorted(unfinished), working)


def _unfinished(record: DependencyRecord) -> Iterator[UnfinishedRun]:
    for path in record.runs:
        run = RunDir(Path(path))
        if (found := _how_it_may_end(run, submitted_run.run_jobs(run))) is not None:
            yield found
    for sweep in map(SweepDir, map(Path, record.sweeps)):
        points = sweep.points()
        if not points:
            raise DamagedFileError(f"sweep {sweep.name}: its points cannot be read: {sweep.path}")
        for run in map(sweep.run_of, points):
            # Ids of whole arrays: there may be thousands of points. One whose run was removed is over.
            jobs = submitted_run.run_jobs(run)
            jobs = replace(jobs, ids=tuple(dict.fromkeys(map(base_id, jobs.ids))))
            if run.path.is_dir() and (found := _how_it_may_end(run, jobs)) is not None:
                yield found


def _how_it_may_end(run: RunDir, jobs: RunJobs) -> UnfinishedRun | None:
    """Return what may bring a run to its end; None if it has completed."""
    result = run.result()
    if result is not None:
        return None if result.state is RunState.COMPLETED else UnfinishedRun(run, result)
    owner = run.owner()
    is_starting = ownership.is_being_submitted(run, owner)
    if owner is None or owner.executor == "slurm":
        return UnfinishedRun(run, None, jobs, is_starting=is_starting)
    return UnfinishedRun(run, None, works_here=is_starting or not SubmittedRun(run, *submitter_of(run)).is_over())


def find(names: Sequence[str], executor: str, show_jobs: ShowJobs) -> DependencyRecord | None:
    """Return the record of these runs and sweeps; None if all have completed.

    Raises RequestError for a name that cannot be waited for: it is unknown, has ended without having completed, could
    be changed by other users, or runs where Slurm does not see it.
    """
    if executor == "debug":
        raise RequestError("--after: with the executor debug a run starts right here; leave one of the two out")
    found = [_find(name) for name in names]
    # Another user who can write to the folder could forge its result.
    for path in found:
        trust.refuse_untrusted(path, f"--after: others could forge the result of {path.name}")
    sweeps = [path for path in found if path.parent.name == rundir.SWEEPS]
    record = DependencyRecord(
        runs=tuple(str(path) for path in found if path not in sweeps), sweeps=tuple(str(path) for path in sweeps)
    )
    stands = refuse_ended(record, show_jobs)
    # Slurm's dependencies know jobs only: a job cannot wait for a process outside Slurm.
    unseen = next((each.run for each in stands.working if each.works_here), None)
    if executor == "slurm" and unseen is not None:
        raise RequestError(
            f"--after: run {unseen.name}/{unseen.id} runs on a machine without Slurm, where a job of Slurm cannot wait "
            "for its end; use --executor local, or wait until it has completed"
        )
    for each in stands.working:
        if each.is_elsewhere and each.jobs is not None:
            raise RequestError(
                f"--after: run {each.run.name}/{each.run.id} has its job on the cluster {each.jobs.cluster}, for which "
                "a job of this cluster cannot wait; submit there, or wait until it has completed"
            )
    return None if stands.is_met else record


def resolve_init_from(config: JobConfig, record: DependencyRecord) -> bool:
    """True if ``model.init_from`` names a run that is waited for; write its path there.

    That run needs no checkpoint yet. A name must not come to mean an older run that has one.
    """
    if config.model.init_from is None:
        return False
    with contextlib.suppress(RunNotFoundError):
        path = str(rundir.find(config.model.init_from).path)
        if path in record.runs:
            config.model.init_from = path
            return True
    return False


def refuse_ended(record: DependencyRecord, show_jobs: ShowJobs) -> Prerequisites:
    """Return the states of all awaited runs. Raises RequestError if one has ended without having completed."""
    stands = prerequisites(record, show_jobs)
    for why in (*stands.ended, *stands.lost):
        raise RequestError(f"--after: {why}; until it works again it cannot be waited for")
    return stands


def _find(name: str) -> Path:
    """Return the folder of the sweep of this name, else of the run. A sweep's runs mostly have its name."""
    sweep = rundir.runs_root() / rundir.SWEEPS / name
    if "/" not in name and (sweep / "sweep.json").exists():
        return sweep
    try:
        return rundir.find(name).path
    except RunNotFoundError as error:
        raise RunNotFoundError(f"--after: {error}") from None
