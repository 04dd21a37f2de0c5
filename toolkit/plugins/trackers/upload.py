"""Sends a run's metrics to a tracker, each point once, whatever is killed when.

A resume cuts ``metrics.jsonl`` at its checkpoint and writes the steps after that again, and most trackers cannot take a
point back. So while a run may continue, only lines of steps before its newest checkpoint are sent. A record in the run
folder says how far that is. It is written before each batch and after it, so that a batch that was cut short is known:
what the tracker has of it is asked for, and only the rest is sent.

If a resume had to take an older checkpoint, the file no longer begins with what was sent. Then the tracker's copy is
compared with the file point by point, and made anew if it has a point that the file has not.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import fcntl
import hashlib
import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from toolkit.base import fsio, logs, terminal
from toolkit.base.errors import DamagedFileError, RunLockedError, TrackerError
from toolkit.base.process_limits import limits
from toolkit.checkpoint.folder import newest_step
from toolkit.cli import arguments
from toolkit.files.records import FileRecord
from toolkit.files.run_files import RunState
from toolkit.files.rundir import RunDir
from toolkit.metrics import lines
from toolkit.metrics.lines import MetricsLine
from toolkit.plugins.trackers import RunIdentity, Tracker, build_tracker
from toolkit.run.prepare.snapshot import shown_values

#: The bytes before the end of what was sent that must still be there: some lines, each with its own time.
_TAIL_BYTES = 4096

log = logs.get(__name__)


@dataclass(frozen=True)
class SyncRecord(FileRecord):
    """What a tracker has of ``metrics.jsonl``. It has all up to byte ``end``, and perhaps some up to ``sending``."""

    tracker: str
    place: str  #: the server or file, and the project
    remote: str  #: the run's id there
    end: int = 0
    sending: int = 0
    tail: str = ""  #: a digest of the bytes before ``end``: a restart may have written them anew
    sending_tail: str = ""  #: the same before ``sending``
    step: int | None = None
    points: int = 0


@dataclass(frozen=True)
class SyncOutcome:
    """What became of one call."""

    points_sent: int
    points: int  #: that the copy has now
    step: int | None  #: the last one that was sent
    held_back: int  #: steps that are not sent yet, because a resume would repeat them


def identity(run: RunDir, project: str | None) -> RunIdentity:
    """Return how the run is named in a tracker."""
    attempts = run.attempts()
    begun = attempts[0].begun if attempts else run.status().submitted or run.status().started or 0.0
    return RunIdentity(run.id, run.name, project or run.name, begun, shown_values(run)[0])


class RunSync:
    """One run on its way to one tracker. Only one process may do this at a time."""

    def __init__(self, run: RunDir, name: str, tracker: Tracker) -> None:
        self._run, self._name, self._tracker = run, name, tracker
        digest = hashlib.sha256(tracker.place.encode()).hexdigest()[:8]
        self._path = run.trackers / f"{name}-{digest}.json"
        self._metrics = lines.path_of(run)

    def send(self, everything: bool = False) -> SyncOutcome:
        """Send what is final and was not sent; with ``everything`` also what a resume would write again.

        Raises TrackerError if the tracker is away, TakenError if another process sends this run.
        """
        fsio.make_dir(self._run.trackers, parents=0)
        with self._alone():
            # First how far the run is, then the file: what a checkpoint covers was on the disk before it.
            result, last = self._run.result(), math.inf if everything else last_settled_step(self._run)
            record = SyncRecord.read_or_none(self._path)
            remote, is_found = self._tracker.open(record.remote if record else None)
            if record is None or remote != record.remote or not (is_found or record.points == 0):
                # The copy was removed there, or its record is lost: it is rebuilt from the first line.
                record, is_doubtful = self._fresh(remote), is_found
            else:
                is_doubtful = record.sending > record.end or record.tail != self._tail(record.end)
            before, remote = record.points, record.remote
            if is_doubtful:
                record = self._repaired(record)
            if record.points < before or record.remote != remote:
                before = 0
            record = self._sent(record, last)
            self._tracker.close(None if result is None else result.state)
            held_back = sum(1 for _ in self._final_lines(record.end, math.inf))
            return SyncOutcome(record.points - before, record.points, record.step, held_back)

    def _fresh(self, remote: str) -> SyncRecord:
        """Return the record of a copy of which nothing is known."""
        return SyncRecord(self._name, self._tracker.place, remote)

    def _write(self, record: SyncRecord) -> SyncRecord:
        fsio.write_json(self._path, record.to_json())
        return record

    def _tail(self, end: int) -> str:
        """Return a digest of the last bytes before ``end``. A shorter file has another digest."""
        if end == 0:
            return ""
        try:
            with fsio.open_file(self._metrics) as file:
                file.seek(max(0, end - _TAIL_BYTES))
                found = file.read(min(end, _TAIL_BYTES))
        except FileNotFoundError:
            found = b""
        return hashlib.sha256(found).hexdigest()[:16]

    def _sent(
        self, record: SyncRecord, last: float, has: Callable[[int, str], bool] = lambda step, tag: False
    ) -> SyncRecord:
        """Send the lines up to step ``last``, without the values, by step and tag, that the copy ``has``."""
        batch: list[MetricsLine] = []
        for line in self._final_lines(record.end, last):
            batch.append(line)
            if len(batch) == self._tracker.lines_at_once:
                record, batch = self._send_batch(record, batch, has), []
        return self._send_batch(record, batch, has) if batch else record

    def _final_lines(self, start: int, last: float) -> Iterator[MetricsLine]:
        for line in lines.read(self._metrics, start):
            if line.step > last:
                break
            yield line

    def _send_batch(self, record: SyncRecord, batch: list[MetricsLine], has: Callable[[int, str], bool]) -> SyncRecord:
        end = batch[-1].end
        record = self._write(record.replace(sending=end, sending_tail=self._tail(end)))
        missing = []
        for line in batch:
            if values := {tag: value for tag, value in line.values.items() if not has(line.step, tag)}:
                missing.append(replace(line, values=values))
        if missing:
            self._tracker.send(missing)
        points = record.points + sum(len(line.values) for line in batch)
        return self._write(record.replace(end=end, tail=self._tail(end), step=batch[-1].step, points=points))

    def _repaired(self, record: SyncRecord) -> SyncRecord:
        """Make the copy and the record agree with the file again, after a kill or a resume."""
        # If the file still begins with what was sent, only the batch in flight is in doubt.
        is_begin_there = record.sending > 0 and record.tail == self._tail(record.end)
        begun = record if is_begin_there else self._fresh(record.remote)
        is_batch_there = is_begin_there and record.sending_tail == self._tail(record.sending)
        received = self._tracker.received((begun.step or 0) + 1 if begun.end else 0)
        if isinstance(received, int):
            # Whole lines arrive one after another. What is in them is known only of those that the file still has.
            is_wrong = not is_batch_there and received > (-1 if begun.step is None else begun.step)
            newest, has = received, lambda step, tag: step <= received
        else:
            # The copy is wrong if it has a value that the file has not.
            equal, newest = 0, max((step for step, _ in received), default=-1)
            for line in self._final_lines(begun.end, newest):
                for tag, value in line.values.items():
                    there = received.get((line.step, self._tracker.tag(tag)))
                    if there is not None and (there == value or (math.isnan(there) and math.isnan(value))):
                        equal += 1
            is_wrong = equal != len(received)
            has = lambda step, tag: (step, self._tracker.tag(tag)) in received  # noqa: E731
        if is_wrong:
            log.warning("%s: steps that were sent may have been repeated; the copy is made again", begun.place)
            return self._write(self._fresh(self._tracker.clear()))
        return self._sent(self._write(begun.replace(sending=begun.end)), newest, has)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold a lock. Where the file system has none, continue without."""
        fd = fsio.open_private(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                where = f"run {self._run.id} to {self._tracker.place}"
                raise RunLockedError(f"another `toolkit upload` sends {where}") from None
            except OSError as error:
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                    raise
                log.warning("%s: no file locks there: run only one `toolkit upload` at a time", self._run.trackers)
            yield


def last_settled_step(run: RunDir) -> float:
    """Return the last step whose line will not be written again by a resume.

    While a run lives, the line of its newest checkpoint may still get more values. A run that was completed could
    only be lengthened.
    """
    result = run.result()
    if result is not None and result.state is RunState.COMPLETED:
        return math.inf
    newest = newest_step(run.checkpoints)
    if newest is None:
        return -1
    return newest if result is not None else newest - 1


def _csv_rows(runs: Sequence[RunDir]) -> Iterator[list[str]]:
    """Yield the rows of a table of all points, with a column for each tag. The first row is the head."""
    tags = sorted({tag for run in runs for line in lines.read(lines.path_of(run)) for tag in line.values})
    yield ["run", "step", "wall_time", *tags]
    for run in runs:
        for line in lines.read(lines.path_of(run)):
            cells = (repr(line.values[tag]) if tag in line.values else "" for tag in tags)
            yield [run.id, str(line.step), repr(line.wall_time), *cells]


#: The first columns of our CSV files: only such a file is replaced.
CSV_BEGIN = "run,step,wall_time"


def send(runs: Sequence[RunDir], name: str, project: str | None, *, follow: bool, everything: bool) -> bool:
    """Send the runs' metrics and print what was sent. False where not all of them were sent at the end.

    With ``follow`` this repeats until all runs have ended. Meanwhile a tracker that is away is tried again, and a run
    that another call sends. A run that cannot be sent is named, and keeps no other from being sent. If it is the only
    one, its error is raised: DamagedFileError, or without ``follow`` TakenError.
    """
    left, failed = list(runs), set[RunDir]()
    seen: dict[RunDir, float] = {}
    while left:
        for run in list(left):
            is_last = not follow
            try:
                is_over = run.result() is not None  # before the look at its metrics: nothing is missed
                is_last = is_over or not follow
                final = math.inf if everything else last_settled_step(run)
                # The tracker is not asked while there is nothing new for it.
                if everything or is_over or seen.get(run) != final:
                    _send_one(run, name, project, everything=everything, is_last=is_last)
                    seen[run] = final
                    failed.discard(run)
            except (TrackerError, DamagedFileError, RunLockedError) as error:
                is_last |= isinstance(error, DamagedFileError)
                if isinstance(error, RunLockedError):  # the other call ends, also that of a run that is over
                    is_last = not follow
                if is_last and len(runs) == 1 and not isinstance(error, TrackerError):
                    raise
                if run not in failed or is_last:
                    terminal.say(f"toolkit: error: {run.name}/{run.id}: {error}", sys.stderr)
                failed.add(run)
            if is_last:
                left.remove(run)
        if left:
            time.sleep(limits().upload_every_s)
    return not failed


def _send_one(run: RunDir, name: str, project: str | None, *, everything: bool, is_last: bool) -> None:
    tracker = build_tracker(name, identity(run, project))
    outcome = RunSync(run, name, tracker).send(everything)
    if not (outcome.points_sent or is_last):
        return
    line = f"  {outcome.points_sent} points sent, {outcome.points} there"
    line += f" up to step {outcome.step}" if outcome.step is not None else ""
    if outcome.held_back:
        line += f"\n  {outcome.held_back} steps are held back: a resume would repeat them (--all sends them)"
    print(f"{run.name}/{run.id}: {tracker.place}\n{line}", flush=True)


def write_csv(runs: Sequence[RunDir], to: str | None, *, follow: bool) -> None:
    """Write all points of the runs as one table."""
    target = arguments.replaceable_path("--to", to, CSV_BEGIN) if to else None
    while True:
        # Look for the ends before the metrics are read: nothing written since is missed.
        is_over = not follow or all(run.result() is not None for run in runs)
        if target is None:
            csv.writer(sys.stdout, lineterminator="\n").writerows(_csv_rows(runs))
        else:
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows(_csv_rows(runs))
            fsio.write_atomic(target, text.getvalue())
        if is_over:
            return
        time.sleep(limits().upload_every_s)
