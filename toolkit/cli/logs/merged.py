"""Merges the logs of an attempt's ranks by time, and shows failed ranks' reports."""

from __future__ import annotations

import heapq
import re
import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from toolkit.base import reading
from toolkit.base.errors import RequestError
from toolkit.base.log_text import as_drawn
from toolkit.base.open_files import claim_all
from toolkit.files.rundir import RunDir
from toolkit.run.attempt.error_files import read_error_files
from toolkit.run.attempt.facts import first_failure

#: A time at the beginning of a line, as the toolkit and Python's logging write it: with the date, or without.
_TIME = re.compile(r"\W{0,2}(?:(\d{4}-\d\d-\d\d)[ T])?(\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?")
#: Without a date, a time that is this much earlier than the one before is of the next day.
_NEXT_DAY_S = 12 * 3600
#: Longer lines are shown in parts: a file of one line need not fit into memory.
_MOST_CHARS = 1 << 20
#: The number of log lines that are shown of a rank that failed without a report, such as one that was killed.
_LAST_LINES = 25


def merged(run: RunDir, attempt: int) -> Iterator[str]:
    """Yield the lines of the supervisor and of all ranks in order of time.

    Each begins with its writer's name. A line without a time belongs to the one before it. Lines of the supervisor from
    before the attempt are left out.
    """
    files = sorted(run.attempt_logs(attempt).glob("rank-*.log"), key=_rank)
    if not files:
        raise RequestError(f"run {run.id} has no log of a rank of attempt {attempt} yet; `toolkit logs {run.id}`")
    claim_all()  # there may be a thousand ranks
    # The attempt's start, to the second. Where no file has it, the time of the oldest log.
    status = run.status()
    known = {line.attempt: line.started for line in run.attempts()} | {status.attempt: status.started}
    begun = float(int(known.get(attempt) or min(path.stat().st_mtime for path in files)))
    names = [f"rank {_rank(path)}" for path in files]
    width = max(len("supervisor"), *map(len, names))
    streams = [_stamped(path, f"{name:<{width}} | ", begun) for path, name in zip(files, names, strict=True)]
    supervisor = _stamped(run.logs / "supervisor.log", f"{'supervisor':<{width}} | ", begun)
    streams.append((at, line) for at, line in supervisor if at >= begun)
    for _, line in heapq.merge(*streams, key=lambda stamped: stamped[0]):
        yield line


def _rank(path: Path) -> int:
    match = re.search(r"(\d{1,9})", path.name)
    return int(match[1]) if match else 0


def _stamped(path: Path, head: str, begun: float) -> Iterator[tuple[float, str]]:
    """Yield the lines of a log behind ``head``, each with its time."""
    at = begun
    try:
        with reading.open_text(path, newline="\n") as file:
            while read := file.readline(_MOST_CHARS):
                line = as_drawn(read)
                at = _time_of(line, at)
                yield at, f"{head}{line}\n"
    except FileNotFoundError:
        return


def _time_of(line: str, before: float) -> float:
    """Return the time that a line begins with. Without one, return ``before``, the time of the line above."""
    match = _TIME.match(line)
    if match is None:
        return before
    date = match[1] or time.strftime("%Y-%m-%d", time.localtime(before))
    fraction = float(f"0.{match[5] or 0}")
    try:
        at = datetime.fromisoformat(f"{date}T{match[2]}:{match[3]}:{match[4]}").timestamp() + fraction
    except ValueError:
        return before
    # A time without a date says no day, and without a fraction it may seem to be before the line above.
    if match[1] is None and before - at > _NEXT_DAY_S:
        at += 86400
    return at if match[1] else max(at, before)


def errors(run: RunDir, attempt: int) -> Iterator[str]:
    """Yield each failed rank's report about its end, the first failing rank first.

    A rank that was killed wrote no report. If it failed first, the last lines of its log are shown.
    """
    reports = sorted(read_error_files(run.attempt_logs(attempt)), key=lambda report: report.time)
    record = next((line for line in run.attempts() if line.attempt == attempt), None)
    # The supervisor knows of signals as well, but only when the attempt has ended.
    first = (record and record.first_failure) or first_failure(reports)
    if first is None:
        yield f"no rank of attempt {attempt} has failed\n"
        return
    reports.sort(key=lambda report: report.rank != first.rank)
    if not reports or reports[0].rank != first.rank:
        yield f"rank {first.rank} on {first.host} failed first: {first.how}\n"
        if first.rank is not None and (log := run.rank_log(attempt, first.rank)).exists():
            with reading.open_text(log, newline="\n") as file:
                yield from (f"  {as_drawn(line).rstrip()}\n" for line in deque(file, maxlen=_LAST_LINES))
    for report in reports:
        order = "first" if report.rank == first.rank else "later"
        yield f"rank {report.rank} on {report.host} failed {order}: {report.how}\n"
        yield from (f"  {line}\n" for line in report.traceback.rstrip().splitlines())
