"""Watching a run from the login node: the progress bar, and what is said at the end."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeRemainingColumn

from toolkit.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, JobFailedError
from toolkit.launch.submit import Run

#: How long a local run may take to end after Ctrl-C before we say that it has not.
CANCEL_WAIT_S = 30.0


def announce(run: Run) -> None:
    """Run id and job id, for people and for scripts."""
    where = {"slurm": f"Slurm job {run.job_id}", "local": "on this machine"}.get(run.executor, run.executor)
    print(f"run {run.id} ({where})\n  folder: {_short(run.dir.path)}", flush=True)


def to_the_end(run: Run, *, bar: bool) -> int:
    """Wait for the run's end and say how it went; returns the job's exit code.

    Ctrl-C ends a run on this machine, which lives in this terminal; a Slurm job goes on without us.
    """
    console = Console()
    try:
        _watch(run, console, bar)
    except KeyboardInterrupt:
        return _interrupted(run, console)
    except JobFailedError as error:
        console.print(f"[red]{error}[/]", highlight=False, soft_wrap=True)
        return EXIT_FAILED
    return _say_how_it_went(run, console)


def _watch(run: Run, console: Console, bar: bool) -> None:
    if not bar:
        run.wait()
        return
    if not console.is_terminal:
        _watch_in_lines(run)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%  {task.fields[figures]}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("queued", total=None, figures="")
        for status in run.watch():
            _update(progress, task, status)


def _update(progress: Progress, task: TaskID, status: dict[str, Any]) -> None:
    at = status.get("progress") or {}
    progress.update(
        task,
        description=describe(status),
        total=at.get("total_steps"),
        completed=at.get("step") or 0,
        figures=figures(at),
    )


def _watch_in_lines(run: Run) -> None:
    """For logs and CI: a line each time the epoch or the state changes."""
    last = ""
    for status in run.watch():
        line = describe(status)
        if line != last:
            print(f"  {line}  {figures(status.get('progress') or {})}".rstrip(), flush=True)
            last = line


def describe(status: dict[str, Any]) -> str:
    """State, attempt and epoch in a few words."""
    at = status.get("progress") or {}
    words = [str(status.get("state", "queued"))]
    if status.get("attempt", 1) > 1:
        words.append(f"attempt {status['attempt']}")
    if at.get("epoch") is not None:
        words.append(f"epoch {at['epoch']}/{at.get('epochs', '?')}")
    return ", ".join(words)


def figures(at: dict[str, Any]) -> str:
    """Loss, rate and accuracy, those that are known."""
    accuracy = (at.get("metrics") or {}).get("eval/accuracy")
    known = (
        ("loss {:.4f}", at.get("loss")),
        ("{:,.0f} samples/s", at.get("samples_per_s")),
        ("accuracy {:.4f}", accuracy),
    )
    return "  ".join(text.format(value) for text, value in known if value is not None)


def _interrupted(run: Run, console: Console) -> int:
    if run.executor == "slurm":
        console.print(
            f"\njob {run.job_id} goes on without this terminal; `toolkit status {run.id}` looks, "
            f"`toolkit cancel {run.id}` ends it",
            highlight=False,
            soft_wrap=True,
        )
        return EXIT_STOPPED
    run.cancel()
    try:
        run.wait(CANCEL_WAIT_S)
    except TimeoutError:
        console.print(
            f"[red]run {run.id} has not ended; its supervisor is pid {run.status().get('pid')}[/]", soft_wrap=True
        )
    except JobFailedError:  # it ended before it could write its result
        pass
    return _say_how_it_went(run, console)


def _say_how_it_went(run: Run, console: Console) -> int:
    result = run.dir.result() or {"state": "cancelled", "why": "ended before it started"}
    state = result["state"]
    if state == "completed":
        console.print(_completed_text(run, result), highlight=False, soft_wrap=True)
        return EXIT_DONE
    console.print(f"[red]{state}[/]: {result.get('why', '')}", highlight=False, soft_wrap=True)
    if result.get("step"):
        console.print(
            f"  reached step {result['step']}; `toolkit resume {run.id}` goes on from the last checkpoint",
            soft_wrap=True,
        )
    console.print(f"  logs: {_short(run.dir.logs)}", highlight=False, soft_wrap=True)
    return EXIT_STOPPED if state == "stopped" else EXIT_FAILED


def _completed_text(run: Run, result: dict[str, Any]) -> str:
    lines = [f"[green]completed[/] in {result['wall_s']:.1f} s: {result.get('step')} steps"]
    if result["attempts"] > 1:
        lines[0] += f", {result['attempts']} attempts"
    lines += [f"  {name}: {value:.4f}" for name, value in (result.get("metrics") or {}).items()]
    lines.append(f"  run folder: {_short(run.dir.path)}")
    lines.append(f"  TensorBoard: {_command()} tensorboard {run.id}")
    return "\n".join(lines)


def _command() -> str:
    """How to call this program from here: the entry point beside the running Python, if it is not on PATH."""
    program = Path(sys.argv[0])
    return shlex.quote(_short(program)) if program.name == "toolkit" else f"{_short(Path(sys.executable))} -m toolkit"


def _short(path: Path) -> str:
    """Relative to the current folder where that is below it."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
