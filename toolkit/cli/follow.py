"""Sees a run through from the login node: says which it is, waits for its end, and reports that."""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from toolkit.base import terminal, tracebacks
from toolkit.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, JobFailedError
from toolkit.files.run_files import RunResult, RunState
from toolkit.files.rundir import RunDir
from toolkit.metrics import goodput
from toolkit.plugins.node_watch import efficiency
from toolkit.run.attempt import advice
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


def see_through(run: Run, args: Namespace) -> int:
    """Print which run was submitted. With ``--wait`` or ``--follow`` return the job's exit code at its end."""
    announce(run, as_json=args.json)
    if not (args.wait or args.follow):
        return EXIT_DONE
    # A program reads one document: what comes after it is for people.
    with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
        return to_the_end(run, bar=args.follow)


def to_the_end(run: Run, *, bar: bool, is_bound: bool = True) -> int:
    """Wait for the run's end, print how it went, and return the job's exit code.

    Ctrl-C ends a run on this machine that is bound to this terminal. Others go on without this program.
    """
    console = terminal.console()
    try:
        _watch(run, console, bar)
    except KeyboardInterrupt:
        # A Slurm job does not depend on this terminal.
        if run.executor == "slurm" or not is_bound:
            who = f"job {run.job_now}" if run.executor == "slurm" else f"run {run.id}"
            terminal.say(
                f"\n{who} goes on without this terminal; `toolkit follow {run.id}` comes back to it, "
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
        from toolkit.cli.logs.progress import follow

        try:
            follow(run, console)
        except OSError as error:  # a disk is away: the run goes on
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
        lines += [f"  {told}" for told in [remark, advice.of_restarts(run.dir, result.attempts)] if told]
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
    # Any other end: say why, where it can go on, and where the logs are. `toolkit why` tells what a failed run used.
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
        lines += [*_line_of_the_user(run.dir), f"  `{_command()} why {run.id}` tells more"]
    _say(console, "\n".join(lines), "red", str(result.state))
    return EXIT_STOPPED if result.state is RunState.STOPPED else EXIT_FAILED


def _line_of_the_user(run: RunDir) -> list[str]:
    """Return the line of code from which the first failing rank's exception came; nothing for another failure."""
    from toolkit.cli import run_facts

    failure = run_facts.first_failure_of(run, run.attempts([]), [])
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
