"""Brings a job back by a requeue or a follow-up job, and excludes bad nodes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from toolkit.base import hostlist, logs, outages
from toolkit.base.errors import SlurmError, SlurmRefusedError
from toolkit.base.process_limits import limits
from toolkit.files.rundir import RunDir
from toolkit.nodes.allocation import Allocation
from toolkit.run.job.nodes import BadNode, Nodes
from toolkit.run.job.slurm_job import JobOutcome, outcome_of_row
from toolkit.run.records import ownership, user_requests
from toolkit.run.records.ownership import Claim
from toolkit.run.requeue import follow_up
from toolkit.slurm.commands import Settings, SlurmCommands
from toolkit.slurm.jobs import JobRow

#: The requeue ends this process, too, but not before KillWait; its SIGTERM may end the first try to exclude nodes.
EXCLUDE_S = 10.0

#: The most restarts of one job because of a full disk: each waits for ``give_up_after_s``, and then in the queue.
MAX_RESTARTS_WITHOUT_A_DISK = 100

log = logs.get(__name__)


class JobRequeue:
    def __init__(self, run: RunDir, allocation: Allocation, slurm: SlurmCommands, nodes: Nodes) -> None:
        assert allocation.job_id is not None
        self._run, self._slurm, self._nodes, self._job_id = run, slurm, nodes, allocation.job_id
        self._look = partial(how_it_stands, run, slurm, allocation.job_id, allocation.restart_count)
        self._row: JobRow | None = None
        self._follow_ups: list[str] = []
        self._refusal = ""
        self._retry_at = math.inf

    def prepare(self, row: JobRow | None, settings: Settings, claim: Claim) -> None:
        """Submit follow-up jobs where Slurm will not requeue this one. Later there may be no time for it.

        Call it when the job starts, and again with the first ``row``, which is None where Slurm does not answer.
        Follow-up jobs that wait already are kept.
        """
        self._row, slurm, self._retry_at = row, self._slurm, math.inf
        self._follow_ups = follow_up.prune_waiting(claim.owner.follow_ups, slurm)
        if row is None:
            return
        claim.note_command(row.command)
        # Where Slurm may end the job for good, or follow-up jobs already wait, keep COUNT of them.
        ask = partial(follow_up.are_needed, row, settings, slurm)
        needed = outages.retry_slurm(ask, "Slurm does not report what a preemption does here", wait_s=0.0)
        if needed is None:
            self._retry_at = time.monotonic() + limits().follow_up_every_s
        while (needed or self._follow_ups) and len(self._follow_ups) < follow_up.COUNT:
            try:
                late = () if self._follow_ups else ownership.late_follow_ups(self._run, claim.owner)
                self._follow_ups += follow_up.prune_waiting(late, slurm) or [
                    follow_up.submit_like_ours(self._run, row, self._follow_ups, slurm, claim.owner.token)
                ]
            except (SlurmError, OSError) as error:  # the run has the follow-up jobs that it has
                self._retry_at = time.monotonic() + limits().follow_up_every_s
                if (refusal := f"no follow-up job could be submitted: {error}") != self._refusal:
                    log.warning("%s", refusal)
                self._refusal = refusal
                break
            claim.note_follow_ups(self._follow_ups)
        if self._follow_ups and row.is_expedited:  # the follow-up jobs wait for an end that a queued job never has
            forbid_expedited_requeue(slurm, self._job_id)
            self._row = replace(row, can_requeue=False)

    @property
    def is_due(self) -> bool:
        """True if follow-up jobs are missing, and it is time to try again."""
        return time.monotonic() >= self._retry_at

    def bring_back(self, after: Sequence[str] = ()) -> JobOutcome:
        """Have the run come back, and not before the jobs of ``after`` have ended.

        A follow-up job takes over, else this job is requeued: REQUEUED is returned for either, CANCELLED if a user has
        ended the run meanwhile. Call it from outside the step and last of all: a requeue ends this process, too.
        """
        seen = outages.retry_slurm(self._look, "Slurm does not report the job's state", 0.0)
        if seen is JobOutcome.CANCELLED:
            self.dismiss()
            return seen
        # A follow-up job starts by itself when this job ends; only without one is a requeue needed.
        self._follow_ups = follow_up.prune_waiting(self._follow_ups, self._slurm)
        if not self._follow_ups and self._row is not None and not self._row.can_requeue:
            return seen or JobOutcome.UNKNOWN  # a requeue would be refused until the time is up
        has_time = seen is JobOutcome.RUNNING  # else the job is ended within seconds
        # Choose the nodes to exclude before the requeue, if there is time for it.
        excluded = self._to_exclude() if has_time else None
        if not self._follow_ups:
            seen, self._refusal = requeue_job(self._look, self._slurm, self._job_id)
            if seen is not JobOutcome.REQUEUED:
                return seen
        excluded = excluded if has_time else self._to_exclude()
        if excluded:  # refused while the job runs
            for job in self._follow_ups or [self._job_id]:
                exclude = partial(self._slurm.exclude_nodes, job, excluded)
                outages.retry_slurm(exclude, "the bad nodes cannot be excluded", EXCLUDE_S)
        if after:
            # The first follow-up job waits for this job, too. The later ones wait for the first.
            job, on = (self._follow_ups[0], [self._job_id, *after]) if self._follow_ups else (self._job_id, after)
            depend = partial(self._slurm.depend, job, on)
            outages.retry_slurm(depend, "the job may start too early, and then looks again", EXCLUDE_S)
        return JobOutcome.REQUEUED

    @property
    def why_not_back(self) -> str:
        """The reason why a run stays where it is after :meth:`bring_back`, with Slurm's last refusal."""
        return "Slurm did not take it back" + (f" ({self._refusal})" if self._refusal else "")

    def _to_exclude(self) -> str | None:
        row = self._row
        return None if row is None else to_exclude(self._run, row, self._slurm, self._nodes.bad, os.environ)

    def dismiss(self) -> None:
        """Cancel the follow-up jobs of a run that has ended."""
        follow_up.dismiss(self._follow_ups, self._slurm)


def how_it_stands(run: RunDir, slurm: SlurmCommands, job_id: str, restart_count: int) -> JobOutcome:
    """Return Slurm's view of the job; CANCELLED once its run's end was requested."""
    if user_requests.read_intent(run):
        return JobOutcome.CANCELLED
    return outcome_of_row(slurm.show_job(job_id), restart_count)


def forbid_expedited_requeue(slurm: SlurmCommands, job_id: str) -> None:
    """Let a job with ``--requeue=expedite`` end for good, with any exit code. Leave other jobs as they are."""

    def forbid() -> None:
        row = slurm.show_job(job_id)
        if row is not None and row.is_expedited:
            slurm.forbid_requeue(job_id)

    outages.retry_slurm(forbid, f"job {job_id} may be held in the queue when it has ended", wait_s=0.0)


def requeue_job(look: Callable[[], JobOutcome], slurm: SlurmCommands, job_id: str) -> tuple[JobOutcome, str]:
    """Requeue the job unless it is cancelled first; return how it stands then, and Slurm's last refusal or "".

    ``look`` tells how Slurm sees the job, and is called before each try and after it. Between two tries the job may
    have been cancelled, and with it the program that asked for the requeue may have been ended. A refusal is retried
    for ``ending_s``: Slurm may be requeueing the job itself at this moment.
    """
    deadline, refusal = time.monotonic() + limits().give_up_after_s, ""
    while True:
        try:
            seen = look()
            # A requeue counts only once Slurm shows it.
            if seen not in _SETTLED:
                slurm.requeue(job_id, if_running=seen is JobOutcome.RUNNING)
                seen = look()
            if seen in _SETTLED:
                return seen, ""
        except (SlurmError, OSError) as error:  # ``look`` reads the run's folder, too
            refusal = f"the job cannot be requeued: {error}"
            log.warning("%s", refusal)
            if "Only batch jobs" in refusal:  # such as one of salloc: it will be no other
                return JobOutcome.UNKNOWN, refusal
            if isinstance(error, SlurmRefusedError):
                deadline = min(deadline, time.monotonic() + limits().ending_s)
        if time.monotonic() >= deadline:
            return JobOutcome.UNKNOWN, refusal
        time.sleep(limits().retry_every_s)


_SETTLED = (JobOutcome.REQUEUED, JobOutcome.CANCELLED)


def to_exclude(
    run: RunDir, row: JobRow, slurm: SlurmCommands, bad: Mapping[str, BadNode], environ: Mapping[str, str]
) -> str | None:
    """Return the nodes to exclude from the job's next start.

    They are the user's exclusions and the latest bad nodes, as many of these as the job can do without. Return None if
    no bad node can be excluded. Slurm would hold a job that could never start for ever (BadConstraints). Drained nodes
    are left out: Slurm itself knows how long to avoid them.
    """
    bad = {host: each for host, each in bad.items() if not each.is_drained}
    components = follow_up.options_of_components(environ, row, run)
    others = {host for each in (row, *row.others) for host in hostlist.expand(each.excluded)} - {*bad}
    latest = sorted(bad, key=lambda host: bad[host].since, reverse=True)
    # Try all bad nodes first, then ever fewer, until Slurm could still run the job.
    for count in range(len(latest), 0, -1):
        names = hostlist.compress(sorted({*latest[:count], *others}))
        tests = [[*options, f"--exclude={names}"] for options in _with_room(components)]
        if all(outages.retry_slurm(partial(slurm.could_run, test), "sbatch --test-only", 0.0) for test in tests):
            log.info("excluded from the next start: %s", names)
            return names
    if bad:
        log.info("bad nodes %s cannot be excluded: too few others are left", ", ".join(sorted(bad)))
    return None


def _with_room(components: Sequence[Sequence[str]]) -> Iterator[list[str]]:
    """Yield the options of jobs that can run exactly if one with these components can, except for nodes to exclude.

    Slurm would test each component as if it were alone. Several that share a partition need room next to each other.
    """
    for options in components:
        kept = [option for option in options if not option.startswith("--exclude=")]
        partition = [option for option in options if option.startswith("--partition=")]
        sharing = [other for other in components if partition == [o for o in other if o.startswith("--partition=")]]
        if len(sharing) > 1:
            nodes = sum(int(o.partition("=")[2]) for other in sharing for o in other if o.startswith("--nodes="))
            kept = [option for option in kept if not option.startswith(("--nodes=", "--ntasks"))] + [f"--nodes={nodes}"]
        yield kept


def bring_back_if_it_passes(run: RunDir, error: OSError, slurm: SlurmCommands) -> bool:
    """Have the run come back after a full disk, or a file server that was away. It has not failed.

    No file can record that. A follow-up job sees it by the exit code, EXIT_STOPPED, and takes over.
    """
    if error.errno not in outages.PASSING:
        return False
    allocation = Allocation.slurm(os.environ)
    return allocation.restart_count < MAX_RESTARTS_WITHOUT_A_DISK and _bring_back(run, slurm, allocation)


def bring_back_after_deaths(run: RunDir, error: Exception, slurm: SlurmCommands) -> bool:
    """Have the run come back when its supervisors were killed one after the other.

    The next start records the attempt with this error as its cause, which counts for ``retry.max_requeues``. Without an
    attempt nothing could count: then the run ends here.
    """
    try:
        if outages.retry_write(run.interrupted_status, run.path, "read") is None:
            return False
    except OSError as away:
        return bring_back_if_it_passes(run, away, slurm)
    with suppress(OSError):  # the cause is then reported less well
        run.write_status(run.status().replace(why=str(error)))
    return _bring_back(run, slurm, Allocation.slurm(os.environ))


def bring_back_if_half_started(run: RunDir, slurm: SlurmCommands) -> bool:
    """Have the run come back where Slurm has started the first component of its job again, but not the others.

    That component may have nodes of the others, which still have the steps of the earlier start.
    """
    allocation = Allocation.slurm(os.environ)
    if not allocation.components or allocation.restart_count == 0 or allocation.job_id is None:
        return False
    look = partial(slurm.show_job, allocation.job_id)
    row = outages.retry_slurm(look, "Slurm does not report the states of this job's components")
    if row is None or not row.is_half_started:
        return False
    log.warning("Slurm has started the first component of job %s alone: requeueing all", allocation.job_id)
    return _bring_back(run, slurm, allocation)


def _bring_back(run: RunDir, slurm: SlurmCommands, allocation: Allocation) -> bool:
    """Have the run come back, see `JobRequeue.bring_back`. With a follow-up job the exit code is enough."""
    with suppress(OSError):  # then this job is requeued: its follow-up job finds the run in another's hands
        owner = run.owner()
        if owner is not None and owner.follow_ups:
            return True
    if allocation.job_id is None:
        return False
    look = partial(how_it_stands, run, slurm, allocation.job_id, allocation.restart_count)
    return requeue_job(look, slurm, allocation.job_id)[0] is JobOutcome.REQUEUED
