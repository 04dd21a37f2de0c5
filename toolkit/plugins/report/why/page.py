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
from toolkit.cli import columns
from toolkit.cli.tables import Table
from toolkit.files.run_files import AttemptRecord, RunState
from toolkit.metrics import goodput, start_up
from toolkit.plugins.node_watch import efficiency
from toolkit.plugins.report.why.diagnosis import EXCEPTION, cause_or_exception
from toolkit.run.attempt.verdict import Cause

#: The number of last lines of a folded traceback that are shown; the whole one is in the rank's log.
TRACEBACK_LINES = 25
#: A completed run that took less time than this is shown without its accounts.
SHORT_S = 180.0
#: The number of characters of an error, or of a line of the program, on the short page.
SHOWN = 160
#: The number of attempts that are listed without their table.
FEW = 5
#: The number of a log's last lines that are shown where the cause is not known.
LAST_LINES = 12
#: What `--log` takes for the standard input.
STDIN = "-"
_HEAD = ("ATTEMPT", "JOB", "NODES", "RANKS", "STEPS", "CAUSE", "DECISION")


def format_text(told: dict[str, Any], *, whole: bool) -> str:
    """Return the facts as text: about ten lines, or all that is known if ``whole`` or the run took long to complete."""
    attempts: Sequence[AttemptRecord] = told["attempts"]
    is_long = sum(attempt.ended - attempt.started for attempt in attempts) >= SHORT_S
    whole |= told["state"] == RunState.COMPLETED and is_long
    waits = "not started yet" if told["state"] in ("unknown", RunState.QUEUED) else ""
    why = [told["why"] or waits, *told["waits"]]
    if not whole and (failure := told["first_failure"]) is not None:
        # The failure has a line of its own: what remains is what was decided.
        failed = _one_line(f"{_who(failure)}: {failure['how']}")
        why[0] = _one_line(why[0]).removeprefix(failed).lstrip(":; ")
    lines = [f"{told['run']}: {told['state']}", *(f"  {_one_line(text)}" for text in why if text)]
    lines += ["", *_failure_lines(told), ""] if whole else _short_failure_lines(told)
    lines += [text for text in (told["given"] if whole else "", told["restarts"], told["loss"]) if text]
    lines += columns.straggler_lines(told["stragglers"], told["nodes"])
    saved = told["last_checkpoint"]
    if saved is not None or not told["is_script"]:  # a script has checkpoints of its own
        lines.append(f"last checkpoint: {'none' if saved is None else f'step {saved}'}")
    printed = told["printed"]
    if told["is_script"] and printed["step"] is not None:
        of = "" if printed["total_steps"] is None else f" of {printed['total_steps']}"
        lines.append(f"step: {printed['step']}{of}, as read from its output")
    lines += filter(None, [columns.checkpoint_remark(printed)])
    if (reached := told["step_reached"]) is not None:
        # None may be lost because the run is complete, or unfinished: 0 would be read as if no step was repeated.
        lost = told["steps_lost"]
        lines.append(f"steps lost: {lost} (reached step {reached})" if lost else f"reached step: {reached}")
    if whole and (time_told := goodput.sentence(told["goodput"])):
        lines.append(f"time: {time_told}")
    lines += [f"staging: {line}" for line in told["staging"]]
    lines += [f"bad node: {host} ({why})" for host, why in told["bad_nodes"].items()]
    lines += [f"node {host}: {what}" for host, what in told["degraded_nodes"].items()]
    lines += [f"node {host} {what}" for host, what in told["doubtful_nodes"].items()]
    # No failure above explains why a run was moved.
    lines += [f"attempt {a.attempt}: {a.line}" for a in attempts if a.cause == Cause.MOVED]
    if whole:
        lines += _accounts(told, attempts)
    elif len(attempts) > 1:
        before = "..., " * (len(attempts) > FEW)
        lines.append(f"attempts: {len(attempts)} ({before}{', '.join(each.cause for each in attempts[-FEW:])})")
    return "\n".join([*lines, *([""] if whole else []), f"next: {told['next']}"])


def _accounts(told: dict[str, Any], attempts: Sequence[AttemptRecord]) -> list[str]:
    """Return the table of attempts, where start-ups took their time, and what the jobs used."""
    lines = []
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
    if told["start_up"]:
        starts = told["start_up"].items()
        lines += ["", *(f"start of attempt {number}: {start_up.sentence(parts)}" for number, parts in starts)]
    if used := efficiency.lines(told["efficiency"]):
        lines += ["", *used]
    return lines


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _who(failure: dict[str, Any]) -> str:
    host = failure["host"] or "an unknown node"
    return host if failure["rank"] is None else f"rank {failure['rank']} on {host}"


def _failure_lines(told: dict[str, Any]) -> list[str]:
    """Return the first failure with its traceback, and the cause."""
    failure = told["first_failure"]
    if failure is None:
        return _cause_lines(told["diagnosis"], None)
    lines = [f"first failure: {_who(failure)}, attempt {failure['attempt']}: {_one_line(failure['how'])}"]
    lines += [f"  {line}" for line in tracebacks.folded(failure["traceback"])[-TRACEBACK_LINES:] if line]
    lines += [*_others(failure), f"  log: {failure['log']}", ""]
    return lines + _cause_lines(told["diagnosis"], failure)


def _short_failure_lines(told: dict[str, Any]) -> list[str]:
    """Return the first failure with the user's line, its log, and the cause where that says more."""
    failure, diagnosis = told["first_failure"], told["diagnosis"]
    if failure is None:
        return _cause_lines(diagnosis, None)
    how = _shortened(failure["how"].strip().split("\n")[0])
    lines = [f"first failure: {_who(failure)}, attempt {failure['attempt']}: {how}"]
    is_of_rank = diagnosis is not None and diagnosis["rank"] == failure["rank"]
    if where := failure.get("where") or (diagnosis["where"] if is_of_rank else None):
        source = _shortened(tracebacks.source(failure["traceback"]))
        lines.append(f"  at {where}{f': {source}' if source else ''}")
    lines += [*_others(failure), f"  log: {failure['log']}"]
    if diagnosis is None:
        return [*lines, *_cause_lines(None, failure)]
    # What stands above is not said twice: where it happened, and the error.
    if is_of_rank:
        if diagnosis["rule"] == EXCEPTION.id and diagnosis["where"] == where:
            return lines
        diagnosis = {**diagnosis, "rank": None, "host": None, "where": None}
    if diagnosis["line"] in f"{failure['how']}\n{failure['traceback']}":
        diagnosis = {**diagnosis, "line": diagnosis["cause"]}
    return [*lines, *diagnosis_lines(diagnosis)]


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _others(failure: dict[str, Any]) -> list[str]:
    if not failure["others"]:
        return []
    ranks = "1 other rank" if failure["others"] == 1 else f"{failure['others']} other ranks"
    return [f"  {ranks} failed after it, most likely because of it"]


def _cause_lines(diagnosis: dict[str, Any] | None, failure: dict[str, Any] | None) -> list[str]:
    """Return the cause and what to do, or the last lines of the failing rank's log where no error is shown above."""
    if diagnosis is not None:
        return diagnosis_lines(diagnosis)
    if failure is None or failure["traceback"]:
        return []
    last: list[str] = []
    with suppress(OSError):
        last = last_lines(tail_of_file(Path(failure["log"])), LAST_LINES)
    # A signal is the cause that was named above.
    if failure["how"].startswith("killed by "):
        return ["  its last lines:", *(f"    {line}" for line in last)] if last else []
    return unknown_lines(failure["log"], last)


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
        return "\n".join(diagnosis_lines(told["diagnosis"]))
    return "\n".join(unknown_lines(told["log"], told["last_lines"]))


def diagnosis_lines(diagnosis: dict[str, Any]) -> list[str]:
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
