"""The page of `toolkit why RUN`: a run's state or end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from toolkit.base import tracebacks
from toolkit.base.errors import RequestError
from toolkit.base.tracebacks import as_drawn, clean, tail_of_file, tail_of_stream
from toolkit.cli import notes
from toolkit.cli.tables import Table
from toolkit.files.run_files import AttemptRecord, RunState
from toolkit.metrics import goodput, start_up
from toolkit.plugins.node_watch import efficiency
from toolkit.plugins.report.why.diagnosis import cause_or_exception
from toolkit.run.attempt.facts import Cause

#: The number of last lines of a folded traceback that are shown; the whole one is in the rank's log.
TRACEBACK_LINES = 25
#: A completed run that took less time than this is shown without its accounts.
SHORT_S = 180.0
#: The number of a log's last lines that are shown where the cause is not known.
LAST_LINES = 12
#: What `--log` takes for the standard input.
STDIN = "-"
_HEAD = ("ATTEMPT", "JOB", "NODES", "RANKS", "STEPS", "CAUSE", "DECISION")


def page(told: dict[str, Any], *, whole: bool) -> str:
    """Return the facts as text. Accounts of time and use only for long completed runs, unless ``whole``."""
    attempts: Sequence[AttemptRecord] = told["attempts"]
    is_long = sum(attempt.ended - attempt.started for attempt in attempts) >= SHORT_S
    whole |= told["state"] == RunState.COMPLETED and is_long
    waits = "not started yet" if told["state"] in ("unknown", RunState.QUEUED) else ""
    why = [told["why"] or waits, *told["waits"]]
    lines = [f"{told['run']}: {told['state']}", *(f"  {' '.join(text.split())}" for text in why if text), ""]
    lines += _failure_lines(told["first_failure"])
    lines += _cause_lines(told["diagnosis"], told["first_failure"])
    lines += [text for text in (told["given"], told["restarts"], told["loss"]) if text]
    lines += notes.lines(told["stragglers"], told["nodes"])
    saved = told["last_checkpoint"]
    if saved is not None or not told["is_script"]:  # a script has checkpoints of its own
        lines.append(f"last checkpoint: {'none' if saved is None else f'step {saved}'}")
    if (reached := told["step_reached"]) is not None:
        # None may be lost because the run is complete, or unfinished: 0 would be read as if no step was repeated.
        lost = told["steps_lost"]
        lines.append(f"steps lost: {lost} (reached step {reached})" if lost else f"reached step: {reached}")
    if whole and (time_told := goodput.sentence(told["goodput"])):
        lines.append(f"time: {time_told}")
    lines += [f"staging: {line}" for line in told["staging"]]
    lines += [f"bad node: {host} ({why})" for host, why in told["bad_nodes"].items()]
    lines += [f"node {host}: {what}" for host, what in told["ailing_nodes"].items()]
    lines += [f"node {host} {what}" for host, what in told["doubtful_nodes"].items()]
    # No failure above explains why a run was moved.
    lines += [f"attempt {a.attempt}: {a.line}" for a in attempts if a.cause == Cause.MOVED]
    if attempts:
        rows: list[tuple[str, ...]] = [_HEAD]
        for each in attempts[-12:]:
            steps = "" if each.step_end is None else f"{each.step_start or 0} to {each.step_end}"
            counts = (str(len(each.nodes)), str(each.world_size))
            rows.append((str(each.attempt), each.job_id or "local", *counts, steps, each.cause, each.decision))
        if any(each.code != 1 for each in attempts[-12:]):  # there were several copies of the sources
            codes = ["CODE", *(str(each.code) for each in attempts[-12:])]
            rows = [(*row, code) for row, code in zip(rows, codes, strict=True)]
        lines += ["", str(Table(rows))]
    if whole and told["start_up"]:
        starts = told["start_up"].items()
        lines += ["", *(f"start of attempt {number}: {start_up.sentence(parts)}" for number, parts in starts)]
    # What it used is the answer where that was too much.
    is_short_of = told["cause"] in (Cause.OUT_OF_MEMORY, Cause.TIMEOUT)
    if (whole or is_short_of) and (used := efficiency.lines(told["efficiency"])):
        lines += ["", *used]
    return "\n".join([*lines, "", f"next: {told['next']}"])


def _failure_lines(failure: dict[str, Any] | None) -> list[str]:
    if failure is None:
        return []
    known = failure["host"] or "a rank that nobody knows"
    who = known if failure["rank"] is None else f"rank {failure['rank']} on {known}"
    lines = [f"first failure: {who}, attempt {failure['attempt']}: {' '.join(failure['how'].split())}"]
    lines += [f"  {line}" for line in tracebacks.folded(failure["traceback"])[-TRACEBACK_LINES:] if line]
    if failure["others"]:
        ranks = "1 other rank" if failure["others"] == 1 else f"{failure['others']} other ranks"
        lines.append(f"  {ranks} failed after it, most likely because of it")
    return [*lines, f"  log: {failure['log']}", ""]


def _cause_lines(diagnosis: dict[str, Any] | None, failure: dict[str, Any] | None) -> list[str]:
    """Return the cause and what to do, or the last lines of the failing rank's log where no error is shown above."""
    if diagnosis is not None:
        return [*lines(diagnosis), ""]
    if failure is None or failure["traceback"]:
        return []
    last: list[str] = []
    with suppress(OSError):
        last = last_lines(tail_of_file(Path(failure["log"])), LAST_LINES)
    # A signal is the cause that was named above.
    if failure["how"].startswith("killed by "):
        return ["  its last lines:", *(f"    {line}" for line in last), ""] if last else []
    return [*unknown_lines(failure["log"], last), ""]


def of_log(path: str) -> dict[str, Any]:
    """Return the cause of any job's end by the end of its log, or its last lines. Raises RequestError."""
    try:
        # What the user names may be a pipe of their shell.
        with nullcontext(sys.stdin.buffer) if path == STDIN else Path(path).open("rb") as log:
            tail = tail_of_stream(log)
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from error
    found = cause_or_exception(tail)
    return {
        "log": path,
        "diagnosis": found and found.to_json(),
        "last_lines": [] if found else last_lines(tail, LAST_LINES),
    }


def log_page(told: dict[str, Any]) -> str:
    """Return what :func:`of_log` has found as text."""
    if told["diagnosis"]:
        return "\n".join(lines(told["diagnosis"]))
    return "\n".join(unknown_lines(told["log"], told["last_lines"]))


def lines(diagnosis: dict[str, Any]) -> list[str]:
    """Return a diagnosis as lines of text."""
    rank, host, where = diagnosis["rank"], diagnosis["host"], diagnosis["where"]
    ranks = "" if rank is None else f"rank {rank}"
    source = ", ".join(filter(None, [" on ".join(filter(None, [ranks, host])), where]))
    return [
        f"cause: {diagnosis['cause']} ({diagnosis['rule']})",
        *([f"  seen: {diagnosis['line']}"] if diagnosis["line"] != diagnosis["cause"] else []),
        *([f"  from: {source}"] if source else []),
        f"  do: {diagnosis['next']}",
    ]


def unknown_lines(log: str, last: list[str]) -> list[str]:
    if not last:
        return [f"cause: not known; {log} is empty"]
    return [f"cause: not known; the last lines of {log}:", *(f"  {line}" for line in last)]


def last_lines(text: str, count: int) -> list[str]:
    """Return the last lines that are not empty."""
    drawn = "\n".join(map(as_drawn, text.split("\n")))
    return [line.rstrip() for line in clean(drawn).split("\n") if line.strip()][-count:]
