"""How a job is brought back: by a requeue, or by a follow-up job; and not onto bad nodes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial

from toolkit import logs
from toolkit.cluster import hostlist
from toolkit.cluster.commands import JobRow, Settings, SlurmCommands
from toolkit.errors import SlurmError, SlurmRefusedError
from toolkit.launch import ending, intent, patience
from toolkit.launch.allocation import Allocation
from toolkit.launch.heir import Heir, options_of_job
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
        self._heir: Heir | None = None

    def prepare(self, row: JobRow | None, settings: Settings, claim: Claim) -> None:
        """Submit the follow-up job where Slurm will not bring this one back: later there may be no time for it.

        To be called when the job starts; ``row`` is None where Slurm does not answer. A job that was started again
        keeps the follow-up job that it has.
        """
        self._row = row
        slurm = self._slurm
        heir = None if claim.follow_up is None else Heir(claim.follow_up, slurm)
        if heir is not None and heir.still_waits():
            self._heir = heir
        elif row is not None and (not row.can_requeue or self._would_be_cancelled(row, settings)):
            self._heir = Heir.submit(self._run, row, slurm, claim.token)
            claim.note_follow_up(self._heir.job_id if self._heir is not None else None)

    def _would_be_cancelled(self, row: JobRow, settings: Settings) -> bool:
        cancels = partial(self._slurm.preemption_cancels, row, settings)
        return bool(patience.ask(cancels, "Slurm does not say what a preemption does here", patience_s=0.0))

    def requeue(self) -> ending.Slurm:
        """Have the run come back: REQUEUED if it does, CANCELLED if somebody has ended it meanwhile.

        To be called from outside the step and as the last thing, for a requeue ends this process too.
        """
        seen = patience.ask(self._look, "Slurm does not say how the job stands", 0.0)
        if seen is ending.Slurm.CANCELLED:
            self.dismiss()
            return seen
        if self._heir is not None and not self._heir.still_waits():
            log.warning("the follow-up job %s was cancelled", self._heir.job_id)
            self._heir = None
        if self._heir is None and self._row is not None and not self._row.can_requeue:
            return seen or ending.Slurm.UNKNOWN  # a requeue would be refused for as long as there is time
        has_time = seen is ending.Slurm.RUNNING  # else the job is ended within seconds
        excluded = self._to_exclude() if has_time else None
        if self._heir is None:
            seen = take_back(self._look, self._slurm, self._job_id)
            if seen is not ending.Slurm.REQUEUED:
                return seen
        excluded = excluded if has_time else self._to_exclude()
        if excluded:  # refused while the job runs
            next_job = self._job_id if self._heir is None else self._heir.job_id
            exclude = partial(self._slurm.exclude_nodes, next_job, excluded)
            patience.ask(exclude, "the bad nodes cannot be excluded", EXCLUDE_S)
        return ending.Slurm.REQUEUED

    def _to_exclude(self) -> str | None:
        row = self._row
        return None if row is None else to_exclude(self._run, row, self._slurm, self._nodes.bad, os.environ)

    def dismiss(self) -> None:
        """The run has ended: nobody has to come back."""
        if self._heir is not None:
            self._heir.dismiss()


def how_it_stands(run: RunDir, slurm: SlurmCommands, job_id: str, restart_count: int) -> ending.Slurm:
    """Slurm's view of the job; CANCELLED as soon as somebody has asked for the end of the run."""
    if intent.asked(run):
        return ending.Slurm.CANCELLED
    return ending.how_slurm_sees_it(slurm.show_job(job_id), restart_count)


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
    """
    options = [o for o in options_of_job(environ, row, run) if not o.startswith("--exclude=")]
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
