"""`toolkit watch`: a table of runs that is read anew from their files each second.

Slurm is asked only about runs that wait or whose supervisor is silent: 30 s after the last question of any process of
this user, and less often while its answers do not change.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from toolkit import registry
from toolkit.base import terminal
from toolkit.cli import columns, run_rows, selection, show
from toolkit.cli.run_rows import RowCache
from toolkit.files import rundir
from toolkit.files.run_files import state_word
from toolkit.files.rundir import RunDir
from toolkit.slurm import shared_queue
from toolkit.slurm.jobs import JobStatus
from toolkit.slurm.shared_queue import WATCH_S, SharedQueue

READ_EVERY_S = 1.0
#: New runs, and ended ones that were resumed, are looked for this often.
LIST_EVERY_S = 10.0
#: Ended runs stay in the table this long.
ENDED_S = 3600.0
#: The longest time between two questions to Slurm while its answers do not change.
MOST_RARELY_S = 300.0


class Watch:
    """The rows to show, second by second."""

    def __init__(
        self, args: Namespace, cache: RowCache, queue: SharedQueue, now: Callable[[], float] = time.time
    ) -> None:
        self._args = args
        self._cache = cache
        self._queue = queue
        self._now = now
        self._runs: list[RunDir] = []
        self._sweep_rows: list[dict[str, Any]] = []
        self._listed_at: float | None = None
        self._ask_every_s = WATCH_S
        self._asked_at: float | None = None
        self._asked_jobs: set[str] = set()
        self._answers: dict[str, JobStatus | None] = {}

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows as they are now, the newest last. Rows of sweeps are up to 10 s old."""
        rows = self._rows_of(self._listed())
        rows = selection.by_state([*rows, *self._sweep_rows], self._args.state)
        return sorted(rows, key=lambda row: row["run"] if row["points"] is None else rundir.id_time(row["submitted"]))

    def _rows_of(self, runs: Sequence[RunDir]) -> list[dict[str, Any]]:
        return show.with_slurm(self._cache.rows(runs), self._ask)

    def _listed(self) -> list[RunDir]:
        """Return the runs that the arguments select. Without any: those that go on or have ended lately."""
        if self._listed_at is None or self._now() - self._listed_at >= LIST_EVERY_S:
            self._listed_at = self._now()
            named, _ = selection.named(self._args.run)
            self._runs = selection.by_place(named or rundir.all_runs(), self._args)
            if not self._args.run and not selection.is_asked(self._args):
                self._fold_sweeps()
                rows, since = self._cache.rows(self._runs), self._now() - ENDED_S
                self._cache.save()
                pairs = zip(self._runs, rows, strict=True)
                self._runs = [run for run, row in pairs if row["state"] not in run_rows.OVER or _ended(row) > since]
        return self._runs

    def _fold_sweeps(self) -> None:
        """Replace the runs of points by the rows of their sweeps."""
        # The rows of sweeps read configs, which takes longer to import than all that is here.
        if not (paths := rundir.sweep_paths()) or (sweep_rows := registry.find("hooks", "sweep_rows")) is None:
            self._sweep_rows = []
            return
        ask, since = partial(self._queue.show_jobs, every_s=WATCH_S), self._now() - ENDED_S
        self._runs, stamped = sweep_rows.fold(self._runs, paths)
        rows = [sweep_rows.row_of(sweep, self._rows_of, ask) for _, sweep in stamped]
        self._sweep_rows = [row for row in rows if row["state"] not in run_rows.OVER or _ended(row) > since]

    def _ask(self, jobs: Sequence[str]) -> dict[str, JobStatus | None]:
        """Return Slurm's answer, an earlier one while it is not time to ask again."""
        is_new = not self._asked_jobs.issuperset(jobs)
        waited_s = self._ask_every_s if self._asked_at is None else self._now() - self._asked_at
        if waited_s >= self._ask_every_s or (is_new and waited_s >= WATCH_S):
            self._asked_at, self._asked_jobs = self._now(), set(jobs)
            answers = show.ask_slurm(jobs, self._queue, WATCH_S)
            self._ask_every_s = WATCH_S
            if answers == self._answers:
                self._ask_every_s = min(2 * waited_s, MOST_RARELY_S)
            self._answers = answers
        return {job: self._answers[job] for job in jobs if job in self._answers}


def _ended(row: dict[str, Any]) -> float:
    return float(row["ended"] or row["updated"] or 0.0)


def run(args: Namespace) -> None:
    """Show the table until q or Ctrl-C. Without a terminal print it at each change, until all runs are over."""
    watch = Watch(args, run_rows.cache_of(rundir.runs_root()), shared_queue.of_user())
    names = tuple(filter(None, (args.columns or "").split(",")))
    if sys.stdout.isatty():
        with _keys() as pressed:
            _on_screen(watch, names, pressed)
    else:
        _on_paper(watch, names)


def _on_paper(watch: Watch, names: Sequence[str]) -> None:
    """Print the table at each change of a state, until all runs are over."""
    before: list[tuple[str, str]] | None = None
    while True:
        rows = watch.rows()
        states = [(row["run"], str(row["state"])) for row in rows]
        if states != before:
            before = states
            print(time.strftime("%H:%M:%S"), show.count_by_state(rows), flush=True)
            print(show.status_table(rows, names), end="\n\n", flush=True)
        if all(columns.is_over(row) for row in rows):
            return
        time.sleep(READ_EVERY_S)


def _on_screen(watch: Watch, names: Sequence[str], pressed: Callable[[float], str]) -> None:
    from rich.live import Live

    with Live(console=terminal.console(highlight=False), screen=True, auto_refresh=False) as live:
        while True:
            begun = time.monotonic()
            size = shutil.get_terminal_size()
            live.update(picture(watch.rows(), names, size.columns, size.lines), refresh=True)
            key = pressed(max(0.0, begun + READ_EVERY_S - time.monotonic()))
            if key[:1] in ("q", "Q", "\x03") or key == "\x1b":  # an arrow key begins with Esc, too
                return


_COLORS = {"running": "green", "failed": "red", "lost": "red", "unreadable": "red", "completed": "blue"}


def picture(rows: Sequence[dict[str, Any]], names: Sequence[str], width: int, height: int) -> Any:
    """Return what the screen shows: a head, the rows that fit, and notes about runs."""
    from rich.text import Text

    head = f"{time.strftime('%H:%M:%S')}  {show.count_by_state(rows)}"
    # Notes take a quarter of the screen at most.
    notes = [note for row in rows if (note := _note(row))][: max(2, height // 4)]
    room = max(1, height - len(notes) - 3)
    # One line is kept for the number of runs that do not fit.
    shown = columns.with_short_states(rows[-(room if len(rows) <= room else max(1, room - 1)) :])
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{head[:width]}\n", "bold")
    table = show.table(columns.cells(shown, names or columns.that_fit(shown, width))).splitlines()
    text.append(f"{table[0]}\n", "dim")
    if len(shown) < len(rows):
        text.append(f"... and {len(rows) - len(shown)} older runs\n", "dim")
    for row, line in zip(shown, table[1:], strict=True):
        text.append(f"{line}\n", _COLORS.get(state_word(str(row["state"])), ""))
    for note in notes:
        text.append(f"{note}\n", "yellow")
    text.append("q ends this; the runs go on", "dim")
    return text


def _note(row: dict[str, Any]) -> str:
    """Return a line on damage, why the run ended, or what it waits for. Empty if there is none."""
    start = columns.start_text(row["expected_start"])
    waits = columns.text(row, "waits_for")
    if waits and start:
        waits = f"starts about {start}; {waits}"
    found = row["damage"] or [row["why"] if row["state"] != "completed" else None, waits]
    what = next(filter(None, found), "")
    return f"{row['name']} {row['run'][-8:]}: {what}" if what else ""


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a key and returns it. Without a keyboard it only waits.

    The terminal is as before at the end.
    """
    if not sys.stdin.isatty():
        yield _no_key
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield (
            lambda seconds: os.read(fd, 64).decode(errors="replace") if select.select([fd], [], [], seconds)[0] else ""
        )
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
