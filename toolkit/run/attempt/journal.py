"""Writes the supervisor's records of a run: its status, its attempts and its result."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict
from functools import cached_property
from typing import Any

from toolkit.base import logs
from toolkit.base.errors import DamagedFileError
from toolkit.base.procfs import ProcessIdentity
from toolkit.checkpoint.folder import newest_step
from toolkit.files.run_files import (
    AttemptRecord,
    AttemptStart,
    Efficiency,
    FirstFailure,
    JobUsage,
    RunResult,
    RunState,
    RunStatus,
)
from toolkit.files.rundir import RunDir
from toolkit.metrics import goodput, start_up
from toolkit.nodes.allocation import Allocation
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.verdict import Decision, PastAttempt, Verdict
from toolkit.run.job.nodes import Nodes
from toolkit.slurm.jobs import JobRow

log = logs.get(__name__)


class Journal:
    """The records of one run, written by the one job that supervises it."""

    def __init__(self, run: RunDir, allocation: Allocation, nodes: Nodes) -> None:
        self._run, self._allocation, self._nodes = run, allocation, nodes
        self._unwritten: OSError | None = None
        self._began, self._who = time.time(), asdict(ProcessIdentity.of(os.getpid()))
        self._is_first = True  # attempt of this job, or since its supervisor was killed
        status = run.status()
        is_waiting = status.state is not None and status.state.is_waiting
        self._submitted = status.updated if is_waiting and status.updated is not None else self._began
        self._number = 0  #: of the last attempt
        self.usage: JobUsage | None = None  #: what the job uses, once that is known
        self.staging: tuple[str, ...] = ()  #: what was copied to the nodes, in lines

    def note_staging(self, text: str) -> None:
        self.staging = (*self.staging, text)

    def read(self) -> None:
        """Read what earlier supervisors have written. Later the shared folder may be out of reach for a while."""
        self._number = self._run.next_attempt(self.closed_attempts) - 1

    @cached_property
    def closed_attempts(self) -> list[AttemptRecord]:
        """Return the closed attempts. They are read once: no other process adds one while this job has the run."""
        return self._run.attempts()

    @cached_property
    def _submit_s(self) -> float:
        """How long the submission took; 0 where that is unknown."""
        with contextlib.suppress(OSError):  # a file server may be away
            sent = self._run.submission()
            return 0.0 if sent is None else sent.took_s or 0.0
        return 0.0

    def next_number(self) -> int:
        """Return the number of the attempt that begins now, one more each time."""
        self._number = max(self._number + 1, self._run.next_attempt(self.closed_attempts))
        return self._number

    def start_times(self, row: JobRow | None) -> AttemptStart:
        """Return the times that led to the attempt that begins now. Call it once for each. ``row`` is this job."""
        now, earlier = time.time(), self.closed_attempts
        best = max((line.step_end or 0 for line in earlier), default=0)
        ended = earlier[-1].ended if earlier else None
        # A restart within the job has waited in no queue.
        if not self._is_first:
            return AttemptStart(ended or now, None, 0.0, now, best)
        self._is_first = False
        submitted, started = self._submitted, self._began
        # Slurm's times are those of the job; this process has started later.
        if row is not None and row.submit_time is not None and row.start_time is not None:
            submitted, started = row.submit_time, row.start_time
        since = submitted if ended is None else ended
        ready = started if started >= since else self._began  # the job has had a supervisor before this one
        return AttemptStart(since, submitted, max(0.0, started - max(submitted, since)), ready, best)

    def _account(self, attempt: Attempt, until: float) -> dict[str, Any]:
        """Return the keys of a record that say where the time went up to ``until``; of a left-over attempt its own."""
        start = attempt.start
        if start is None:
            left = attempt.interrupted
            if left is None:
                return {}
            return {"submitted": left.submitted, "goodput": left.goodput, "start_up": left.start_up}
        ledger = goodput.of_attempt(start, attempt.first_step, attempt.progress, until)
        submit_s = self._submit_s if attempt.number == 1 else 0.0
        parts = start_up.of_attempt(start, attempt.started, attempt.first_step, attempt.progress, submit_s)
        more = {"start_up": start_up.as_json(parts)} if parts else {}
        return {"submitted": start.submitted, "goodput": goodput.as_json(ledger), **more}

    def history(self) -> list[PastAttempt]:
        """Return the attempts since a user last started the run. A user who resumes it has fixed something."""
        history: list[PastAttempt] = []
        for line in self.closed_attempts:
            past = PastAttempt(
                line.cause,
                line.decision,
                line.step_end,
                line.suspect,
                step_start=line.step_start,
                step_saved=line.step_saved,
                failure=line.first_failure,
                gained_s=line.gained_s,
                lost_s=max(0.0, line.ended - line.started - line.gained_s),
            )
            history.append(past)
            # A verdict that ended the run closes the account: a user has started what comes after.
            if line.decision in (Decision.GIVE_UP, Decision.FINISH):
                history.clear()
        return history

    def note_gain(self, attempt: Attempt) -> None:
        """Note the newest checkpoint that an ended attempt leaves, and how many seconds it gained."""
        step_saved = newest_step(self._run.checkpoints)
        if step_saved is None:  # their disk may be away: the next attempt must look for them, and not begin anew
            step_saved = attempt.progress.step_saved
        saved_before = max((line.step_saved or 0 for line in self.closed_attempts), default=0)
        attempt.note_gain(step_saved, goodput.gained_s(attempt.progress, step_saved or 0, saved_before))

    def add(self, attempt: Attempt, verdict: Verdict) -> None:
        first = verdict.first_failure
        first_failure = None if first is None else FirstFailure(first.rank, first.host, first.how, first.where)
        # A left-over attempt keeps the job id of the job that made it, as far as its status tells.
        job: dict[str, Any] = {"job_id": self._allocation.job_id, "restart_count": self._allocation.restart_count}
        reached = attempt.progress.step
        if attempt.interrupted is not None:
            job = {"job_id": attempt.interrupted.job_id, "restart_count": attempt.interrupted.restart_count}
            # The last status of a dead supervisor may be older than the last checkpoint.
            reached = None if reached is None else max(reached, attempt.step_saved or 0)
        line = AttemptRecord(
            attempt=attempt.number,
            **job,
            nodes=attempt.plan.hosts,
            world_size=attempt.plan.world_size,
            started=attempt.started,
            stop_asked=attempt.stop_asked,
            ended=attempt.ended,
            cause=verdict.cause,
            decision=verdict.decision,
            step_start=attempt.progress.step_start,
            step_end=reached,
            step_saved=attempt.step_saved,
            gained_s=round(attempt.gained_s, 3),
            lost_nodes=tuple(sorted(attempt.lost_nodes)),
            suspect=verdict.suspect,
            first_failure=first_failure,
            line=verdict.line,
            vacated_nodes=tuple(sorted(attempt.vacated_nodes)),
            slow_nodes=attempt.progress.stragglers,
            code=self._run.code_number,
            **self._account(attempt, attempt.ended),
        )
        lines = self.closed_attempts  # read before the line is in the file
        self._run.add_attempt(line)
        lines.append(line)

    def write_result(self, attempt: Attempt, state: RunState, why: str, efficiency: Efficiency | None) -> None:
        now, lines = time.time(), self.closed_attempts
        at = attempt.progress if attempt.result is None else attempt.result  # rank 0's own result wins
        ledgers, ended = [line.goodput for line in lines], now - goodput.ended_gap_s(lines)
        result = RunResult(
            state,
            len(lines),
            step=at.step,
            epoch=at.epoch,
            samples=at.samples,
            metrics=at.metrics,
            wall_s=round(now - lines[0].started, 3),
            goodput=goodput.as_json(goodput.of_run(ledgers, lines[0].begun, ended)) if any(ledgers) else {},
            efficiency=efficiency,
            why=why,
        )
        self._run.write_result(result)

    def announce(self) -> None:
        """Note in the status that this supervisor has the run now. What an earlier one has left on nodes then ends."""
        with contextlib.suppress(OSError):  # each later status says it, too
            status = self._run.status()
            if status.state is not None:
                self._run.write_status(status.replace(**self._who, updated=time.time()))

    def set_status(self, state: RunState, attempt: Attempt, **more: Any) -> bool:
        """Write the status; return whether that worked."""
        if self.usage is not None:
            more["usage"] = self.usage
        if self.staging:
            more["staging"] = self.staging
        status = RunStatus(
            state=state,
            run=f"{self._run.name}/{self._run.id}",
            job_id=self._allocation.job_id,
            cluster=self._allocation.cluster,
            restart_count=self._allocation.restart_count,
            attempt=attempt.number,
            nodes=attempt.plan.hosts,
            tasks=attempt.plan.tasks,
            world_size=attempt.plan.world_size,
            bad_nodes={host: bad.why for host, bad in self._nodes.bad.items()},
            degraded_nodes={host: degraded.why for host, degraded in self._nodes.degraded.items()},
            started=attempt.started,
            start=attempt.start,
            updated=time.time(),
            stop=attempt.stop,
            progress=attempt.progress,
            printed=attempt.printed,
            **self._who,
            **self._account(attempt, attempt.ended or time.time()),
            **more,
        )
        # A disk that fails for a moment must not end the run. It is logged once, not at each status.
        try:
            self._run.write_status(status)
        except OSError as error:  # the next one is seconds away
            if self._unwritten is None:
                log.error("%s: the status cannot be written: %s", self._run.path, error)
            self._unwritten = self._unwritten or error
            return False
        if self._unwritten is not None:  # logged again: a log on the same disk could not take the line above
            log.warning("%s: can be written again after: %s", self._run.path, self._unwritten)
            self._unwritten = None
        return True


def write_ended(run: RunDir, state: RunState, why: str) -> None:
    """Write result and status of a run that ends while it has no attempt. A file that cannot be read may be why."""
    try:
        attempts, status = len(run.attempts()), run.status()
    except DamagedFileError:
        run.write_result(RunResult(state, why=why))
        return
    run.write_result(RunResult(state, attempts, why=why))
    run.write_status(status.replace(state=state, why=why, ended=time.time()))
