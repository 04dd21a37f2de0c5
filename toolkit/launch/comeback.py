"""How a job is brought back: by a requeue, or by an heir where that is forbidden; and not onto bad nodes."""

from __future__ import annotations

import os
import time

from toolkit import logs
from toolkit.cluster import hostlist
from toolkit.cluster.commands import JobRow, SlurmCommands
from toolkit.launch import ending, patience
from toolkit.launch.allocation import Allocation
from toolkit.launch.heir import Heir, options_of_job
from toolkit.launch.nodes import Nodes
from toolkit.rundir import RunDir

#: A job that is being ended has ended, or is pending again, after so long: KillWait and some.
ENDING_S = 60.0

log = logs.get(__name__)


class Comeback:
    """Of the job that ``allocation`` belongs to."""

    def __init__(self, run: RunDir, allocation: Allocation, slurm: SlurmCommands, nodes: Nodes) -> None:
        assert allocation.job_id is not None
        self._run = run
        self._job_id = allocation.job_id
        self._restart_count = allocation.restart_count
        self._slurm = slurm
        self._nodes = nodes
        self._row: JobRow | None = None
        self._heir: Heir | None = None

    def prepare(self, row: JobRow | None) -> None:
        """When the job starts; ``row`` is None where Slurm does not answer. Where it may not be requeued an heir is
        submitted now: later there may be no time for it."""
        self._row = row
        if row is not None and not row.can_requeue:
            self._heir = Heir.submit(self._run, row, self._slurm)

    def requeue(self) -> bool:
        """From outside the step, and as the last thing, for it ends this process too. Whether the run goes on."""
        excluded = self._to_exclude()
        if self._heir is None and not (self._is_taken_back() or self._comes_back_anyway()):
            return False
        if excluded:  # refused while the job runs
            next_job = self._job_id if self._heir is None else self._heir.job_id
            exclude = lambda: self._slurm.exclude_nodes(next_job, excluded)  # noqa: E731
            patience.ask(exclude, "the bad nodes cannot be excluded", patience_s=0.0)
        return True

    def _is_taken_back(self) -> bool:
        def requeue() -> bool:
            self._slurm.requeue(self._job_id)
            return True

        return bool(patience.ask(requeue, "the job cannot be requeued"))

    def _comes_back_anyway(self) -> bool:
        """A requeue is refused while the job ends: for good, or because Slurm requeues it at this very moment."""
        deadline = time.monotonic() + ENDING_S
        while time.monotonic() < deadline:
            row = patience.ask(lambda: self._slurm.show_job(self._job_id), "Slurm does not say how it stands")
            if ending.how_slurm_sees_it(row, self._restart_count) is ending.Slurm.REQUEUED:
                return True
            if row is None or row.is_over:
                return False
            time.sleep(patience.RETRY_EVERY_S)
        return False

    def dismiss(self) -> None:
        """The run has ended: nobody has to come back."""
        if self._heir is not None:
            self._heir.dismiss()

    def _to_exclude(self) -> str | None:
        """The node list to keep the next start off, with what the user excluded. None where the job could then never
        start: Slurm would not refuse it, but hold it for ever (BadConstraints)."""
        bad, row = self._nodes.bad, self._row
        if not bad or row is None:
            return None
        names = hostlist.compress({*bad, *hostlist.expand(row.excluded)})
        options = [o for o in options_of_job(os.environ, row, self._run) if not o.startswith("--exclude=")]
        ask = lambda: self._slurm.could_run([*options, f"--exclude={names}"])  # noqa: E731
        could_run = patience.ask(ask, "sbatch --test-only", patience_s=0.0)
        log.info("bad nodes %s %s", names, "are excluded" if could_run else "cannot be excluded: no others are enough")
        return names if could_run else None
