"""The handle of a run: watches, awaits, stops or cancels it from the login node."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.base import fsio, logs
from toolkit.base.durations import as_clock
from toolkit.base.errors import DamagedFileError, JobFailedError, RequestError, ToolkitError, did_you_mean
from toolkit.base.process_limits import limits
from toolkit.base.procfs import Liveness
from toolkit.checkpoint.folder import committed, step_of
from toolkit.files import records, rundir
from toolkit.files.run_files import RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.metrics import lines as metric_lines
from toolkit.run.attempt import advice
from toolkit.run.attempt.journal import write_ended
from toolkit.run.records import ownership, user_requests
from toolkit.run.records.submitted_run import SubmittedRun, is_queued, submitter_of
from toolkit.run.records.user_requests import Intent
from toolkit.slurm import shared_queue, states
from toolkit.slurm.commands import Slurm, SlurmCommands
from toolkit.slurm.jobs import JobStatus

if TYPE_CHECKING:  # reads configs, which a caller that only looks does not need
    from toolkit.config import Overrides

log = logs.get(__name__)


#: A local run's supervisor that cannot be seen from here, and has written no status for so long, is not waited for.
SILENT_S = 300.0


@dataclass(frozen=True)
class Run(SubmittedRun):
    """A submitted run, as seen from the login node::

    >>> run = toolkit.submit("configs/digits_ddp.yaml", ["train.epochs=1"], executor="local")
    >>> run.wait()["state"], run.status()["attempt"]
    ('completed', 1)
    >>> len(run.metrics()) > 0, [*run.checkpoints()] == [run.result()["step"]], "eval/accuracy" in run.logs()
    (True, True, True)
    """

    def status(self) -> dict[str, Any]:
        """Return what the run's own files say."""
        return self.dir.status().to_json()

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait for the end and return ``result.json``.

        Raises TimeoutError, or JobFailedError for a job that ended before it could write a result, or whose run folder
        is gone. Raises RequestError for a local run that is silent, and whose process cannot be seen from here.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        for _ in self.statuses():
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"run {self.id} has not ended after {timeout_s:.0f} s")
        return self._result()

    def __await__(self) -> Generator[Any, None, dict[str, Any]]:
        """Wait as :meth:`wait` does, in a coroutine or a notebook: ``result = await run``."""
        return self._awaited().__await__()

    async def _awaited(self) -> dict[str, Any]:
        for _ in self._looks():
            await asyncio.sleep(limits().read_files_every_s)
        return self._result()

    def _result(self) -> dict[str, Any]:
        result = self.dir.result()
        assert result is not None
        return result.to_json()

    def _repr_html_(self) -> str:
        """Return state, progress and figures, for a notebook. Slurm is not asked."""
        status, result = self.dir.status(), self.dir.result()
        at = status.progress
        # The result, if there is one, overrides the last status, which may be older.
        state = (status.state or RunState.QUEUED) if result is None else result.state
        step = at.step if result is None or result.step is None else result.step
        metrics = at.metrics if result is None or not result.metrics else result.metrics
        rows = [("run", f"{self.dir.name}/{self.id}"), ("state", str(state)), ("folder", str(self.dir.path))]
        if step is not None:
            rows.append(("step", f"{step} of {at.total_steps or '?'}"))
        if result is None and at.eta_s is not None and state.has_ranks:
            rows.append(("time left", as_clock(at.eta_s)))
        for name, value in sorted(metrics.items()):
            rows.append((name, "not a number" if value is None else f"{value:.4g}"))
        if result is not None and result.why:
            rows.append(("why", result.why))
        bar = ""
        if at.total_steps:
            bar = f'<progress max="{at.total_steps}" value="{min(step or 0, at.total_steps)}"></progress>'
        cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
        return f"{bar}<table>{cells}</table>"

    def watch(self) -> Iterator[dict[str, Any]]:
        """Yield what :meth:`status` returns, twice a second until the run has ended."""
        return (status.to_json() for status in self.statuses())

    def statuses(self) -> Iterator[RunStatus]:
        """Yield the status as a record, twice a second until the run has ended."""
        for status in self._looks():
            yield status
            time.sleep(limits().read_files_every_s)

    def _looks(self) -> Iterator[RunStatus]:
        """Yield the status at each call, until the run has ended.

        Reads files. Slurm is asked every 30 s, and only while the status does not change: a live supervisor rewrites it
        all the time. All callers of this user share one answer (`toolkit.slurm.shared_queue`).
        """
        queue = shared_queue.of_user(Slurm())
        ask_at = time.monotonic() + limits().ask_slurm_every_s
        over_since: float | None = None
        status, began = RunStatus(), time.time()
        while self.dir.result() is None:
            now, before, status = time.monotonic(), status, self.dir.status()
            # A new status proves that the supervisor lives, so the next question to Slurm can wait.
            if self.executor == "slurm" and status != before:
                ask_at, over_since = now + limits().ask_slurm_every_s, None
            # A local process is checked in each round: that costs nothing.
            if now >= ask_at or self.executor != "slurm":
                ask_at = now + limits().ask_slurm_every_s
                is_over = self.is_over(partial(queue.show_jobs, every_s=limits().ask_slurm_every_s))
                over_since = (over_since or now) if is_over else None
            if over_since is not None:
                self._raise_without_result(now - over_since)
            is_silent = self.executor != "slurm" and time.time() - (status.updated or began) > SILENT_S
            if is_silent and (why := self.unknown_state_advice()) is not None:
                raise RequestError(f"{why}; it has written nothing for {SILENT_S:.0f} s and is not waited for")
            yield status

    def result(self) -> dict[str, Any]:
        """Return ``result.json`` of a completed run. Raises JobFailedError, with the cause, for any other."""
        result = self.dir.result()
        if result is None:
            raise JobFailedError(f"run {self.id} has not ended; wait() for it")
        if result.state is not RunState.COMPLETED:
            text = f"run {self.id} {result.state}: {result.why or ''}; logs: {self.dir.logs}"
            raise JobFailedError(f"{text}; next: {advice.of(self.dir)}")
        return result.to_json()

    def cancel(self, *, is_gone: bool = False) -> None:
        """End the run for good; its checkpoints stay.

        Raises RequestError for a local run whose process cannot be seen from here, unless the caller knows that it
        ``is_gone`` with its machine or container.
        """
        if not is_gone:
            self._end(Intent.CANCEL)
            return
        if self.unknown_state_advice() is None:
            state = "is over" if self.is_over() else "has a job or process that can be asked"
            raise RequestError(f"run {self.id} {state}: `toolkit cancel {self.id}` ends it, without --gone")
        self.is_elsewhere()  # raises
        # As a new owner: a process that lives in spite of all notices that, and ends.
        ownership.submit_as(self.dir, self.executor, ownership.take(self.dir, ownership.number_of(self.dir)))
        user_requests.record_intent(self.dir, Intent.CANCEL)
        self._write_ended(Intent.CANCEL)

    def resume(self, overrides: Overrides = (), *, code: bool = False) -> Run:
        """Submit the ended run again, from its last checkpoint, with ``overrides`` of its config from now on.

        ``code``: with the sources that the project has now, not with those of its submission.
        Raises RequestError for a run that has not ended.
        """
        from toolkit.run.submission.resume_run import resume  # uses this module

        return resume(self.dir, overrides, code=code)

    def logs(self, rank: int | None = 0, *, attempt: int | None = None, tail: int | None = None) -> str:
        """Return what a rank has printed in an attempt, the newest one unless its number is given.

        ``rank=None``: the supervisor's log, which is one for all attempts. ``tail``: so many lines of its end. Raises
        RequestError where there is no such log.
        """
        number = attempt or max(self.dir.attempts_with_logs(), default=1)
        path = self.dir.logs / "supervisor.log" if rank is None else self.dir.rank_log(number, rank)
        try:
            with fsio.open_text(path) as file:
                return file.read() if tail is None else "".join(deque(file, maxlen=tail))
        except FileNotFoundError:
            raise RequestError(f"run {self.id}: there is no log {path}") from None

    def metrics(self) -> Any:
        """Return what the run has logged: a row for each step, with its ``step``, ``time`` and values by tag.

        A ``pandas.DataFrame`` where pandas is installed, else a list of dicts. ``time`` is in seconds since the epoch.
        """
        logged = metric_lines.read(metric_lines.path_of(self.dir))
        rows = [{"step": line.step, "time": line.wall_time, **line.values} for line in logged]
        try:
            import pandas
        except ImportError:
            return rows
        return pandas.DataFrame(rows)

    def checkpoints(self) -> dict[int, Path]:
        """Return the folders of the committed checkpoints by their steps, the newest last."""
        return {step_of(path): path for path in reversed(committed(self.dir.checkpoints))}

    def stop(self) -> None:
        """Have the ranks commit a checkpoint and end. The run is not requeued; :func:`resume` continues with it.

        Raises RequestError for a local run whose process cannot be seen from here.
        """
        self._end(Intent.STOP)

    def _end(self, what: Intent) -> None:
        if (why := self.unknown_state_advice()) is not None:
            raise RequestError(why)
        if self.executor == "debug" and not self.is_over():
            raise RequestError(f"run {self.id} was started without a supervisor: {self.how_to_end()}")
        user_requests.record_intent(self.dir, what)  # first: a job that starts at this moment finds the request
        if self.executor == "slurm":
            is_over = self._end_jobs(what, Slurm())
            # The supervisor may have left for a requeue before the request was there. It has written so then.
            deadline = time.monotonic() + limits().ending_s
            while is_over is None and self._has_left() and time.monotonic() < deadline:
                time.sleep(limits().look_at_ending_every_s)
                is_over = self._end_jobs(what, Slurm())
        else:
            owner = self.dir.owner()
            # Else it finds the request at its start.
            if owner is not None and owner.serves and owner.process.life() is Liveness.ALIVE:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(owner.pid, signal.SIGTERM)
            is_over = self.is_over()
        # Without a supervisor that could write the result, write it here.
        if is_over and not ownership.is_being_submitted(self.dir, self.dir.owner()):
            self._write_ended(what)

    def wake_supervisor(self) -> None:
        """Have the run's supervisor look for requests at once. Without this it looks every few seconds.

        SIGCONT does no harm to whatever else is the job's batch script.
        """
        with suppress(ToolkitError, OSError):
            owner = self.dir.owner()
            if self.executor == "slurm":
                slurm = Slurm()
                _hurry(self._jobs().ask(slurm.show_jobs), slurm)
            elif owner is not None and owner.serves and owner.process.life() is Liveness.ALIVE:
                os.kill(owner.pid, signal.SIGCONT)

    def _has_not_trained(self) -> bool:
        """True if no rank of the current job has begun its work. A later attempt may find its state in memory."""
        state = self.dir.status().state
        return state is None or state.is_waiting or (state is RunState.STARTING and not self.dir.attempts())

    def _has_left(self) -> bool:
        """True if the supervisor has left the run to be continued, and so writes no result."""
        state = self.dir.status().state
        return self.dir.result() is None and state is not None and state.is_waiting

    def _end_jobs(self, what: Intent, slurm: SlurmCommands) -> bool | None:
        """Tell the run's jobs to end; return whether none has a process. None while Slurm is ending one of them."""
        answers, killed = self._jobs().ask(slurm.show_jobs), False
        # The last follow-up job comes first, because each would start when those before it have ended.
        for job, status in reversed(answers.items()):
            if status is None:
                continue
            # A job that still waits, or that was suspended before it trained, has nothing to save: a stop cancels it.
            has_nothing = is_queued(status) or (status.is_paused and self._has_not_trained())
            if what is Intent.CANCEL or has_nothing:
                slurm.cancel(job)
                killed |= status.is_paused
            elif status.is_paused:
                continues = states.PAUSED[status.state].format(job)
                log.warning("Slurm has suspended job %s: the run stops %s", job, continues)
        # Slurm sends what it has suspended SIGKILL alone: its supervisor writes no result.
        if killed:
            deadline = time.monotonic() + limits().ending_s
            while not (is_over := self.is_over()) and time.monotonic() < deadline:
                time.sleep(limits().look_at_ending_every_s)
            return is_over
        left = [status for status in answers.values() if status is not None and not status.is_over]
        if what is Intent.STOP:
            _hurry(answers, slurm)
        if any(status.state == "COMPLETING" for status in left):
            return None
        return all(map(is_queued, left))

    def _write_ended(self, what: Intent) -> None:
        """Write the result for a job that waits in the queue, or died. It has no supervisor to do so."""
        if self.dir.result() is None:
            state = user_requests.end_state(what)
            how = advice.end_words(self.dir.status(), state, len(self.dir.attempts()))
            write_ended(self.dir, state, how)

    def _raise_without_result(self, over_for_s: float) -> None:
        """Raise JobFailedError if the run's job is over and its result is overdue here."""
        if not fsio.is_there(self.dir.path):
            raise JobFailedError(f"run {self.id}: its folder {self.dir.path} is gone")
        list(self.dir.path.iterdir())  # reading the folder makes NFS forget that a file was absent
        wait_s = limits().files_lag_s if self.executor == "slurm" else 0.0
        if over_for_s < wait_s or self.dir.result() is not None:
            return
        asked = user_requests.read_intent(self.dir)
        if asked is not None:  # the request reached a job that died, or went back into the queue, at that moment
            self._write_ended(asked)
            return
        jobs = self._jobs().ids
        owner = f"the job {jobs[0]}" if jobs else "its submission"
        if len(jobs) > 1:
            owner += f", with its follow-up jobs {', '.join(jobs[1:])},"
        raise JobFailedError(
            f"run {self.id}: {owner} is over and wrote no result; see {self.dir.submitit} "
            f"and {self.dir.logs}; {advice.of(self.dir, advice.LOST)}"
        )


def _hurry(jobs: Mapping[str, JobStatus | None], slurm: SlurmCommands) -> None:
    # It would have those that are suspended continue.
    for job in [job for job, status in jobs.items() if status is not None and status.state == "RUNNING"]:
        with suppress(ToolkitError, OSError):
            slurm.cancel(job, signal="CONT", batch=True)


def find(text: str) -> Run:
    """Return the handle of an earlier run, as of a notebook whose kernel was restarted.

    ``text`` is what commands take: a run id, the beginning or the last eight digits of one, a config's name (its newest
    run), or a path. Raises RunNotFoundError, which says what there is, and RequestError for a run that was never
    submitted, as under torchrun::

        >>> sent = toolkit.submit("configs/digits_ddp.yaml", {"train.epochs": 1}, executor="local")
        >>> toolkit.find(sent.id).wait()["state"]
        'completed'
    """
    return attach(rundir.find(text))


def runs(name: str = "*", *, state: str | None = None) -> list[Run]:
    """Return the handles of earlier runs, the newest last.

    ``name`` is the config's name or a pattern, ``state`` what the runs' own files say, such as ``completed``. Runs that
    were never submitted are left out, and with a warning those that have a file that cannot be read::

        >>> [run.result()["metrics"]["eval/accuracy"] > 0.5 for run in toolkit.runs("digits*", state="completed")][:1]
        [True]
    """
    if state is not None and state not in (known := [*map(str, RunState)]):
        raise RequestError(f"state: unknown value {state!r}; {did_you_mean(state, known)}valid: {', '.join(known)}")
    found = list[Run]()
    for run in rundir.all_runs():
        if not fnmatchcase(run.name, name):
            continue
        try:
            if state in (None, (run.result() or run.status()).state):
                found.append(attach(run))
        except DamagedFileError as error:
            records.warn_once(str(error))
        except RequestError:  # it was never submitted
            continue
    return found


def attach(run: RunDir) -> Run:
    """Return the handle of an earlier run, of any process. Raises RequestError for one that was never submitted."""
    return Run(run, *submitter_of(run))
