"""Follows a run from the login node: prints which it is, waits for its end, and reports that."""

from __future__ import annotations

import codecs
import contextlib
import heapq
import io
import json
import re
import shlex
import shutil
import sys
import time
from argparse import Namespace
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from toolkit.base import fsio, terminal, tracebacks
from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, JobFailedError, RequestError
from toolkit.base.process_limits import limits
from toolkit.base.this_node import raise_open_files
from toolkit.base.tracebacks import as_drawn
from toolkit.files.run_files import RunResult, RunState
from toolkit.files.rundir import RunDir
from toolkit.metrics import goodput
from toolkit.plugins.node_watch import efficiency
from toolkit.run.attempt import advice
from toolkit.run.attempt.error_files import read_error_files
from toolkit.run.attempt.verdict import first_failure
from toolkit.run.submission.handle import Run

if TYPE_CHECKING:
    from rich.console import Console


#: Seconds that a local run may take to end after Ctrl-C before the user is told that it has not.
STOP_WAIT_S = 180.0


def announce(run: Run, *, as_json: bool = False) -> None:
    """Print run id and job id, for people or for programs."""
    if as_json:
        job_id = run.job_id if run.executor == "slurm" else None
        facts = {"run": run.id, "name": run.dir.name, "job_id": job_id, "executor": run.executor}
        print(json.dumps({**facts, "path": str(run.dir.path)}), flush=True)
        return
    where = {"slurm": f"Slurm job {run.job_id}", "local": "on this machine"}.get(run.executor, run.executor)
    print(f"run {run.id} ({where})\n  folder: {_short(run.dir.path)}", flush=True)


def announce_and_wait(run: Run, args: Namespace) -> int:
    """Print which run was submitted. With ``--wait`` or ``--follow`` return the job's exit code at its end."""
    announce(run, as_json=args.json)
    if not (args.wait or args.follow):
        return EXIT_DONE
    # A program reads one document: what comes after it is for people.
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
        return to_the_end(run, bar=args.follow)


def to_the_end(run: Run, *, bar: bool, is_bound: bool = True) -> int:
    """Wait for the run's end, print how it went, and return the job's exit code.

    Ctrl-C ends a run on this machine that is bound to this terminal. Others continue without this program.
    """
    console = terminal.console()
    try:
        _watch(run, console, bar)
    except KeyboardInterrupt:
        # A Slurm job does not depend on this terminal.
        if run.executor == "slurm" or not is_bound:
            who = f"job {run.job_now}" if run.executor == "slurm" else f"run {run.id}"
            terminal.say(
                f"\n{who} continues without this terminal; `toolkit follow {run.id}` comes back to it, "
                f"`toolkit stop {run.id}` has it save and end"
            )
            return EXIT_STOPPED
        # The first Ctrl-C stops cleanly, a second one ends the ranks at once.
        terminal.say("\nstopping: the ranks commit a checkpoint; Ctrl-C again ends them at once")
        try:
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
    if bar:
        from toolkit.cli.progress import follow

        try:
            follow(run, console)
        except OSError as error:  # a disk is away: the run continues
            _say(console, f"what the ranks print cannot be shown: {error}", "yellow")
    run.wait()


def _say_how_it_went(run: Run, console: Console) -> int:
    # A job that was cancelled in the queue has left no result.
    result = run.dir.result() or RunResult(RunState.CANCELLED, why="ended before it started")
    if result.state is RunState.COMPLETED:
        lines = [f"completed in {result.wall_s or 0.0:.1f} s"]
        if result.step is not None:
            lines[0] += f": {result.step} steps"
        if result.attempts > 1:
            lines[0] += f", {result.attempts} attempts"
        remark = (result.why or "").removeprefix("completed").removeprefix(", ")
        lines += [f"  {told}" for told in [remark, advice.restart_note(run.dir, result.attempts)] if told]
        for name, value in sorted(result.metrics.items()):
            spoken = name.replace("eval/", "test ").replace("train/", "training ").replace("_", " ")
            lines.append(f"  {spoken}: {_number(value)}")
        lines += [f"  {told}" for told in [goodput.sentence(result.goodput)] if told]
        lines += [f"  {line}" for line in efficiency.lines(result.efficiency)]
        lines.append(f"  run folder: {_short(run.dir.path)}")
        if any(run.dir.tensorboard.iterdir()):
            lines.append(f"  TensorBoard: `{_command()} tensorboard {run.id}`")
        _say(console, "\n".join(lines), "green", "completed")
        return EXIT_DONE
    # Any other end: print why, how to continue, and where the logs are. `toolkit why` shows what a failed run used.
    has_failed = result.state is RunState.FAILED
    lines = [f"{result.state}: {result.why or ''}"]
    if result.step:
        lines.append(f"  reached step {result.step}")
    if told := goodput.sentence(result.goodput):
        lines.append(f"  {told}")
    if not has_failed:
        lines += [f"  {line}" for line in efficiency.lines(result.efficiency)]
    lines += [f"  logs: {_short(run.dir.logs)}", f"  next: {advice.of(run.dir)}"]
    if has_failed:
        lines += [*_line_of_the_user(run.dir), f"  `{_command()} why {run.id}` has details"]
    _say(console, "\n".join(lines), "red", str(result.state))
    return EXIT_STOPPED if result.state is RunState.STOPPED else EXIT_FAILED


def _line_of_the_user(run: RunDir) -> list[str]:
    """Return the line of code from which the first failing rank's exception came; nothing for another failure."""
    from toolkit.cli import run_facts

    failure = run_facts.first_failure_of(run, run.attempts())
    if failure is None or not failure.get("where"):
        return []
    rank = "" if failure["rank"] is None else f", rank {failure['rank']}"
    source = tracebacks.source(failure["traceback"])
    return [f"  at {failure['where']}{rank}{':' * bool(source)}", *([f"      {source}"] if source else [])]


def _say(console: Console, text: str, colour: str, word: str | None = None) -> None:
    """Print sentences as :func:`terminal.say` does, with their first ``word``, or all of them, in a colour."""
    shown = Text(terminal.fitted(text, sys.stdout))
    shown.stylize(colour, 0, None if word is None else len(word))
    console.print(shown, highlight=False, soft_wrap=True)


def _number(value: float | None) -> str:
    """Return a metric as text. A NaN is null in the files."""
    return "not a number" if value is None else str(value) if isinstance(value, int) else f"{value:.4f}"


def _command() -> str:
    """Return the words that call this program from here: its entry point, or the running Python."""
    program = Path(sys.argv[0])
    if sys.argv[0] in ("toolkit", shutil.which("toolkit")):
        return "toolkit"
    return shlex.quote(_short(program)) if program.name == "toolkit" else f"{_short(Path(sys.executable))} -m toolkit"


def _short(path: Path) -> str:
    is_below = path.absolute().is_relative_to(Path.cwd())
    return terminal.user_path(path.absolute().relative_to(Path.cwd()) if is_below else path)


#: A progress bar is written so often where it cannot be drawn in place.
BAR_S = 10.0
#: A line below, after which the cursor goes back up: a bar below another one.
_BELOW = re.compile(r"\n([^\n]*?)\x1b\[A")


class GrowingLog:
    """The log of ``rank``, or of the supervisor. Without an ``attempt`` it is the newest attempt's at any time."""

    def __init__(self, run: RunDir, rank: int | None, attempt: int | None = None) -> None:
        self._run, self._rank, self._moves_on = run, rank, attempt is None and rank is not None
        self._attempt = attempt or self._newest()
        self._begin()

    def _begin(self, at: int = 0) -> None:
        self._at = at
        self._rest = ""  #: a line that is not ended yet
        # While a log grows, the last character may be half written: the decoder keeps its bytes for the next read.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def position(self) -> tuple[Path, int]:
        """Return how far the log is read."""
        return self.path, self._at

    @property
    def path(self) -> Path:
        if self._rank is None:
            return self._run.logs / "supervisor.log"
        return self._run.rank_log(self._attempt, self._rank)

    def _newest(self) -> int:
        return max(self._run.attempts_with_logs(), default=1)

    def skip(self, lines: int | None = 0) -> None:
        """Go to the last ``lines`` of what is there; None stays at the beginning."""
        if lines is None:
            return
        with contextlib.suppress(FileNotFoundError), fsio.open_file(self.path) as file:
            at = file.seek(0, io.SEEK_END)
            # Search backwards, in pieces. The last byte only ends the last line.
            limit = at - 1
            while lines and limit > 0:
                begin = max(0, limit - limits().log_read_bytes)
                file.seek(begin)
                piece = file.read(limit - begin)
                cut = len(piece)
                while lines and (cut := piece.rfind(b"\n", 0, cut)) >= 0:
                    lines -= 1
                at, limit = begin + cut + 1, begin
            self._begin(0 if lines else at)

    def read(self) -> str:
        """Return the next lines; the last line of an attempt's log ends with it. Empty where none has ended since."""
        data = self._read()
        ended = ""
        if not data and self._moves_on and (newest := self._newest()) > self._attempt:
            ended, self._attempt = self.unterminated_line(), newest
            ended += "\n" if ended else ""
            self._begin()
            data = self._read()
        text = self._rest + self._decoder.decode(data)
        while (above := _BELOW.sub("\r\\1\r", text)) != text:
            text = above
        lines, newline, rest = text.rpartition("\n")
        # Of a bar that is drawn for hours only what is seen of it is kept.
        self._rest = rest if len(rest) < limits().log_read_bytes else as_drawn(rest)
        return ended + "".join(f"{as_drawn(line)}\n" for line in lines.split("\n") if newline)

    @property
    def drawn(self) -> str:
        """Return what is seen of a line that is not ended yet, such as a progress bar."""
        return as_drawn(self._rest)

    def unterminated_line(self) -> str:
        """Return the last line, where nothing has ended it."""
        return as_drawn(self._rest + self._decoder.decode(b"", final=True))

    def _read(self) -> bytes:
        try:
            with fsio.open_file(self.path) as file:
                file.seek(self._at)
                data = file.read(limits().log_read_bytes)
        except FileNotFoundError:
            return b""
        self._at += len(data)
        return data


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
    raise_open_files()  # there may be a thousand ranks
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
    at = begun
    try:
        with fsio.open_text(path, newline="\n") as file:
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
            with fsio.open_text(log, newline="\n") as file:
                yield from (f"  {as_drawn(line).rstrip()}\n" for line in deque(file, maxlen=_LAST_LINES))
    for report in reports:
        order = "first" if report.rank == first.rank else "later"
        yield f"rank {report.rank} on {report.host} failed {order}: {report.how}\n"
        yield from (f"  {line}\n" for line in report.traceback.rstrip().splitlines())
