"""How a run without a result stands: the one judgement of its files, of Slurm's answer and of its process.

All that asks whether a run is lost, or may still write its result, goes by it: listings, handles, runs that wait for
others, and sweeps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.base.process_identity import Life, ProcessIdentity
from toolkit.files.run_files import RunState
from toolkit.files.rundir import RunDir
from toolkit.run.records import ownership
from toolkit.run.records.run_jobs import RunJobs
from toolkit.run.records.stop_request import Intent
from toolkit.slurm import states
from toolkit.slurm.jobs import JobStatus
from toolkit.slurm.states import Phase

#: The state of a run that its user has ended and that has no result, by the request.
_ASKED_FOR: Mapping[str | None, RunState] = {Intent.STOP: RunState.STOPPED, Intent.CANCEL: RunState.CANCELLED}


@dataclass(frozen=True)
class RunStanding:
    """Whether a job or process may still write the run's result. ``life`` is ENDED only where that is certain."""

    life: Life
    job_id: str | None = None  #: the present job of the run, on Slurm
    job: JobStatus | None = None  #: what Slurm says of it
    unfinished: tuple[str, ...] = ()  #: the run's jobs that are not over, as far as is known

    @property
    def is_over(self) -> bool:
        """True if no process can write the run's result any more."""
        return self.life is Life.ENDED

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
        if not is_waiting and not is_silent and states.phase(job.state) in expected:
            return state
        if self.is_over:
            return _ASKED_FOR.get(asked, f"lost ({job.state})")
        is_pending = job.state == "PENDING" and job.reason not in (None, "None")
        return f"{state} ({job.state}, {job.reason})" if is_pending else f"{state} ({job.state})"


def of_jobs(jobs: RunJobs, answers: Mapping[str, JobStatus | None], here: str | None = None) -> RunStanding:
    """Judge by Slurm's ``answers`` about the jobs of a run. ``here`` is this cluster's name, if it is known.

    A job that is missing in the answers is newer than they are, or Slurm does not answer. A job that is None there is
    known neither to the controller nor to accounting.
    """
    if not jobs.ids:
        return RunStanding(Life.ENDED)
    known = {} if jobs.is_elsewhere(here) else jobs.among(answers)
    job_id, job = ownership.present(jobs.ids, known)
    over = {id_ for id_, status in known.items() if status is None or status.is_over}
    unfinished = tuple(id_ for id_ in jobs.ids if id_ not in over)
    if not unfinished:
        return RunStanding(Life.ENDED, job_id, job)
    life = Life.UNSEEN if job is None or job.is_over else Life.ALIVE
    return RunStanding(life, job_id, job, unfinished)


def without_job(run: RunDir, executor: str) -> RunStanding:
    """Judge a run that has no job on Slurm: it is on a machine, or is being submitted."""
    if ownership.is_being_submitted(run, ownership.read(run)):
        return RunStanding(Life.ALIVE)
    if executor == "slurm":
        return RunStanding(Life.ENDED)
    life, process = ownership.local_life(run)
    # A run of this process itself has ended when its handle is there.
    is_own = executor == "debug" and process == ProcessIdentity.of(os.getpid())
    return RunStanding(Life.ENDED if is_own else life)
