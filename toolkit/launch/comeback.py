"""How a job is brought back: by a requeue, or by a follow-up job; and not onto bad nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from toolkit import logs
from toolkit.cluster import hostlist
from toolkit.cluster.commands import JobRow, Settings, SlurmCommands
from toolkit.errors import SlurmError, SlurmRefusedError
from toolkit.launch import ending, follow_up, intent, patience
from toolkit.launch.allocation import Allocation
from toolkit.launch.nodes import BadNode, Nodes
from toolkit.launch.ownership import Claim
from toolkit.rundir import RunDir

#: A job that is being ended has ended, or is pending again, after so long: KillWait and some.
ENDING_S = 60.0

#: The requeue ends us, too, but not before KillWait; its SIGTERM may end the first try to exclude nodes.
EXCLUDE_S = 10.0

log = logs.get(__name__)


class Comeback:
    """Of the job that ``allocation`` belongs to."""

    def __init__(self, run: RunDir, allocation: Allocation, slurm: SlurmCommands, nodes: Nodes) -> None:
        assert allocation.job_id is not None
        self._run = run
        self._job_id = allocation.job_id
        self._look = partial(how_it_stands, run, slurm, allocation.job_id, allocation.restart_count)
        self._slurm = slurm
        self._nodes = nodes
        self._row: JobRow | None = None
        self._follow_ups: list[str] = []

    def prepare(self, row: JobRow | None, settings: Settings, claim: Claim) -> None:
        """Submit follow-up jobs where Slurm will not bring this one back: later there may be no time for it.

        To be called when the job starts; ``row`` is None where Slurm does not answer. Those that wait already are kept.
        """
        self._row, slurm = row, self._slurm
        self._follow_ups = follow_up.still_waiting(claim.follow_ups, slurm)
        if row is None:
            return
        ask = partial(follow_up.are_needed, row, settings, slurm)
        needed = bool(patience.ask(ask, "Slurm does not say what a preemption does here", patience_s=0.0))
        while (needed or self._follow_ups) and len(self._follow_ups) < follow_up.COUNT:
            job = follow_up.submit_like_ours(self._run, row, self._follow_ups, slurm, claim.token)
            if job is None:
                break
            self._follow_ups.append(job)
            claim.note_follow_ups(self._follow_ups)
        if self._follow_ups and row.is_expedited:  # they wait for an end that a job in the queue never has
            forbid_expedited_requeue(slurm, self._job_id)
            self._row = replace(row, can_requeue=False)

    def requeue(self) -> ending.Slurm:
        """Have the run come back: REQUEUED if it does, CANCELLED if somebody has ended it meanwhile.

        To be called from outside the step and as the last thing, for a requeue ends this process too.
        """
        seen = patience.ask(self._look, "Slurm does not say how the job stands", 0.0)
        if seen is ending.Slurm.CANCELLED:
            self.dismiss()
            return seen
        self._follow_ups = follow_up.still_waiting(self._follow_ups, self._slurm)
        if not self._follow_ups and self._row is not None and not self._row.can_requeue:
            return seen or ending.Slurm.UNKNOWN  # a requeue would be refused for as long as there is time
        has_time = seen is ending.Slurm.RUNNING  # else the job is ended within seconds
        excluded = self._to_exclude() if has_time else None
        if not self._follow_ups:
            seen = take_back(self._look, self._slurm, self._job_id)
            if seen is not ending.Slurm.REQUEUED:
                return seen
        excluded = excluded if has_time else self._to_exclude()
        if excluded:  # refused while the job runs
            for job in self._follow_ups or [self._job_id]:
                exclude = partial(self._slurm.exclude_nodes, job, excluded)
                patience.ask(exclude, "the bad nodes cannot be excluded", EXCLUDE_S)
        return ending.Slurm.REQUEUED

    def _to_exclude(self) -> str | None:
        row = self._row
        return None if row is None else to_exclude(self._run, row, self._slurm, self._nodes.bad, os.environ)

    def dismiss(self) -> None:
        """The run has ended: nobody has to come back."""
        follow_up.dismiss(self._follow_ups, self._slurm)


def how_it_stands(run: RunDir, slurm: SlurmCommands, job_id: str, restart_count: int) -> ending.Slurm:
    """Slurm's view of the job; CANCELLED as soon as somebody has asked for the end of the run."""
    if intent.asked(run):
        return ending.Slurm.CANCELLED
    return ending.how_slurm_sees_it(slurm.show_job(job_id), restart_count)


def forbid_expedited_requeue(slurm: SlurmCommands, job_id: str) -> None:
    """Let a job with ``--requeue=expedite`` end for good, whatever its exit code is. Others are left as they are."""

    def forbid() -> None:
        row = slurm.show_job(job_id)
        if row is not None and row.is_expedited:
            slurm.forbid_requeue(job_id)

    patience.ask(forbid, f"job {job_id} may be held in the queue when it has ended", patience_s=0.0)


def take_back(look: Callable[[], ending.Slurm], slurm: SlurmCommands, job_id: str) -> ending.Slurm:
    """Requeue the job unless somebody cancels it first; returns how it stands then.

    ``look`` says how Slurm sees the job, and is asked before each try and after: between two tries somebody may have
    cancelled it, and ended the program that asked for the requeue with it. A refusal is waited out for ``ENDING_S``:
    Slurm may be requeueing the job itself at this moment.
    """
    deadline = time.monotonic() + patience.PATIENCE_S
    while True:
        try:
            seen = look()
            if seen not in _SETTLED:
                slurm.requeue(job_id, if_running=seen is ending.Slurm.RUNNING)
                seen = look()
            if seen in _SETTLED:
                return seen
        except SlurmError as error:
            log.warning("the job cannot be requeued: %s", error)
            if isinstance(error, SlurmRefusedError):
                deadline = min(deadline, time.monotonic() + ENDING_S)
        if time.monotonic() >= deadline:
            return ending.Slurm.UNKNOWN
        time.sleep(patience.RETRY_EVERY_S)


_SETTLED = (ending.Slurm.REQUEUED, ending.Slurm.CANCELLED)


def to_exclude(
    run: RunDir, row: JobRow, slurm: SlurmCommands, bad: Mapping[str, BadNode], environ: Mapping[str, str]
) -> str | None:
    """The node list to keep the next start of our job off, with what the user excluded: as many bad nodes, the latest
    first, as the job can do without. Of one that could never start Slurm would hold the job for ever (BadConstraints).
    Of drained nodes Slurm itself knows for how long.
    """
    bad = {host: each for host, each in bad.items() if not each.is_drained}
    options = [o for o in follow_up.options_of_job(environ, row, run) if not o.startswith("--exclude=")]
    others = {*hostlist.expand(row.excluded)} - {*bad}
    latest = sorted(bad, key=lambda host: bad[host].since, reverse=True)
    for count in range(len(latest), 0, -1):
        names = hostlist.compress(sorted({*latest[:count], *others}))
        arguments = [*options, f"--exclude={names}"]
        if patience.ask(partial(slurm.could_run, arguments), "sbatch --test-only", 0.0):
            log.info("excluded from the next start: %s", names)
            return names
    if bad:
        log.info("bad nodes %s cannot be excluded: no others are enough", ", ".join(sorted(bad)))
    return None
