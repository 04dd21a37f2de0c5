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
from typing import Any

from toolkit.base import terminal
from toolkit.cli import columns, run_rows, selection
from toolkit.cli.run_rows import RunRow
from toolkit.files import polling, rundir
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


class SlurmBackoff:
    """Asks Slurm about jobs as a page does that looks on by itself: more rarely while the answers do not change."""

    def __init__(self, queue: SharedQueue, now: Callable[[], float] = time.time) -> None:
        self._queue = queue
        self._now = now
        self._every_s = WATCH_S
        self._asked_at: float | None = None
        self._asked_jobs: set[str] = set()
        self._wanted: dict[str, None] = {}  #: the jobs since the last question, of several pages perhaps
        self._answers: dict[str, JobStatus | None] = {}

    def __call__(self, jobs: Sequence[str]) -> dict[str, JobStatus | None]:
        """Return Slurm's answer, an earlier one while it is not time to ask again."""
        self._wanted |= dict.fromkeys(jobs)
        is_new = not self._asked_jobs.issuperset(jobs)
        waited_s = self._every_s if self._asked_at is None else self._now() - self._asked_at
        if waited_s >= self._every_s or (is_new and waited_s >= WATCH_S):
            self._asked_at, asked, self._wanted = self._now(), list(self._wanted), {}
            self._asked_jobs, answers = set(asked), run_rows.ask_slurm(asked, self._queue, WATCH_S)
            self._every_s = WATCH_S
            if answers == self._answers:
                self._every_s = min(2 * waited_s, MOST_RARELY_S)
            self._answers = answers
        return {job: self._answers[job] for job in jobs if job in self._answers}


class Watch:
    """The rows to show, second by second."""

    def __init__(self, args: Namespace, queue: SharedQueue, now: Callable[[], float] = time.time) -> None:
        self._args = args
        self._queue = queue
        self._now = now
        self._runs: list[RunDir] = []
        self._over: dict[RunDir, RunRow] = {}  #: the rows of ended runs, until the next listing
        self._sweep_rows: list[RunRow] = []
        self._listed_at: float | None = None
        self._ask = SlurmBackoff(queue, now)

    def rows(self) -> list[RunRow]:
        """Return the rows as they are now, the newest last. Rows of sweeps are up to 10 s old."""
        live = [run for run in self._listed() if run not in self._over]
        if self._args.run:  # those of a whole table are as new as the file server can bear
            for run in live:
                polling.mark_viewer(run)
        rows, before = run_rows.with_slurm(run_rows.read_rows(live), self._ask), [*self._over.values()]
        self._over |= {run: row for run, row in zip(live, rows, strict=True) if row.state in run_rows.OVER}
        rows = selection.by_state([*before, *rows, *self._sweep_rows], self._args.state)
        return sorted(rows, key=lambda row: row.run if row.points is None else rundir.id_time(row.submitted or 0.0))

    def _listed(self) -> list[RunDir]:
        """Return the runs that the arguments select. Without any: those that continue or have ended lately."""
        if self._listed_at is None or self._now() - self._listed_at >= LIST_EVERY_S:
            self._listed_at, self._over = self._now(), {}
            named, _ = selection.named(self._args.run)
            self._runs = selection.by_path(named or rundir.all_runs(), self._args)
            if not self._args.run and not selection.is_asked(self._args):
                self._fold_sweeps()
                rows, since = run_rows.read_rows(self._runs), self._now() - ENDED_S
                pairs = zip(self._runs, rows, strict=True)
                self._runs = [run for run, row in pairs if row.state not in run_rows.OVER or _ended(row) > since]
        return self._runs

    def _fold_sweeps(self) -> None:
        if not (paths := rundir.sweep_paths()):
            self._sweep_rows = []
            return
        from toolkit.plugins.sweep import rows as sweep_rows

        def rows_of(runs: Sequence[RunDir]) -> list[RunRow]:
            return run_rows.with_slurm(
                run_rows.read_rows(runs), lambda jobs: run_rows.ask_slurm(jobs, self._queue, WATCH_S)
            )

        since = self._now() - ENDED_S
        self._runs, stamped = sweep_rows.group_by_sweep(self._runs, paths)
        rows = [sweep_rows.of_sweep(sweep, rows_of) for _, sweep in stamped]
        self._sweep_rows = [row for row in rows if row.state not in run_rows.OVER or _ended(row) > since]


def _ended(row: RunRow) -> float:
    return float(row.ended or row.updated or 0.0)


def run(args: Namespace) -> None:
    """Show the table until q or Ctrl-C. Without a terminal print it at each change, until all runs are over."""
    watch = Watch(args, shared_queue.of_user())
    names = tuple(filter(None, (args.columns or "").split(",")))
    if sys.stdout.isatty():
        _on_screen(watch, names)
        return
    before: list[tuple[str, str]] | None = None
    while True:
        rows = watch.rows()
        states = [(row.run, str(row.state)) for row in rows]
        if states != before:
            before = states
            print(time.strftime("%H:%M:%S"), columns.count_by_state(rows), flush=True)
            columns.print_rows(rows, names, None if names else shutil.get_terminal_size().columns)
            print(flush=True)
        if all(columns.is_over(row) for row in rows):
            return
        time.sleep(READ_EVERY_S)


def _on_screen(watch: Watch, names: Sequence[str]) -> None:
    from rich.live import Live

    console = terminal.console(highlight=False)
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            begun = time.monotonic()
            size = shutil.get_terminal_size()
            live.update(render_screen(watch.rows(), names, size.columns, size.lines), refresh=True)
            key = pressed(max(0.0, begun + READ_EVERY_S - time.monotonic()))
            if key[:1] in ("q", "Q", "\x03") or key == "\x1b":  # an arrow key begins with Esc, too
                return


def render_screen(rows: Sequence[RunRow], names: Sequence[str], width: int, height: int) -> Any:
    """Return what the screen shows: a head, the rows that fit, and of a single run what is to be said."""
    from rich.text import Text

    # One line is kept for the number of runs that do not fit.
    room = max(1, height - 3)
    shown = rows[-(room if len(rows) <= room else max(1, room - 1)) :]
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{time.strftime('%H:%M:%S')}  {columns.count_by_state(rows)}"[:width] + "\n", "bold")
    if not rows:
        text.append("no run is active, and none has ended in the last hour\n")
    else:
        table = columns.table(shown, names, width)
        for number in range(len(table.lines)):
            if number == 1 and len(shown) < len(rows):
                text.append(f"... and {len(rows) - len(shown)} older runs\n", "dim")
            for part, colour in table.parts(number):
                text.append(part, colour)
            text.append("\n")
    told = columns.notes_of(rows[0]) if len(rows) == 1 else []
    for line in terminal.wrapped("\n".join(told), width).splitlines()[: max(0, height - 4)]:
        text.append(f"{line}\n")
    text.append("q ends this; the runs continue", "dim")
    return text


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a key and returns it, or "". Without a keyboard it only waits."""
    fds = [sys.stdin.fileno()] if sys.stdin.isatty() else []

    def pressed(seconds: float) -> str:
        ready, _, _ = select.select(fds, [], [], seconds)
        return os.read(fds[0], 64).decode(errors="replace") if ready else ""

    before = [termios.tcgetattr(fd) for fd in fds]
    try:
        for fd in fds:
            tty.setcbreak(fd)
        yield pressed
    finally:
        for fd, attributes in zip(fds, before, strict=True):
            termios.tcsetattr(fd, termios.TCSADRAIN, attributes)
