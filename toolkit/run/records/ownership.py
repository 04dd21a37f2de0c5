"""Which submission, and which of its jobs, a run belongs to now.

``owner.json`` names the owner: the submission first, then each job that serves it, attempt by attempt. Owners are
numbered. Each number is given out once, by an exclusive creation, and a later owner overtakes an earlier one, which
then writes nothing more. So of two that take the run at the same moment one is refused, and no two jobs ever train one
run.

Every job carries its submission's token. A job of an earlier submission, or one that has passed the run on to its
follow-up job, finds that it does not own the run, and ends.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.base import fsio, outages
from toolkit.base.errors import RunLockedError
from toolkit.base.process_limits import limits
from toolkit.base.procfs import Liveness, ProcessIdentity
from toolkit.files.run_files import OwnerRecord, Submission
from toolkit.files.rundir import RunDir
from toolkit.slurm import cluster_name

if TYPE_CHECKING:  # it loads the config, and commands that only look at runs need none
    from toolkit.nodes.allocation import Allocation

TOKEN_VARIABLE = "TOOLKIT_SUBMISSION"


def jobs_of(run: RunDir) -> list[str]:
    """Return the ids of the run's current job and its waiting follow-up jobs.

    All come from the run's files. The first may be known only from the submission, which has a file of its own: the job
    may start before that is written.
    """
    owner, sent = run.owner(), run.submission()
    # No owner: a status or submission may still name a job. An owner without a job: the submission's file may.
    if owner is None:
        known = [run.status().job_id if sent is None else sent.job_id]
    elif owner.job_id is not None:
        known = [owner.job_id, *owner.follow_ups]
    elif sent is not None and sent.token == owner.token:
        known = [sent.job_id, *sent.follow_ups]
    else:
        known = []
    return [job for job in known if job is not None]


# --------------------------------------------------------------------------------------------------------- submitting


def new_config(run: RunDir, token: str) -> Path:
    """Return the path of the config of this submission. It becomes the run's own when the submission succeeds."""
    return run.submitit / f"config-{token}.yaml"


def adopt_config(run: RunDir, token: str | None) -> None:
    """Make the current submission's config, if any, the run's own, and keep the old one.

    The submission does this when it has a job id, or the job itself, which may start before.
    """
    owner = run.owner()
    if owner is None or owner.token != token or not fsio.is_there(new_config(run, token)):
        return
    with contextlib.suppress(FileExistsError):  # the other one was faster
        fsio.write_stream(run.path / f"config.before-{token}.yaml", [fsio.read_bytes(run.config)])
    with contextlib.suppress(FileNotFoundError):  # the other one was faster
        new_config(run, owner.token).replace(run.config)


def is_being_submitted(run: RunDir, owner: OwnerRecord | None) -> bool:
    """True while a process calls sbatch for the run, or starts it on a machine."""
    if owner is None or owner.jobs or owner.serves:
        return False
    sent = run.submission()
    if sent is not None and sent.token == owner.token:
        return False
    return time.time() - owner.time < limits().submitting_s and owner.process.life(owner.time) is not Liveness.ENDED


def take(run: RunDir, before: int) -> int:
    """Take the run for a new submission; return its number, the first free one after ``before``.

    Raises TakenError where another process has taken the run since ``before`` was read.
    """
    number = before + 1
    while not run.claim_owner_number(number):
        if not _died_before_it_owned(run, number):
            raise RunLockedError(f"run {run.id} is already being resumed: `toolkit status {run.id}`")
        number += 1
    return number


@contextlib.contextmanager
def restored_on_error(run: RunDir, number: int) -> Iterator[None]:
    """Put the run's files back, and give back the number, if its submission fails.

    sbatch may hang until another submission, which takes this one for dead, has the run. Then the files are its own.
    """
    names = ("owner.json", "status.json", "requests/intent.json", "nodes.json", "result.json")
    try:
        with fsio.unchanged_on_error(*map(run.path.joinpath, names), unless=lambda: run.last_owner_number() > number):
            yield
    except BaseException:
        if run.last_owner_number() == number:  # else a third one could get it, and write over the second's owner
            run.release_owner_number(number)
        raise


def _died_before_it_owned(run: RunDir, number: int) -> bool:
    """True if the process that has taken the number will never write the owner."""
    path = run.path / "owners" / str(number)
    try:
        process = ProcessIdentity.parse(fsio.read_text(path, errors="replace"))
        taken = path.stat().st_mtime
    except FileNotFoundError:  # given back
        return True
    if process is not None and process.life(taken) is Liveness.ENDED:
        # It has ended: an owner that it did write is there by now.
        owner = run.owner_number()
        return owner is not None and owner < number
    return time.time() - taken >= limits().submitting_s


def submit_as(
    run: RunDir, executor: str, number: int, token: str | None = None, *, serves: bool = False
) -> OwnerRecord:
    """Record that a new submission owns the run, with the ``number`` of :func:`take` and the ``token`` of its array.

    ``serves``: this process is a rank without a supervisor.
    """
    process, cluster = _this_process(run), cluster_name.name_here() if executor == "slurm" else ""
    owner = OwnerRecord(number, token or secrets.token_hex(8), executor, serves=serves, cluster=cluster, **process)
    run.write_owner(owner)
    return owner


def _this_process(run: RunDir) -> dict[str, Any]:
    """Return what an owner's file says of this process, and of the folder as it sees it."""
    return {**asdict(ProcessIdentity.of(os.getpid())), "time": time.time(), "path": str(run.path)}


def number_of(run: RunDir) -> int:
    """Return the number of the run's owner, 0 before the first."""
    number = run.owner_number()
    return run.last_owner_number() if number is None else number


# ------------------------------------------------------------------------------------------------------------ serving


class Overtaken(Exception):
    """The run belongs to another submission or job: this one must write nothing more."""


class Claim:
    """A supervisor's claim to its run, from attempt to attempt.

    Each attempt's owner has a number of its own, by which the ranks check whether they still may write.
    """

    def __init__(self, run: RunDir, owner: OwnerRecord) -> None:
        self._run, self.owner = run, owner

    @staticmethod
    def of_job(run: RunDir, allocation: Allocation, token: str | None) -> Claim:
        """Take the run for the job of ``allocation``, or without one for this process.

        Waits while the disk is full. ``token`` is the job's submission's, None in a job that the toolkit did not
        submit. Raises Overtaken.
        """
        while True:
            owner, job_id = run.owner(), allocation.job_id
            jobs = () if owner is None else owner.jobs
            known = jobs_of(run)  # the current job and those that follow it
            # Another owner may have taken the run since this job was submitted.
            if owner is not None and not _may_serve(owner, allocation, token):
                whose = f"a supervisor on {owner.host}"
                if owner.executor == "slurm":
                    whose = f"job {known[0]}" if known else f"the submission by process {owner.pid} on {owner.host}"
                raise Overtaken(f"run {run.id} belongs to {whose}: nothing is left to do here")
            # A second start of the same job keeps its place; a new job becomes the present one.
            if job_id is not None and job_id not in jobs:
                jobs = (*jobs, job_id)
            is_restart = owner is not None and owner.job_id == job_id
            claim = Claim(
                run,
                OwnerRecord(
                    number=run.last_owner_number(),
                    token=token or (owner.token if owner else secrets.token_hex(8)),
                    executor="local" if job_id is None else "slurm",
                    jobs=jobs,
                    follow_ups=tuple(known[known.index(job_id) + 1 :]) if job_id in known else (),
                    serves=True,
                    cluster=allocation.cluster or ("" if owner is None else owner.cluster),
                    command=owner.command if owner is not None and is_restart else None,
                    **_this_process(run),
                ),
            )
            try:
                claim.renew()
            except Overtaken:  # perhaps by a second start of the job at the same moment: check again which may serve
                continue
            return claim

    def renew(self) -> None:
        """Take the next number, for another attempt. Processes left of the last attempt may write no more.

        Raises Overtaken where another owner has it.
        """
        number, mark = self.owner.number + 1, secrets.token_hex(4)
        if not outages.retry_write(lambda: self._run.claim_owner_number(number, mark), self._run.path):
            raise Overtaken(f"run {self._run.id} has been taken over")
        self._write(self.owner.replace(number=number))

    def note_follow_ups(self, jobs: Sequence[str]) -> None:
        """Record which jobs wait to take over, in the order in which they start."""
        self._write(self.owner.replace(follow_ups=tuple(jobs)))

    def note_command(self, command: str | None) -> None:
        """Record what Slurm calls the job's batch script, unless that is one of the toolkit's.

        By this a later command tells the job from another one that has got the same number.
        """
        path = self._run.submission_path
        if command in (None, self.owner.command) or outages.retry_write(lambda: fsio.is_there(path), path, "read"):
            return
        self._write(self.owner.replace(command=command))

    def holds(self) -> bool:
        """True while no other owner has overtaken this one. Correct what an earlier owner has written too late."""
        latest = self._run.owner_number()
        if latest is not None and latest < self.owner.number:
            with contextlib.suppress(OSError):  # a full disk: the next check is seconds away
                self._run.write_owner(self.owner)
        return latest is None or latest <= self.owner.number

    def check(self) -> None:
        """Raise Overtaken where another owner has the run."""
        if not self.holds():
            raise Overtaken("a later attempt has taken over the run: exiting; the ranks end without their supervisor")

    def _write(self, owner: OwnerRecord) -> None:
        self.owner = owner
        outages.retry_write(lambda: self._run.write_owner(owner), self._run.path / "owner.json")


def _may_serve(owner: OwnerRecord, allocation: Allocation, token: str | None) -> bool:
    """True if the job may serve the run of ``owner``.

    The current job may, restarted, and so may the submission's jobs that have not served yet, and a process that was
    not submitted, which has neither job nor token.
    """
    job_id = allocation.job_id
    if token is not None and token != owner.token:
        return False
    # On another cluster the same number is another job.
    is_elsewhere = owner.cluster and allocation.cluster and owner.cluster != allocation.cluster
    if job_id is not None and job_id in owner.jobs and not is_elsewhere:
        return job_id == owner.job_id
    return token is not None or job_id is None


def claim_follow_up(run: RunDir, token: str) -> bool:
    """True for the first that asks: the login node, or the submission's job, which may start before.

    Each submits a first follow-up job. With two of them the run would have two jobs at once after the first one's end.
    """
    try:
        fsio.write_stream(run.submitit / f"first-follow-up-{token}", [])
    except FileExistsError:
        return False
    return True


def late_follow_ups(run: RunDir, owner: OwnerRecord) -> tuple[str, ...]:
    """Return the follow-up jobs that the login node has recorded since ``owner``'s job took the run.

    Without any, that job submits its own, and the login node cancels one that it has not recorded yet.
    """
    if claim_follow_up(run, owner.token):
        return ()
    sent = run.submission()
    is_first = sent is not None and (sent.token, sent.job_id) == (owner.token, owner.job_id)
    return sent.follow_ups if sent is not None and is_first else ()


def note_jobs(run: RunDir, owner: OwnerRecord, *jobs: str, took_s: float | None = None) -> None:
    """Record the submission's job, its follow-up jobs and how long it took. Raises OSError."""
    submission = Submission(
        executor=owner.executor,
        job_id=jobs[0],
        follow_ups=jobs[1:],
        host=owner.host,
        time=owner.time,
        token=owner.token,
        took_s=took_s,
        cluster=owner.cluster,
        birth=ProcessIdentity.of(int(jobs[0])).birth if owner.executor == "local" else "",
    )
    run.write_submission(submission)
