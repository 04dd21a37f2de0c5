"""Follows a run from the login node: its growing logs, a progress bar, and a final report."""

from __future__ import annotations

import codecs
import io
import shlex
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from toolkit import registry
from toolkit.base import terminal
from toolkit.base.durations import as_clock
from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, JobFailedError
from toolkit.files.run_files import RunProgress, RunResult, RunState, RunStatus
from toolkit.files.rundir import RunDir
from toolkit.metrics import goodput
from toolkit.run.attempt import advice
from toolkit.run.records import run_config
from toolkit.run.submission.handle import Run

if TYPE_CHECKING:
    from rich.console import Console


#: Seconds that a local run may take to end after Ctrl-C before the user is told that it has not.
STOP_WAIT_S = 180.0
#: A script may print faster than a terminal shows it: the status is looked at after so many pieces of its log.
MOST_READS = 8


def announce(run: Run) -> None:
    """Print run id and job id, for people and for scripts."""
    where = {"slurm": f"Slurm job {run.job_id}", "local": "on this machine"}.get(run.executor, run.executor)
    print(f"run {run.id} ({where})\n  folder: {_short(run.dir.path)}", flush=True)


def see_through(run: Run, args: Namespace) -> int:
    """Print which run was submitted. With ``--wait`` or ``--follow`` return the job's exit code at its end."""
    announce(run)
    return to_the_end(run, bar=args.follow) if args.wait or args.follow else EXIT_DONE


def to_the_end(run: Run, *, bar: bool) -> int:
    """Wait for the run's end, print how it went, and return the job's exit code.

    Ctrl-C ends a run on this machine, which lives in this terminal. A Slurm job goes on without this program.
    """
    console = terminal.console()
    try:
        _watch(run, console, bar)
    except KeyboardInterrupt:
        # A Slurm job does not depend on this terminal.
        if run.executor == "slurm":
            terminal.say(
                f"\njob {run.job_now} goes on without this terminal; `toolkit status {run.id}` looks, "
                f"`toolkit cancel {run.id}` ends it"
            )
            return EXIT_STOPPED
        # The first Ctrl-C stops cleanly, a second one ends the ranks at once.
        terminal.say("\nstopping: the ranks commit a checkpoint; Ctrl-C again ends them at once")
        try:
            run.stop()
            run.wait(STOP_WAIT_S)
        except KeyboardInterrupt:
            run.cancel()
            run.wait(STOP_WAIT_S)
        except TimeoutError:
            _say(console, f"run {run.id} has not ended; its supervisor is pid {run.dir.status().pid}", "red")
            return EXIT_FAILED
        except JobFailedError:  # the run ended before it could write its result
            pass
        return _say_how_it_went(run, console)
    except JobFailedError as error:
        _say(console, str(error), "red")
        return EXIT_FAILED
    return _say_how_it_went(run, console)


def _watch(run: Run, console: Console, bar: bool) -> None:
    if not bar:
        run.wait()
        return
    output = _ScriptOutput(run.dir)
    # Only a terminal can show the bar. Logs and CI get a line each time the epoch or the state changes.
    if not console.is_terminal:
        last = ""
        for status in run.statuses():
            output.show(print)  # first what was printed before the state changed
            line = describe(status)
            if line != last:
                print(f"  {line}  {figures(status.progress)}".rstrip(), flush=True)
                last = line
        output.show(print, is_last=True)
        return
    with _bar(console) as progress:
        task = progress.add_task("queued", total=None, figures="", clock="")
        show, begun = partial(progress.console.out, highlight=False), time.monotonic()
        for status in run.statuses():
            _update(progress, task, status, time.monotonic() - begun)
            output.show(show)
        output.show(show, is_last=True)


class _ScriptOutput:
    """What the first rank of a script prints from now on, in whole lines. Of other runs nothing."""

    def __init__(self, run: RunDir) -> None:
        self._log = GrowingLog(run, 0) if run_config.is_script(run) else None
        self._rest = ""
        if self._log is not None:
            self._log.skip()

    def show(self, write: Callable[[str], object], *, is_last: bool = False) -> None:
        """Write the lines that are new. At the end of the run, all that are left."""
        if self._log is None:
            return
        reads = 0
        while (is_last or reads < MOST_READS) and (text := self._log.read()):
            lines, newline, self._rest = (self._rest + text).rpartition("\n")
            reads += 1
            if newline:
                write(lines)
        if is_last and (rest := self._rest + self._log.end()):
            write(rest)


def _bar(console: Console) -> Progress:
    """Return a bar as wide as the texts leave room. So epoch, loss, rate and time fit into 80 columns."""
    texts = [TextColumn("{task.fields[" + name + "]}") for name in ("figures", "clock")]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=None), *texts)
    return Progress(*columns, console=console, transient=True, expand=True)


def _update(progress: Progress, task: TaskID, status: RunStatus, waited_s: float) -> None:
    at = status.progress
    progress.update(
        task,
        description=escape(describe(status)),
        total=at.total_steps,
        completed=at.step or 0,
        figures=figures(at),
        clock=clock(at, waited_s),
    )


def describe(status: RunStatus) -> str:
    """Describe the run's state in a few words. While it trains, that is the epoch and its phase."""
    at, state = status.progress, status.state or RunState.QUEUED
    words: list[str] = [state]
    if state is RunState.STARTING:
        size = status.world_size
        ranks = "the ranks" if size is None else f"{size} rank{'' if size == 1 else 's'}"
        words = [f"starting {ranks} (importing torch takes some seconds)"]
    if state is RunState.RUNNING and at.epoch is not None:
        words = [f"epoch {at.epoch}/{'?' if at.epochs is None else at.epochs}"]
        words += [_PHASES[at.phase]] if at.phase in _PHASES else []
    if (status.attempt or 1) > 1:
        words.append(f"attempt {status.attempt}")
    return ", ".join(words)


_PHASES = {"evaluate": "evaluating", "checkpoint": "saving", "done": "finishing"}


def figures(at: RunProgress) -> str:
    """Return loss, rate and accuracy on the test set, as far as they are known."""
    known = (
        ("loss {:.4f}", at.loss),
        ("{:,.0f} samples/s", at.samples_per_s),
        ("acc {:.4f}", at.metrics.get("eval/accuracy")),
    )
    return "  ".join(text.format(value) for text, value in known if value is not None)


def clock(at: RunProgress, waited_s: float) -> str:
    """Return the time left as the ranks estimate it; until they can, the time waited."""
    return f"{as_clock(waited_s)} elapsed" if at.eta_s is None else f"{as_clock(at.eta_s)} left"


def _say_how_it_went(run: Run, console: Console) -> int:
    # A job that was cancelled in the queue has left no result.
    result = run.dir.result() or RunResult(RunState.CANCELLED, why="ended before it started")
    if result.state is RunState.COMPLETED:
        lines = [f"completed in {result.wall_s or 0.0:.1f} s"]
        if result.step is not None:
            lines[0] += f": {result.step} steps"
        if result.attempts > 1:
            lines[0] += f", {result.attempts} attempts"
        lines += [f"  {told}" for told in [advice.of_restarts(run.dir, result.attempts)] if told]
        for name, value in sorted(result.metrics.items()):
            spoken = name.replace("eval/", "test ").replace("train/", "training ").replace("_", " ")
            lines.append(f"  {spoken}: {_number(value)}")
        lines += [f"  {told}" for told in [goodput.sentence(result.goodput)] if told]
        lines += [f"  {line}" for line in registry.call("efficiency_lines", result.efficiency) or ()]
        lines.append(f"  run folder: {_short(run.dir.path)}")
        if any(run.dir.tensorboard.iterdir()):
            lines.append(f"  TensorBoard: `{_command()} tensorboard {run.id}`")
        _say(console, "\n".join(lines), "green", "completed")
        return EXIT_DONE
    # Any other end: say why, where it can go on, and where the logs are.
    lines = [f"{result.state}: {result.why or ''}"]
    if result.step:
        lines.append(f"  reached step {result.step}")
    if told := goodput.sentence(result.goodput):
        lines.append(f"  {told}")
    lines += [f"  {line}" for line in registry.call("efficiency_lines", result.efficiency) or ()]
    lines += [f"  logs: {_short(run.dir.logs)}", f"  next: {advice.of(run.dir)}"]
    _say(console, "\n".join(lines), "red", str(result.state))
    return EXIT_STOPPED if result.state is RunState.STOPPED else EXIT_FAILED


def _say(console: Console, text: str, colour: str, word: str | None = None) -> None:
    """Print sentences as :func:`terminal.say` does, with their first ``word``, or all of them, in a colour."""
    shown = Text(terminal.fitted(text, sys.stdout))
    shown.stylize(colour, 0, None if word is None else len(word))
    console.print(shown, highlight=False, soft_wrap=True)


def _number(value: float | None) -> str:
    """Write a metric. A NaN is null in the files."""
    return "not a number" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"


def _command() -> str:
    """Return the words that call this program from here.

    If the entry point was not used, the running Python is called.
    """
    program = Path(sys.argv[0])
    if shutil.which("toolkit") == sys.argv[0]:
        return "toolkit"
    return shlex.quote(_short(program)) if program.name == "toolkit" else f"{_short(Path(sys.executable))} -m toolkit"


def _short(path: Path) -> str:
    """Return the path relative to the current folder if it lies below that."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


#: A log is read in such pieces, so that one of many GiB needs no memory.
READ_BYTES = 1 << 20


class GrowingLog:
    """The log of ``rank``, or of the supervisor. Without an ``attempt`` it is the newest attempt's at any time."""

    def __init__(self, run: RunDir, rank: int | None, attempt: int | None = None) -> None:
        self._run, self._rank, self._moves_on = run, rank, attempt is None and rank is not None
        self._attempt = attempt or self._newest()
        self._begin()

    def _begin(self, at: int = 0) -> None:
        self._at = at
        # While a log grows, the last character may be half written: the decoder keeps its bytes for the next read.
        self._decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)

    @property
    def path(self) -> Path:
        if self._rank is None:
            return self._run.logs / "supervisor.log"
        return self._run.rank_log(self._attempt, self._rank)

    def _newest(self) -> int:
        return max(self._run.attempts_with_logs(), default=1)

    def skip(self) -> None:
        """Go to the end of what is there."""
        if self.path.exists():
            self._begin(self.path.stat().st_size)

    def read(self) -> str:
        """Return the next piece, and what the half character at the end of an attempt's log stands for.

        Empty where nothing new is there, or no log yet.
        """
        data = self._read()
        rest = ""
        if not data and self._moves_on and (newest := self._newest()) > self._attempt:
            rest, self._attempt = self.end(), newest
            self._begin()
            data = self._read()
        return rest + self._decoder.decode(data)

    def end(self) -> str:
        """Return what is left of the last character."""
        return str(self._decoder.decode(b"", final=True))

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self._at)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return b""
        self._at += len(data)
        return data
