"""Slurm's answer about all jobs of this user, shared by all of the user's processes.

The answer is a small file in the user's cache folder, one for each cluster. A process that needs a newer one first
writes there that it asks, then asks, then writes the answer. The others read it. So Slurm is asked at most once in
`every_s` seconds, however many processes watch however many runs. No lock is held while Slurm is asked: a process that
is killed or stopped meanwhile delays the next question, and blocks no other process. Without a folder to write to,
each process asks for itself, at the same intervals.

An answer that fails or does not come says nothing about any job: unknown never means "dead".
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from toolkit.base import fsio
from toolkit.base.errors import SlurmError
from toolkit.base.procfs import Liveness, ProcessIdentity
from toolkit.base.trust import cache_dir
from toolkit.files.records import MOMENT, FileRecord
from toolkit.slurm import cluster_name, commands
from toolkit.slurm.commands import TIMEOUT_S, SlurmCommands
from toolkit.slurm.jobs import JobStatus, parse_statuses, rows_by_id, status_line

#: How old an answer may be for a command that a user waits for, and for a program that watches.
FRESH_S, WATCH_S = 5.0, 30.0
#: A process that asks may take this long: one call of squeue and one of sacct, each until its time limit.
ANSWER_S = 2 * TIMEOUT_S + 5.0
#: The most seconds to wait for what another process asks: it may be stopped. What it asks for is unknown until then.
PATIENCE_S = 10.0
#: Accounting is asked again about a job that it does not know after this time.
GONE_S = 600.0
#: The most jobs that accounting is asked about at once, and that the file keeps after their end.
MOST_ACCOUNTED, MOST_ENDED = 2_000, 20_000
#: The most seconds to wait for the file's lock, which its holders need for milliseconds.
LOCK_S = 1.0


@dataclass(frozen=True)
class QueueAnswer(FileRecord):
    """The file. Each job is a line as squeue prints it. Times in seconds since the epoch."""

    asked: Annotated[float, MOMENT] = 0.0
    asker: str = ""  #: the process that asks, see `toolkit.base.procfs`; empty when it has its answer
    calls: int = 1  #: programs of Slurm that were called for it
    error: str = ""  #: why there is no newer answer
    jobs: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()  #: jobs that are over and that the controller may have forgotten
    gone: Mapping[str, Annotated[float, MOMENT]] = field(default_factory=dict)  #: unknown to all, and since when
    missed: tuple[str, ...] = ()  #: ids that a process looked for in this answer and did not find

    def statuses(self, job_ids: Iterable[str]) -> dict[str, JobStatus | None]:
        """Return the status of each job, None where Slurm does not know it. Jobs not asked about are missing."""
        found = rows_by_id(job_ids, parse_statuses((*self.jobs, *self.ended)))
        return {job_id: status for job_id, status in found.items() if status is not None or job_id in self.gone}


class SharedQueue:
    """The shared answer. ``path`` None keeps it in this process."""

    def __init__(
        self,
        slurm: SlurmCommands,
        path: Path | None,
        now: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._slurm = slurm
        self._path = path
        self._now = now
        self._pause = pause
        self._own = QueueAnswer()  #: the answer where no file can be written

    def show_jobs(self, job_ids: Iterable[str], every_s: float = FRESH_S) -> dict[str, JobStatus | None]:
        """Return the status of each job. The answer may be up to ``every_s`` old.

        None means that neither the controller nor accounting knows the job. A job that is missing was submitted after
        the answer, and will be in the next one. Raises SlurmError while Slurm does not answer.
        """
        wanted = list(dict.fromkeys(job_ids))
        if not wanted:
            return {}
        deadline = self._now() + PATIENCE_S
        while True:
            answer = self._read()
            if self._is_due(answer, every_s):
                answer = self._ask(wanted, every_s)
            if not answer.asker or self._now() > deadline:
                break
            # Another process is asking at this moment.
            self._pause(0.1)
        if answer.error or answer.asker:
            raise SlurmError(answer.error or f"Slurm has not answered {answer.asker.rpartition(' ')[0]} yet")
        statuses = answer.statuses(wanted)
        if len(statuses) < len(wanted):
            self._note_missed(job_id for job_id in wanted if job_id not in statuses)
        return statuses

    def _note_missed(self, missed: Iterable[str]) -> None:
        """Have the next question, whoever asks it, be about these jobs, too.

        A job may have ended, and the controller may have forgotten it, before any process asked. Only accounting knows
        it then, and that is asked about the jobs of the process that asks.
        """
        with self._locked():
            answer = self._read()
            every = tuple(dict.fromkeys((*answer.missed, *missed)))[-MOST_ACCOUNTED:]
            # A process that asks at this moment would lose its place in the file, or overwrite the note.
            if not answer.asker and every != answer.missed:
                self._write(answer.replace(missed=every))

    def _is_due(self, answer: QueueAnswer, every_s: float) -> bool:
        """True if Slurm may be asked now. It is not asked too often, nor while another process asks."""
        age_s = self._now() - answer.asked
        if age_s < -ANSWER_S:  # from the clock of a node that is ahead
            return True
        # A process on another host may still ask; one on this host only if it lives.
        asker = ProcessIdentity.parse(answer.asker)
        is_asked = bool(answer.asker) and (asker is None or asker.life(answer.asked) is not Liveness.ENDED)
        return age_s >= (ANSWER_S if is_asked else every_s * answer.calls)

    def _ask(self, wanted: Sequence[str], every_s: float) -> QueueAnswer:
        """Ask Slurm, unless another process was faster. Return the answer, or the one that is being asked for."""
        with self._locked():
            before = self._read()
            if not self._is_due(before, every_s):
                return before
            wanted = list(dict.fromkeys((*wanted, *before.missed)))
            this = str(ProcessIdentity.of(os.getpid()))
            asked = before.replace(asked=self._now(), asker=this, calls=1, error="", missed=())
            self._write(asked)
        try:
            jobs = self._slurm.user_jobs()
        except SlurmError as error:
            answer = asked.replace(asker="", error=str(error))
        else:
            # Keep the jobs that were over before the controller forgot them: accounting may be off.
            present = {job.job_id for job in jobs}
            known_before = parse_statuses((*asked.ended, *asked.jobs))
            ended = {job.job_id: job for job in known_before if job.is_over and job.job_id not in present}
            known, now = rows_by_id(wanted, [*jobs, *ended.values()]), self._now()
            gone = {job_id: since for job_id, since in asked.gone.items() if 0 <= now - since < GONE_S}
            lost = [job_id for job_id in wanted if known[job_id] is None and job_id not in gone][:MOST_ACCOUNTED]
            for job in self._slurm.accounted_jobs(lost) if lost else ():
                ended[job.job_id] = job
            found = rows_by_id(lost, list(ended.values()))
            answer = asked.replace(
                asker="",
                calls=2 if lost else 1,
                jobs=tuple(map(status_line, jobs)),
                ended=tuple(map(status_line, list(ended.values())[-MOST_ENDED:])),
                gone=gone | {job_id: now for job_id in lost if found[job_id] is None},
            )
        self._write(answer)
        return answer

    # ------------------------------------------------------------------------------------------------------- the file

    def _read(self) -> QueueAnswer:
        """Return what the file holds. One that is damaged counts as missing."""
        if self._path is None:
            return self._own
        with contextlib.suppress(OSError):
            return QueueAnswer.read_or_none(self._path) or QueueAnswer()
        return QueueAnswer()

    def _write(self, answer: QueueAnswer) -> None:
        self._own = answer
        if self._path is None:
            return
        try:
            fsio.write_json(self._path, answer.to_json(), durable=False)
        except OSError:  # a full disk: from now on this process keeps its own
            self._path = None

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the file's lock. Where a file system has no locks, or a holder was stopped, do without."""
        if self._path is None:
            yield
            return
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                fd = fsio.open_private(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
                stack.callback(os.close, fd)
                _lock(fd, self._pause)
            yield


def of_user(slurm: SlurmCommands | None = None) -> SharedQueue:
    """Return the queue that this user's processes share on this cluster."""
    folder = cache_dir()
    return SharedQueue(slurm or commands.Slurm(), folder and folder / f"queue-{_cluster(os.environ)}.json")


def _cluster(environ: Mapping[str, str]) -> str:
    """Return a file's name for the cluster here. Login nodes of several clusters may share a home."""
    program = shutil.which("squeue", path=environ.get("PATH")) or ""
    name = cluster_name.name_in_config(environ) or socket.gethostname()
    words = (name, environ.get("SLURM_CONF", ""), environ.get("SLURM_CLUSTERS", ""), program, str(os.getuid()))
    return hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]


def _lock(fd: int, pause: Callable[[float], None]) -> None:
    """Take the lock of an open file, or give up after LOCK_S. Raises OSError."""
    for _ in range(int(LOCK_S / 0.05)):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pause(0.05)
        else:
            return
