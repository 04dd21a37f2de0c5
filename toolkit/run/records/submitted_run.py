"""A submitted run, and the job or the process that serves it: whether that lives, where it is, what ends it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from toolkit.base.errors import RequestError, SlurmError
from toolkit.base.process_identity import Life
from toolkit.files.rundir import RunDir
from toolkit.run.records import ownership, run_jobs, standing
from toolkit.run.records.run_jobs import RunJobs, ShowJobs
from toolkit.run.records.standing import RunStanding
from toolkit.slurm.commands import Slurm
from toolkit.slurm.jobs import JobStatus

#: Who waits asks Slurm this often whether the job still exists.
ASK_SLURM_EVERY_S = 30.0
#: A job's last file may reach the login node this long after the job's end: NFS remembers for up to 60 s that a file
#: was absent. Only after that time is it certain that the job has written no result.
FILES_LAG_S = 75.0
#: A supervisor writes the status twice a second. This long after the last one it may only be cut off.
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
        _, process = ownership.local_life(self.dir)
        return f"Ctrl-C at its launcher ends it (its rank 0 is process {process.pid if process else 'unknown'} here)"

    def unseen(self) -> str | None:
        """Return what to do where it cannot be told from here whether the run lives; None if it can.

        A local run's process may be on another machine, a job on another cluster, and a copy has no job.
        """
        if self.executor == "slurm":
            return self._unseen_jobs()
        life, process = ownership.local_life(self.dir)
        if life is not Life.UNSEEN or process is None:
            return None
        return (
            f"run {self.id} belongs to process {process.pid} on {process.host or 'an unknown host'}, which cannot be "
            f"seen from here: `toolkit cancel {self.id}` there ends it; if that machine or container is gone for good, "
            f"`toolkit cancel {self.id} --gone` here does"
        )

    def _unseen_jobs(self) -> str | None:
        original, jobs = run_jobs.original_of(self.dir, ownership.read(self.dir)), self._jobs()
        if original is not None:
            return (
                f"run {self.id} in {self.dir.path} is a copy, and the job is that of {original}: "
                f"`toolkit cancel {original}` ends it; `toolkit cancel {self.dir.path} --gone` marks the copy as ended"
            )
        if not jobs.is_elsewhere():
            return None
        job = f"job {jobs.ids[0]}" if jobs.ids else "the submission"
        return (
            f"run {self.id} belongs to {job} of the cluster {jobs.cluster}, which cannot be seen from here: "
            f"`toolkit cancel {self.id}` there ends it; if that cluster is gone for good, "
            f"`toolkit cancel {self.id} --gone` here does"
        )

    def is_elsewhere(self) -> bool:
        """True if the run has its job on another cluster. Raises RequestError while that supervisor writes its status.

        A job that takes the run here is its next owner. What there still is of the other one ends when it sees that.
        """
        if self.executor != "slurm" or not (jobs := self._jobs()).is_elsewhere():
            return False
        if (age_s := self.heard_s()) < HEARD_S:
            raise RequestError(
                f"run {self.id} works on the cluster {jobs.cluster}: its status is {age_s:.0f} s old; "
                f"`toolkit cancel {self.id}` there ends it (if its job was killed, wait until the status is "
                f"{HEARD_S:.0f} s old)"
            )
        return True

    def heard_s(self) -> float:
        """Return how many seconds ago a run that goes on has written its status; infinity for another one."""
        status = self.dir.status([])
        goes_on = status.state is not None and not status.state.is_over and status.updated is not None
        return time.time() - status.updated if goes_on and status.updated is not None else math.inf

    @property
    def job_now(self) -> str:
        """The job that serves the run at present. It may be a follow-up job of the submitted one."""
        return self._jobs().ids[0]

    def _jobs(self) -> RunJobs:
        jobs, owner = run_jobs.of(self.dir), ownership.read(self.dir)
        if jobs.ids or not self.job_id or run_jobs.original_of(self.dir, owner) is not None:
            return jobs
        return replace(jobs, ids=(self.job_id,))

    def is_over(self, show_jobs: ShowJobs | None = None) -> bool:
        """True if no process can write this run's result any more.

        False where Slurm does not answer. ``show_jobs`` may use an earlier answer of Slurm; without it Slurm is asked
        now.
        """
        return self.standing(show_jobs).is_over

    def standing(self, show_jobs: ShowJobs | None = None) -> RunStanding:
        """Return how the run stands, as far as it has no result. ``show_jobs`` is as in :meth:`is_over`."""
        jobs = self._jobs() if self.executor == "slurm" else None
        if jobs is None or not jobs.ids or ownership.is_being_submitted(self.dir, ownership.read(self.dir)):
            return standing.without_job(self.dir, self.executor)
        answers: Mapping[str, JobStatus | None] = {}
        if not jobs.is_elsewhere():
            with contextlib.suppress(SlurmError):  # the controller is away, which says nothing about the job
                answers = (show_jobs or Slurm().show_jobs)(jobs.ids)
        return standing.of_jobs(jobs, answers)


def submitter_of(run: RunDir) -> tuple[str, str]:
    """Return the executor of a run, and its job at submission.

    Raises RequestError for a run that was never submitted.
    """
    owner, jobs = ownership.read(run), ownership.jobs_of(run)
    if ownership.is_being_submitted(run, owner):
        raise RequestError(f"run {run.id} is being submitted at this moment; try again when it has a job id")
    if jobs or owner is not None:  # after an interrupted submission the job id is unknown
        source = owner or run.submission()
        executor = "slurm" if source is None else source.executor
        return executor, jobs[0] if jobs else ""
    # Neither owner nor job: the reason is a damaged file, or a run that was started without a supervisor.
    damage: list[str] = []
    for read in (run.owner, run.submission, run.status):
        read(damage)
    why = "it was started without a supervisor"
    if damage:
        why = f"which job it is cannot be said: {'; '.join(damage)}"
    raise RequestError(f"run {run.id}: {why}; end its processes where they run")
