"""The state of a run without a result, by its files, Slurm's answer and its process, and what ends it.

A number does not say which jobs of Slurm are a run's. Each cluster has numbers of its own, and clusters may share a
runs folder. A controller that was installed anew gives the same numbers again. A copy of a run folder holds the numbers
of the original's jobs. So every question about a run's jobs, every signal and every cancellation passes here first.

A job is the run's if it is on the cluster that the run's files name, and if its batch script lies in the run's folder,
or in that of its sweep. A batch script of the user's own lies elsewhere: its job has recorded what Slurm calls it.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

from toolkit.base import fsio
from toolkit.base.errors import RequestError, SlurmError, ToolkitError
from toolkit.base.procfs import Liveness, ProcessIdentity
from toolkit.files import rundir
from toolkit.files.run_files import OwnerRecord, RunState
from toolkit.files.rundir import RunDir
from toolkit.run.records import ownership
from toolkit.run.records.user_requests import Intent
from toolkit.slurm import cluster_name, states
from toolkit.slurm.jobs import JobStatus
from toolkit.slurm.states import Phase

#: The state of a run that its user has ended and that has no result, by the request.
_ASKED_FOR: Mapping[str | None, RunState] = {Intent.STOP: RunState.STOPPED, Intent.CANCEL: RunState.CANCELLED}


@dataclass(frozen=True)
class RunLiveness:
    """Whether a job or process may still write the run's result. ``life`` is ENDED only where that is certain."""

    life: Liveness
    job_id: str | None = None  #: the current job of the run, on Slurm
    job: JobStatus | None = None  #: what Slurm says of it
    unfinished: tuple[str, ...] = ()  #: the run's jobs that are not over, as far as is known

    @property
    def is_over(self) -> bool:
        """True if no process can write the run's result any more."""
        return self.life is Liveness.ENDED

    def in_words(self, state: str, asked: str | None, *, is_silent: bool, is_forgotten: bool) -> str:
        """Return the state to show, where the run's files say ``state``.

        ``asked``: what a user has asked of the run. ``is_silent``: its files are old, and ``is_forgotten``: so old that
        a supervisor on another cluster, too, would have written.
        """
        job = self.job
        # A run without a job, one that Slurm does not know, or an answer that is older than the next job.
        if job is None or (job.is_over and not self.is_over):
            is_lost = self.is_over and (self.job_id is None or is_forgotten)
            return _ASKED_FOR.get(asked, "lost") if is_lost else f"{state}? (silent)"
        expected = (Phase.RUNNING, Phase.ENDED_WELL)  # the result of a job that has just ended may not be visible yet
        is_waiting = isinstance(state, RunState) and state.is_waiting
        if not (is_waiting or is_silent or job.is_paused) and states.phase(job.state) in expected:
            return state
        if self.is_over:
            is_cancelled = is_waiting and job.state == "CANCELLED"  # by scancel: no supervisor was there to write it
            return _ASKED_FOR.get(asked, RunState.CANCELLED if is_cancelled else f"lost ({job.state})")
        is_pending = job.state == "PENDING" and job.reason not in (None, "None")
        return f"{state} ({job.state}, {job.reason})" if is_pending else f"{state} ({job.state})"


def liveness_by_jobs(jobs: RunJobs, answers: Mapping[str, JobStatus | None], here: str | None = None) -> RunLiveness:
    """Judge by Slurm's ``answers`` about the jobs of a run. ``here`` is this cluster's name, if it is known.

    A job that is missing in the answers is newer than they are, or Slurm does not answer. A job that is None there is
    known neither to the controller nor to accounting.
    """
    if not jobs.ids:
        return RunLiveness(Liveness.ENDED)
    known = {} if jobs.is_elsewhere(here) else jobs.among(answers)
    job_id, job = current_job(jobs.ids, known)
    over = {id_ for id_, status in known.items() if status is None or status.is_over}
    unfinished = tuple(id_ for id_ in jobs.ids if id_ not in over)
    if not unfinished:
        return RunLiveness(Liveness.ENDED, job_id, job)
    life = Liveness.UNSEEN if job is None or job.is_over else Liveness.ALIVE
    return RunLiveness(life, job_id, job, unfinished)


def liveness_without_job(run: RunDir, executor: str) -> RunLiveness:
    """Judge a run that has no job on Slurm: it is on a machine, or is being submitted."""
    if ownership.is_being_submitted(run, run.owner()):
        return RunLiveness(Liveness.ALIVE)
    if executor == "slurm":
        return RunLiveness(Liveness.ENDED)
    life, process = local_life(run)
    # A run of this process itself has ended when its handle is there.
    is_own = executor == "debug" and process == ProcessIdentity.of(os.getpid())
    return RunLiveness(Liveness.ENDED if is_own else life)


def local_life(run: RunDir) -> tuple[Liveness, ProcessIdentity | None]:
    """Return whether a run without Slurm has a living process, and which one.

    It has two: its supervisor, and the one that starts the supervisor. A rank without a supervisor writes when its run
    has ended, which is seen also where its process is not.
    """
    owner, sent, status = run.owner(), run.submission(), run.status()
    updated, says_so = status.updated or 0.0, status.state is not None and status.state.is_over
    if owner is not None and owner.executor == "debug" and says_so and owner.time <= updated:
        return Liveness.ENDED, owner.process
    processes = [owner.process] if owner is not None and owner.serves else []
    if sent is not None and sent.process is not None and (owner is None or sent.token == owner.token):
        processes.append(sent.process)
    if owner is None and sent is None and status.pid is not None:  # their files were removed
        processes.append(ProcessIdentity(status.host or "", status.pid, status.birth))
    seen = max(0.0 if owner is None else owner.time, updated)
    lives = [(process.life(seen), process) for process in processes]
    return min(lives, key=lambda each: each[0], default=(Liveness.ENDED, None))


def current_job(jobs: Sequence[str], answers: Mapping[str, JobStatus | None]) -> tuple[str, JobStatus | None]:
    """Return which of a run's ``jobs`` is the current one, with its status.

    It is the first that is not over, else the last that Slurm knows.
    """
    known = [(job, answers.get(job)) for job in jobs]
    unfinished = [(job, status) for job, status in known if status is not None and not status.is_over]
    if unfinished:
        return unfinished[0]
    return next(((job, status) for job, status in reversed(known) if status is not None), known[0])


def is_queued(status: JobStatus | None) -> bool:
    """True if the job is in the queue. It has no process then that could be asked for anything."""
    return status is not None and states.phase(status.state) is Phase.PENDING


#: A supervisor writes the status each five seconds at least. This long after the last one it may only be cut off.
HEARD_S = 300.0


@dataclass(frozen=True)
class SubmittedRun:
    """A run with its executor. The base of the handle that users have of a run (`toolkit.run.submission.handle`)."""

    dir: RunDir
    executor: str
    job_id: str  #: at submission, see `job_now`; empty where the submission was interrupted

    @property
    def id(self) -> str:
        """Return the run id."""
        return self.dir.id

    def how_to_end(self) -> str:
        """Return what ends the run, as advice."""
        if self.executor != "debug":
            return f"`toolkit cancel {self.id}` ends it"
        _, process = local_life(self.dir)
        return f"Ctrl-C at its launcher ends it (its rank 0 is process {process.pid if process else 'unknown'} here)"

    def unknown_state_advice(self) -> str | None:
        """Return what to do where it is not known here whether the run lives; else None.

        A local run's process may be on another machine, a job on another cluster, and a copy has no job.
        """
        if self.executor == "slurm":
            original, jobs = original_of(self.dir, self.dir.owner()), self._jobs()
            if original is not None:
                path = shlex.quote(str(self.dir.path))
                return (
                    f"run {self.id} in {self.dir.path} is a copy, and the job is that of {original}: `toolkit cancel "
                    f"{original}` ends it; `toolkit cancel {path} --gone` marks the copy as ended"
                )
            if not jobs.is_elsewhere():
                return None
            job = f"job {jobs.ids[0]}" if jobs.ids else "the submission"
            whose, place = f"{job} of the cluster {jobs.cluster}", "cluster"
        else:
            life, process = local_life(self.dir)
            if life is not Liveness.UNSEEN or process is None:
                return None
            whose = f"process {process.pid} on {process.host or 'an unknown host'}"
            place = "machine or container"
        return (
            f"run {self.id} belongs to {whose}, which cannot be seen from here: `toolkit cancel {self.id}` there ends "
            f"it; if that {place} is gone for good, `toolkit cancel {self.id} --gone` here does"
        )

    def is_elsewhere(self) -> bool:
        """True if the run has its job on another cluster. Raises RequestError while that supervisor writes its status.

        A job that takes the run here is its next owner. What there still is of the other one ends when it sees that.
        """
        if self.executor != "slurm" or not (jobs := self._jobs()).is_elsewhere():
            return False
        if (age_s := self.status_age_s()) < HEARD_S:
            raise RequestError(
                f"run {self.id} works on the cluster {jobs.cluster}: its status is {age_s:.0f} s old; "
                f"`toolkit cancel {self.id}` there ends it (if its job was killed, wait until the status is "
                f"{HEARD_S:.0f} s old)"
            )
        return True

    def status_age_s(self) -> float:
        """Return how many seconds ago a run that is not over has written its status; infinity for another one."""
        status = self.dir.status()
        if status.state is None or status.state.is_over or status.updated is None:
            return math.inf
        return time.time() - status.updated

    @property
    def job_now(self) -> str:
        """The job that serves the run at present. It may be a follow-up job of the submitted one."""
        return self._jobs().ids[0]

    def _jobs(self) -> RunJobs:
        jobs, owner = run_jobs(self.dir), self.dir.owner()
        if jobs.ids or not self.job_id or original_of(self.dir, owner) is not None:
            return jobs
        return replace(jobs, ids=(self.job_id,))

    def is_over(self, show_jobs: ShowJobs | None = None) -> bool:
        """True if no process can write this run's result any more; False where Slurm does not answer.

        ``show_jobs`` may use an earlier answer of Slurm; without it Slurm is asked now.
        """
        return self.liveness(show_jobs).is_over

    def liveness(self, show_jobs: ShowJobs | None = None) -> RunLiveness:
        """Return how the run stands, as far as it has no result. ``show_jobs`` is as in :meth:`is_over`."""
        from toolkit.slurm.commands import Slurm  # a listing of runs does without

        jobs = self._jobs() if self.executor == "slurm" else None
        if jobs is None or not jobs.ids or ownership.is_being_submitted(self.dir, self.dir.owner()):
            return liveness_without_job(self.dir, self.executor)
        answers: Mapping[str, JobStatus | None] = {}
        if not jobs.is_elsewhere():
            with contextlib.suppress(SlurmError):  # the controller is away, which says nothing about the job
                answers = (show_jobs or Slurm().show_jobs)(jobs.ids)
        return liveness_by_jobs(jobs, answers)


def submitter_of(run: RunDir) -> tuple[str, str]:
    """Return the executor of a run, and its job at submission. Raises RequestError for one never submitted."""
    owner, jobs = run.owner(), ownership.jobs_of(run)
    if ownership.is_being_submitted(run, owner):
        raise RequestError(f"run {run.id} is being submitted at this moment; try again when it has a job id")
    if jobs or owner is not None:  # after an interrupted submission the job id is unknown
        source = owner or run.submission()
        executor = "slurm" if source is None else source.executor
        return executor, jobs[0] if jobs else ""
    raise RequestError(f"run {run.id}: it was started without a supervisor; end its processes where they run")


#: Returns the status of each job, None where Slurm does not know it.
ShowJobs: TypeAlias = Callable[[Sequence[str]], Mapping[str, JobStatus | None]]


@dataclass(frozen=True)
class RunJobs:
    """The jobs that a run's files name, the present one first, then those that wait to follow it."""

    run: RunDir
    ids: tuple[str, ...]
    cluster: str = ""  #: whose numbers they are; empty where it has no name

    def is_elsewhere(self, here: str | None = None) -> bool:
        """True if the jobs are on another cluster than this one. ``here`` is this one's name, if it is known."""
        if not self.cluster:
            return False
        here = cluster_name.name_here() if here is None else here
        return bool(here) and here != self.cluster

    def ask(self, show_jobs: ShowJobs) -> dict[str, JobStatus | None]:
        """Return the status of each job; None for one that Slurm does not know, or gave its number to another job.

        Jobs of another cluster are missing, as those that are newer than the answer.
        """
        return self.among(show_jobs(self.ids)) if self.ids and not self.is_elsewhere() else {}

    def among(self, answers: Mapping[str, JobStatus | None]) -> dict[str, JobStatus | None]:
        """Return what these answers, of this cluster, say about the run's jobs, see :meth:`ask`."""
        known = {job: answers[job] for job in self.ids if job in answers}
        return {job: row if row is not None and self._has(job, row.command) else None for job, row in known.items()}

    def _has(self, job: str, command: str | None) -> bool:
        """True if the job with this number and this command is the run's. Most are known without reading a file."""
        if command is None:  # accounting does not tell
            return True
        scripts = _folder_of(command)
        if scripts == self.run.submitit:
            return True
        owner, point = self.run.owner(), self.run.point()
        if original_of(self.run, owner) is not None:
            return False
        # The folder may have another name here, or had one when the job was submitted.
        for place in [self.run.path, *([Path(owner.path)] if owner is not None and owner.path else [])]:
            of_sweep = point and place.parent.parent / rundir.SWEEPS / point.sweep / "arrays"
            if _is_same(scripts, RunDir(place).submitit) or (of_sweep and _is_same(scripts, of_sweep)):
                return True
        return point is None and self._is_users_own(job, command, owner)

    def _is_users_own(self, job: str, command: str, owner: OwnerRecord | None) -> bool:
        """True if the job has the user's batch script that the run was started by."""
        recorded = None if owner is None else owner.command
        if recorded is None and fsio.is_there(self.run.submission_path):
            return False
        # The next job of the same script may have got the number: that one serves another run.
        with contextlib.suppress(ToolkitError):
            served = rundir.run_of_job(f"{self.cluster or 'slurm'}-{job}", self.run.path.parent.parent)
            if served is not None and not _is_same(served.path, self.run.path):
                return False
        if recorded is None:
            return True
        # Slurm's programs show a script's arguments in some versions only.
        shorter, longer = sorted((recorded, command), key=len)
        return f"{longer} ".startswith(f"{shorter} ")


def run_jobs(run: RunDir) -> RunJobs:
    """Return the jobs of a run; none for a copy of another run's folder."""
    owner, sent = run.owner(), run.submission()
    source = owner or sent or run.status()
    ids = () if original_of(run, owner) is not None else ownership.jobs_of(run)
    return RunJobs(run, tuple(ids), source.cluster)


def original_of(run: RunDir, owner: OwnerRecord | None) -> Path | None:
    """Return the folder of which the run's is a copy: where its owner took it, if that submission is still there."""
    if owner is None or not owner.path or _is_same(Path(owner.path), run.path):
        return None
    there = RunDir(Path(owner.path)).owner()
    return Path(owner.path) if there is not None and there.token == owner.token else None


@lru_cache(maxsize=64)
def _folder_of(command: str) -> Path:
    """Return the folder of a batch script. Cached: all points of a job array have the same one."""
    return Path(command).parent


def _is_same(one: Path, other: Path) -> bool:
    """True if both are one folder, perhaps under two names."""
    if one == other:
        return True
    try:
        return one.samefile(other)
    except OSError:
        return False
