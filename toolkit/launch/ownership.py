"""Which submission, and which of its jobs, a run belongs to now.

``owner.json`` names it: the submission first, then each job that serves it, attempt by attempt. Owners are numbered.
Each number is given away once, by an exclusive creation, and a later owner overtakes an earlier one, which then writes
nothing more. So of two that take the run at the same moment one is refused, and no two jobs ever train one run.

Every job carries its submission's token. A job of an earlier submission, or one that has handed the run on to its
follow-up job, finds that the run is not its own, and ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toolkit import fsio
from toolkit.cluster.commands import JobStatus
from toolkit.cluster.states import Phase, phase
from toolkit.errors import RequestError
from toolkit.launch import patience
from toolkit.launch.allocation import Allocation
from toolkit.rundir import RunDir

TOKEN_VARIABLE = "TOOLKIT_SUBMISSION"
#: A submission that has told no job id after so long has died: sbatch itself is given up earlier.
SUBMITTING_S = 120.0


@dataclass(frozen=True)
class Owner:
    """Who has the run. ``jobs`` are those that have served this submission, the present one last."""

    number: int
    token: str
    executor: str
    host: str
    pid: int
    time: float
    jobs: tuple[str, ...] = ()
    follow_ups: tuple[str, ...] = ()

    @property
    def job_id(self) -> str | None:
        """The job that serves the run, or served it last; None before the first has started, and without Slurm."""
        return self.jobs[-1] if self.jobs else None


def read(run: RunDir, damage: list[str] | None = None) -> Owner | None:
    """Return the run's owner; None for a run that was never submitted, and where the file is damaged."""
    told = run.owner(damage)
    try:
        return Owner(
            number=told["number"],
            token=told["token"],
            executor=told["executor"],
            host=told["host"],
            pid=told["pid"],
            time=told["time"],
            jobs=tuple(told.get("jobs", ())),
            follow_ups=tuple(told.get("follow_ups", ())),
        )
    except KeyError:
        return None


def jobs_of(run: RunDir, damage: list[str] | None = None) -> list[str]:
    """Return the ids of the run's present job and of the follow-up jobs that wait for its end, as its files tell.

    The first may be known from the submission only, which has a file of its own: the job may start before it writes.
    """
    owner, sent = read(run, damage), run.submission(damage)
    if owner is None:
        known = [(sent or run.status()).get("job_id")]
    elif owner.job_id is not None:
        known = [owner.job_id, *owner.follow_ups]
    elif sent.get("token") == owner.token:
        known = [sent.get("job_id"), *sent.get("follow_ups", ())]
    else:
        known = []
    return [str(job) for job in known if job is not None]


def present(jobs: Sequence[str], answers: Mapping[str, JobStatus | None]) -> tuple[str, JobStatus | None]:
    """Return which of ``jobs``, from :func:`jobs_of`, is the run's now, and how it stands: the first that is not over.

    Of jobs that are all over it is the last one that anybody knows.
    """
    known = [(job, answers.get(job)) for job in jobs]
    unfinished = [(job, status) for job, status in known if status is not None and not status.is_over]
    if unfinished:
        return unfinished[0]
    return next(((job, status) for job, status in reversed(known) if status is not None), known[0])


def waits(status: JobStatus | None) -> bool:
    """True if the job is in the queue, with nobody in it who could be asked for anything."""
    return status is not None and phase(status.state) is Phase.PENDING


# --------------------------------------------------------------------------------------------------------- submitting


def new_config(run: RunDir, token: str) -> Path:
    """Return where the config lies that becomes the run's own as soon as this submission has succeeded."""
    return run.submitit / f"config-{token}.yaml"


def adopt_config(run: RunDir, token: str | None) -> None:
    """Make the config of the present submission the run's own, if it has one, and keep the old one beside it.

    The submission does this when it has a job id, or the job itself, which may start before.
    """
    owner = read(run)
    if owner is None or owner.token != token or not new_config(run, owner.token).exists():
        return
    with contextlib.suppress(FileExistsError):  # the other one was faster
        fsio.write_new(run.path / f"config.before-{token}.yaml", run.config.read_bytes())
    with contextlib.suppress(FileNotFoundError):  # so it was
        new_config(run, owner.token).replace(run.config)


def is_being_submitted(run: RunDir, owner: Owner | None) -> bool:
    """True while somebody calls sbatch for the run, or starts it on a machine."""
    if owner is None or owner.jobs or run.submission().get("token") == owner.token:
        return False
    is_here = owner.host == socket.gethostname()
    return time.time() - owner.time < SUBMITTING_S and (not is_here or Path(f"/proc/{owner.pid}").exists())


def take(run: RunDir, before: int) -> int:
    """Take the run for a new submission, after owner number ``before``, and return the number of the next one.

    Raises RequestError where somebody else has taken it since that number was read.
    """
    number = before + 1
    while not run.take_number(number):
        if time.time() - run.taken_at(number) < SUBMITTING_S:  # else whoever took it died before it could say so
            raise RequestError(
                f"run {run.id} is being resumed by somebody else at this moment: `toolkit status {run.id}`"
            )
        number += 1
    return number


def submit_as(run: RunDir, executor: str, number: int) -> Owner:
    """Write down that a new submission has the run, whose ``number`` is from :func:`take`."""
    owner = Owner(number, secrets.token_hex(8), executor, socket.gethostname(), os.getpid(), time.time())
    run.write_owner(asdict(owner))
    return owner


def number_of(run: RunDir) -> int:
    """Return the number of the run's owner, 0 before the first."""
    number = run.owner_number()
    return run.last_number() if number is None else number


# ------------------------------------------------------------------------------------------------------------ serving


class Overtaken(Exception):
    """The run belongs to another submission or job: this one must write nothing more."""


class Claim:
    """A supervisor's hold on its run, from attempt to attempt."""

    def __init__(self, run: RunDir, owner: Owner) -> None:
        self._run = run
        self._owner = owner

    @staticmethod
    def of_job(run: RunDir, allocation: Allocation, token: str | None) -> Claim:
        """Take the run for the job of ``allocation``, or for this process without one; waits for a disk that is full.

        ``token`` is the job's submission's, None in a job that was not submitted by us. Raises Overtaken.
        """
        while True:
            owner, job_id = read(run), allocation.job_id
            jobs = () if owner is None else owner.jobs
            if owner is not None and not _may_serve(owner, job_id, token):
                raise Overtaken(f"run {run.id} belongs to {_describe(run, owner)}: nothing is left to do here")
            if job_id is not None and job_id not in jobs:
                jobs = (*jobs, job_id)
            claim = Claim(
                run,
                Owner(
                    number=run.last_number(),
                    token=token or (owner.token if owner else secrets.token_hex(8)),
                    executor="local" if job_id is None else "slurm",
                    host=socket.gethostname(),
                    pid=os.getpid(),
                    time=time.time(),
                    jobs=jobs,
                    follow_ups=_follow_ups_of(run, job_id),
                ),
            )
            try:
                claim.renew()
            except Overtaken:  # by a job's second start at the same moment, say: look again who may
                continue
            return claim

    @staticmethod
    def of_dead(run: RunDir, allocation: Allocation) -> Claim | None:
        """Take the place of a supervisor of our job that has died, whose ranks go on; None where we may not."""
        owner = read(run)
        if owner is None or owner.job_id != allocation.job_id or owner.number != run.last_number():
            return None
        claim = Claim(run, replace(owner, host=socket.gethostname(), pid=os.getpid(), time=time.time()))
        claim._write(claim._owner)
        return claim

    @property
    def number(self) -> int:
        """Of the present attempt; its ranks ask with it whether they still may write."""
        return self._owner.number

    @property
    def token(self) -> str:
        """The submission's, which every job of it needs."""
        return self._owner.token

    @property
    def follow_ups(self) -> tuple[str, ...]:
        """The follow-up jobs that were submitted, in the order in which they start."""
        return self._owner.follow_ups

    def renew(self) -> None:
        """Take the next number, for another attempt: what is left of the last one may write no more.

        Raises Overtaken where somebody else has it.
        """
        number, taken = self._owner.number + 1, []
        patience.persist(lambda: taken.append(self._run.take_number(number)), self._run.path)
        if taken != [True]:
            raise Overtaken(f"run {self._run.id} has been taken over")
        self._write(replace(self._owner, number=number))

    def note_follow_ups(self, jobs: Sequence[str]) -> None:
        """Write down which jobs wait to take over."""
        self._write(replace(self._owner, follow_ups=tuple(jobs)))

    def holds(self) -> bool:
        """True while nobody has overtaken us. What an earlier owner has written too late is corrected."""
        latest = self._run.owner_number()
        if latest is not None and latest < self.number:
            with contextlib.suppress(OSError):  # a full disk: the next look is a second away
                self._run.write_owner(asdict(self._owner))
        return latest is None or latest <= self.number

    def _write(self, owner: Owner) -> None:
        self._owner = owner
        patience.persist(lambda: self._run.write_owner(asdict(owner)), self._run.path / "owner.json")


def _may_serve(owner: Owner, job_id: str | None, token: str | None) -> bool:
    """True for the present job, started again, and for a job of the present submission that has not served yet.

    A process that nobody submitted, which has neither job nor token, may serve as well.
    """
    if job_id is not None and job_id in owner.jobs:
        return job_id == owner.job_id
    return token == owner.token or (token is None and job_id is None)


def _follow_ups_of(run: RunDir, job_id: str | None) -> tuple[str, ...]:
    """Return the jobs that follow ``job_id``, which is the run's present job or one of those that follow it."""
    jobs = jobs_of(run)
    return tuple(jobs[jobs.index(job_id) + 1 :]) if job_id in jobs else ()


def _describe(run: RunDir, owner: Owner) -> str:
    if owner.executor != "slurm":
        return f"a supervisor on {owner.host}"
    jobs = jobs_of(run)
    return f"job {jobs[0]}" if jobs else f"the submission by process {owner.pid} on {owner.host}"


def as_note(owner: Owner, jobs: Sequence[str]) -> dict[str, Any]:
    """Return what the submission writes down when the ids of the job and of its follow-up jobs are known."""
    return {
        "executor": owner.executor,
        "job_id": jobs[0],
        "follow_ups": list(jobs[1:]),
        "host": owner.host,
        "time": owner.time,
        "token": owner.token,
    }
