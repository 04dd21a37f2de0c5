"""What `--follow` shows while a run trains: a progress bar, and what the first rank prints."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from toolkit.base.durations import as_clock
from toolkit.base.terminal import OneLine, visible
from toolkit.cli.follow import BAR_S, GrowingLog
from toolkit.files import polling
from toolkit.files.run_files import RunProgress, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.run.records import run_config
from toolkit.run.submission.handle import Run

if TYPE_CHECKING:
    from rich.console import Console

#: A rank may print faster than a terminal shows it: the status is looked at after so many pieces of its log.
MOST_READS = 8
#: What a rank has not printed: lines of the toolkit, of torch's part in C++, and of its hook for exceptions.
_LOGGED = re.compile(r"\d\d:\d\d:\d\d rank \d+/\d+ \S+ [A-Z]+ |\[[IWEF]\d{4} |\[rank\d+\]:")


def follow(run: Run, console: Console) -> None:
    """Show the run's progress until its end, and what the first rank prints."""
    output = _Output(run.dir)
    # Only a terminal can show the bar. Logs and CI get a line each time the epoch or the state changes.
    if not console.is_terminal or console.is_dumb_terminal:  # which cannot draw a line anew
        last, bar, show = "", OneLine(BAR_S), partial(print, flush=True)
        for status in run.statuses():
            polling.mark_viewer(run.dir)
            output.show(show)  # first what was printed before the state changed
            bar.draw(output.bar)
            line = describe(status)
            if line != last:
                show(f"  {line}  {metrics_text(status.shown, '~' * status.is_guess)}".rstrip())
                last = line
        output.show(show, is_last=True)
        return
    with _bar(console) as progress:
        task = progress.add_task("queued", total=None, figures="", clock="")
        show, begun = partial(progress.console.out, highlight=False), time.monotonic()
        told = len(run.dir.attempts())
        for status in run.statuses():
            polling.mark_viewer(run.dir)
            output.show(show)
            _update(progress, task, status, time.monotonic() - begun, output.bar)
            # The bar is gone at the end: why the run was started again is to stay.
            if status.state in (RunState.REQUEUED, RunState.RESTARTING) or (status.attempt or 1) > told + 1:
                ended = run.dir.attempts()[told:]
                for attempt in ended:
                    show(f"  attempt {attempt.attempt}: {visible(attempt.line or attempt.cause)}")
                told += len(ended)
        output.show(show, is_last=True)


class _Output:
    """What the first rank prints from now on, in whole lines.

    Of a script that is everything. In the log of any other run are lines of the toolkit and of torch, too: what they
    say is in the bar and in `toolkit why`.
    """

    def __init__(self, run: RunDir) -> None:
        self._log = GrowingLog(run, 0)
        self._log.skip()
        self._is_script = run_config.is_script(run)
        self._is_after_logged = self._is_in_traceback = False

    def show(self, write: Callable[[str], object], *, is_last: bool = False) -> None:
        """Write the lines that are new. At the end of the run, all that are left."""
        reads = 0
        while is_last or reads < MOST_READS:
            at, text = self._log.position, self._log.read()
            if text:
                self._write(text.removesuffix("\n"), write)
            elif self._log.position == at:
                break
            reads += 1
        if is_last and (rest := self._log.unterminated_line()):
            self._write(rest, write)

    @property
    def bar(self) -> str:
        """Return a line that the rank has not ended yet, such as a progress bar."""
        return self._log.drawn.strip()

    def _write(self, text: str, write: Callable[[str], object]) -> None:
        lines = text.split("\n")
        if printed := lines if self._is_script else [line for line in lines if self._is_printed(line)]:
            write("\n".join(printed))

    def _is_printed(self, line: str) -> bool:
        is_logged = _LOGGED.match(line) is not None
        # The traceback of an error that is logged belongs to it. It ends with the next line that is logged.
        begins = self._is_after_logged and line.startswith("Traceback ")
        self._is_in_traceback = not is_logged and (begins or self._is_in_traceback)
        self._is_after_logged = is_logged
        return not is_logged and not self._is_in_traceback


def _bar(console: Console) -> Progress:
    """Return a bar as wide as the texts leave room. So epoch, loss, rate and time fit into 80 columns."""
    texts = [TextColumn("{task.fields[" + name + "]}") for name in ("figures", "clock")]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=None), *texts)
    return Progress(*columns, console=console, transient=True, expand=True)


def _update(progress: Progress, task: TaskID, status: RunStatus, waited_s: float, bar_of_rank: str = "") -> None:
    at, words, guess = status.shown, describe(status), "~" * status.is_guess
    if status.state is RunState.RUNNING and at.epoch is None and at.step is not None:  # a loop without epochs
        step = f"step {at.step}" + (f"/{at.total_steps}" if at.total_steps else "")
        words = words.replace(RunState.RUNNING, guess + step, 1)
    if status.state is not None and not status.state.has_ranks:  # those of the attempt before
        at = at.replace(eta_s=None, loss=None, samples_per_s=None, metrics={})
    progress.update(
        task,
        description=escape(words),
        total=at.total_steps,
        completed=at.step or 0,
        # The bar of a script says more than what is read from it.
        figures=(escape(bar_of_rank) if guess else "") or metrics_text(at, guess) or escape(bar_of_rank),
        clock=guess * (at.eta_s is not None) + time_text(at, waited_s),
    )


def describe(status: RunStatus) -> str:
    """Describe the run's state in a few words. While it trains, that is the epoch and its phase."""
    at, state = status.shown, status.state or RunState.QUEUED
    words: list[str] = [state]
    if state is RunState.STARTING:
        size = status.world_size
        ranks = "the ranks" if size is None else f"{size} rank{'' if size == 1 else 's'}"
        words = [f"starting {ranks} (importing torch takes some seconds)"]
    if state is RunState.RUNNING and at.epoch is not None:
        words = [f"{'~' * status.is_guess}epoch {at.epoch}/{'?' if at.epochs is None else at.epochs}"]
        words += [_PHASES[at.phase]] if at.phase in _PHASES else []
    if (status.attempt or 1) > 1:
        words.append(f"attempt {status.attempt}")
    return ", ".join(words)


_PHASES = {"evaluate": "evaluating", "checkpoint": "saving", "done": "finishing"}


def metrics_text(at: RunProgress, guess: str = "") -> str:
    """Return loss, rate and accuracy on the test set, as far as they are known."""
    known = (
        (guess + "loss {:.4f}", at.loss),
        ("{:,.0f} samples/s", at.samples_per_s or None),  # a loop may have no samples
        ("acc {:.4f}", at.metrics.get("eval/accuracy")),
    )
    return "  ".join(text.format(value) for text, value in known if value is not None)


def time_text(at: RunProgress, waited_s: float) -> str:
    """Return the time left as the ranks estimate it; until they can, the time waited."""
    return f"{as_clock(waited_s)} elapsed" if at.eta_s is None else f"{as_clock(at.eta_s)} left"
