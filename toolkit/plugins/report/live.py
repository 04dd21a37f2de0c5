"""What the live page shows: a part of the table of runs, the facts about some of them, and the end of a log.

All of it is read from the runs' files when it is asked for. What is kept between two requests is bounded: the paths of
the runs, rows and facts of runs that have ended, and the reduced curves of a few runs.
"""

from __future__ import annotations

import os
import re
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from toolkit.base import fsio
from toolkit.base.errors import DamagedFileError
from toolkit.base.terminal import visible
from toolkit.base.tracebacks import as_drawn
from toolkit.cli import columns, run_rows, selection
from toolkit.cli.follow import GrowingLog
from toolkit.cli.run_rows import OVER, RunRow
from toolkit.cli.watch_view import LIST_EVERY_S, SlurmBackoff
from toolkit.files import rundir
from toolkit.files.rundir import RunDir
from toolkit.metrics import lines
from toolkit.plugins.report.curves import CurveReader
from toolkit.plugins.report.facts import ReportFacts, facts_of
from toolkit.plugins.report.page import matches
from toolkit.plugins.sweep import rows as sweep_rows
from toolkit.plugins.sweep.rows import PointRow
from toolkit.plugins.sweep.sweep_folder import SweepDir
from toolkit.slurm.shared_queue import SharedQueue

V = TypeVar("V")

#: Runs and sweeps on a page of the table, and runs on one page of curves.
PAGE_ROWS, MOST_RUNS = 50, 8
#: Metrics are read for so long at a time, and the rest at the next updates: a million lines take seconds.
CURVES_S = 0.2
#: How many rows and facts of ended runs are kept, and the curves of how many runs.
KEPT_ROWS, KEPT_RUNS = 5000, MOST_RUNS
#: A log is shown from so many lines before its end on, and sent in pieces of so many bytes.
LOG_LINES, LOG_BYTES = 300, 1 << 16
#: A reader that is more bytes behind continues at the end: lines may be very long, and a browser keeps no more.
MOST_LOG_BYTES = 500_000
#: Logs of ranks that can be chosen.
MOST_LOGS = 64
#: The name of the log that is no rank's.
SUPERVISOR = "supervisor"


@dataclass(frozen=True)
class TableEntry:
    """A row of the table: a run, or a sweep, which may be unfolded to its points."""

    row: RunRow
    is_sweep: bool = False
    points: Sequence[PointRow] = ()  #: the best first
    keys: Sequence[str] = ()  #: the swept ones
    metric: str = ""


@dataclass(frozen=True)
class TablePage:
    """A page of the table, and how many runs and sweeps the filter leaves."""

    entries: Sequence[TableEntry]
    page: int
    pages: int
    count: int


class LiveRuns:
    """The runs that a command line selects. Its methods may be called by several threads."""

    def __init__(self, args: Namespace, queue: SharedQueue) -> None:
        self._args = args
        self._ask = SlurmBackoff(queue)
        self._lock = Lock()
        self._listed_at = self._searched_at = float("-inf")  #: at all, and for a run that was not there
        self._runs: dict[str, RunDir] = {}
        self._entries: list[RunDir | SweepDir] = []
        self._points: set[str] = set()
        self._finished: set[int] = set()  #: ids of entries, since the last listing; one may be resumed
        self._over: dict[RunDir, tuple[int, RunRow]] = {}
        self._facts: dict[RunDir, tuple[int, ReportFacts]] = {}
        self._readers: dict[RunDir, CurveReader] = {}

    def find(self, title: str) -> RunDir | None:
        """Return the run of ``name/id``. It is looked up in the listing: no path is made of what a browser sends."""
        with self._lock:
            self._list()
            run, now = self._runs.get(title), time.monotonic()
            is_there = run is not None and os.path.isdir(run.path)  # noqa: PTH112  # Path's own may raise
            if title and not is_there and now - self._searched_at > 1:
                self._listed_at, self._searched_at = float("-inf"), now  # it was submitted or removed since
                self._list()
            return self._runs.get(title)

    def table(self, pattern: str, is_unfinished: bool, page: int, sort: str, unfolded: str) -> TablePage:
        """Return a page of the table, the newest run first. ``sort`` orders the rows of the page by a column."""
        with self._lock:
            self._list()
            there = [entry for entry in self._entries if not pattern or _matches(entry, pattern)]
            if is_unfinished:
                self._finished |= {id(e) for e in there if id(e) not in self._finished and not _is_unfinished(e)}
                there = [entry for entry in there if id(entry) not in self._finished]
            pages = max(1, -(-len(there) // PAGE_ROWS))
            page = min(page, pages)
            shown = there[(page - 1) * PAGE_ROWS : page * PAGE_ROWS]
            of_runs = iter(self._rows([entry for entry in shown if isinstance(entry, RunDir)]))
            entries = [
                TableEntry(next(of_runs)) if isinstance(entry, RunDir) else self._sweep(entry, unfolded)
                for entry in shown
            ]
        if sort:
            by_row = {id(entry.row): entry for entry in entries}
            ordered = columns.in_order([entry.row for entry in entries], sort.removeprefix("-"), sort.startswith("-"))
            entries = [by_row[id(row)] for row in ordered]
        return TablePage(entries, page, pages, len(there))

    def facts(self, runs: Sequence[RunDir]) -> tuple[list[ReportFacts], list[str]]:
        """Return the facts about each run, and which runs cannot be read, and why."""
        found, unreadable = list[ReportFacts](), list[str]()
        with self._lock:
            for run, row in zip(runs, self._rows(runs), strict=True):
                try:
                    found.append(self._facts_of(run, row, CURVES_S / len(runs)))
                except (DamagedFileError, OSError) as error:
                    unreadable.append(f"{run.name}/{run.id}: {error}")
        return found, unreadable

    def _list(self) -> None:
        """List the runs anew, if that is due: new ones appear, and removed ones go."""
        if time.monotonic() - self._listed_at < LIST_EVERY_S:
            return
        named, _ = selection.named(self._args.run)
        runs = selection.by_path(named or rundir.all_runs(), self._args)
        self._runs = {f"{run.name}/{run.id}": run for run in runs}
        stamped = list[tuple[str, SweepDir]]()
        if not self._args.run and not selection.is_asked(self._args) and (paths := rundir.sweep_paths()):
            # What is a point stays one: only new runs are looked at.
            runs = [run for run in runs if run.id not in self._points]
            single, stamped = sweep_rows.group_by_sweep(runs, paths)
            self._points |= {run.id for run in runs} - {run.id for run in single}
            runs = single
        stamps: list[tuple[str, RunDir | SweepDir]] = [*((run.id, run) for run in runs), *stamped]
        self._entries = [entry for _, entry in sorted(stamps, key=lambda each: each[0], reverse=True)]
        self._finished = set()
        self._listed_at = time.monotonic()

    def _rows(self, runs: Sequence[RunDir]) -> list[RunRow]:
        """Return the rows of runs. That of a run that has ended is read once, until it is resumed."""
        known = {run: self._over[run][1] for run in runs if run in self._over and self._over[run][0] == _ended(run)}
        unread = iter([run for run in runs if run not in known])
        # In pieces: the rows of very many at once would be read by other processes, and a server must not fork.
        while piece := list(islice(unread, 500)):
            for run, row in zip(piece, run_rows.with_slurm(run_rows.read_rows(piece), self._ask), strict=True):
                known[run] = row
                if (ended := _ended(run)) and row.state in OVER:
                    _keep(self._over, run, (ended, row), KEPT_ROWS)
        return [known[run] for run in runs]

    def _sweep(self, sweep: SweepDir, unfolded: str) -> TableEntry:
        row = sweep_rows.of_sweep(sweep, self._rows)
        if sweep.name != unfolded or row.points is None:
            return TableEntry(row, is_sweep=True)
        found = sweep_rows.of_points(sweep, self._rows)
        metric = sweep_rows.metric_of(sweep, found)
        best = sweep_rows.ranked(found, metric)
        rest = [each for each in found if sweep_rows.value_of(each, metric) is None]
        keys = dict.fromkeys(key for each in found for key in each.point.values)
        return TableEntry(row, True, [*best, *rest], list(keys), metric.removeprefix("-"))

    def _facts_of(self, run: RunDir, row: RunRow, most_s: float) -> ReportFacts:
        ended = _ended(run)
        if run in self._facts and self._facts[run][0] == ended:
            return self._facts[run][1]
        reader = self._readers.get(run) or CurveReader(lines.path_of(run))
        _keep(self._readers, run, reader, KEPT_RUNS)
        curves = reader.read(most_s)
        facts = replace(facts_of(run, row, curves), logs=_logs(run), unread_bytes=reader.left_bytes)
        if ended and row.state in OVER and not reader.left_bytes:
            _keep(self._facts, run, (ended, facts), KEPT_RUNS)
        return facts


def _keep(kept: dict[RunDir, V], run: RunDir, value: V, most: int) -> None:
    """Keep a value as the newest one, and drop the oldest where there are too many."""
    kept.pop(run, None)
    kept[run] = value
    if len(kept) > most:
        del kept[next(iter(kept))]


def _matches(entry: RunDir | SweepDir, pattern: str) -> bool:
    name = f"{entry.name}/{entry.id}" if isinstance(entry, RunDir) else entry.name
    return matches(name, pattern)


def _is_unfinished(entry: RunDir | SweepDir) -> bool:
    """True for a run without a result, and for a sweep with such a point, or whose points cannot be read."""
    try:
        runs = [entry] if isinstance(entry, RunDir) else [entry.run_of(point) for point in entry.points()]
    except (DamagedFileError, OSError):
        return True
    return any(not _ended(run) and run.config.exists() for run in runs)


def _ended(run: RunDir) -> int:
    """Return when the result was written, in nanoseconds; 0 without one."""
    try:
        return os.stat(f"{run.path}/result.json").st_mtime_ns  # noqa: PTH116  # of 10,000 runs: a Path takes long
    except OSError:
        return 0


def _newest(run: RunDir) -> int:
    return max(run.attempts_with_logs(), default=0)


def _logs(run: RunDir) -> tuple[str, ...]:
    """Return the names of the logs of the newest attempt."""
    found = (re.fullmatch(r"rank-([0-9]{1,7})\.log", path.name) for path in run.attempt_logs(_newest(run)).glob("*"))
    ranks = sorted(int(match[1]) for match in found if match)
    return *map(str, ranks[:MOST_LOGS]), SUPERVISOR


def log_piece(run: RunDir, name: str, attempt: int, at: int) -> dict[str, Any]:
    """Return what a log of the newest attempt has from byte ``at`` on, if that is still ``attempt``; else its end.

    ``name`` is a rank's number or SUPERVISOR. A last line without a line break, such as a progress bar, is drawn and
    sent again next time.
    """
    rank = None if name == SUPERVISOR else int(name)
    newest = _newest(run)
    log = GrowingLog(run, rank, newest)
    try:
        size = log.path.stat().st_size
    except FileNotFoundError:
        size = 0
    is_behind = newest == attempt and at >= 0 and size - at > MOST_LOG_BYTES
    is_new = newest != attempt or at < 0 or is_behind
    if is_new:
        log.skip(LOG_LINES)
        at = max(log.position[1], size - MOST_LOG_BYTES)
    data = _bytes(log.path, at)
    whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == LOG_BYTES else b"")
    ended = whole.removesuffix(b"\n").split(b"\n") if whole else []
    text = "[lines are left out here: the log grew faster than it was read]\n" if is_behind else ""
    text += "".join(f"{_line(line)}\n" for line in ended)
    rest = data[len(whole) :]
    return {
        "attempt": newest,
        "at": at + len(whole),
        "isNew": is_new,
        "text": text,
        "drawn": _line(rest),
        "isMore": len(data) == LOG_BYTES,
    }


def _bytes(path: Path, at: int) -> bytes:
    try:
        with fsio.open_file(path) as file:
            file.seek(at)
            return file.read(LOG_BYTES)
    except FileNotFoundError:
        return b""


def _line(line: bytes) -> str:
    return visible(as_drawn(line.decode(errors="replace")))
