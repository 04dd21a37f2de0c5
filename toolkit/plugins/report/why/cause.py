"""The part of `toolkit why` about the cause: of a run, or of any log."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from toolkit.base.errors import RequestError
from toolkit.base.log_text import as_drawn, clean, tail_of_file, tail_of_stream
from toolkit.plugins.report.why.diagnosis import cause_or_exception

#: The number of a log's last lines that are shown where the cause is not known.
LAST_LINES = 12
#: What `--log` takes for the standard input.
STDIN = "-"


def of_log(path: str) -> dict[str, Any]:
    """Return the cause of a job's end as the end of its log shows it.

    The log may be of a run or of any other job, and of any size. Where the cause is not known, the last lines come
    instead. Raises RequestError for a log that cannot be read.
    """
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
    """Return what ``of_log`` tells as text."""
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
    """Return the last lines of a log of unknown cause."""
    if not last:
        return [f"cause: not known; {log} is empty"]
    return [f"cause: not known; the last lines of {log}:", *(f"  {line}" for line in last)]


def last_lines(text: str, count: int) -> list[str]:
    """Return the last lines that are not empty. A reader looks there for a cause that no rule finds."""
    drawn = "\n".join(map(as_drawn, text.split("\n")))
    return [line.rstrip() for line in clean(drawn).split("\n") if line.strip()][-count:]


def last_lines_of(path: Path) -> list[str]:
    """Return the last lines of a log; none if it cannot be read."""
    try:
        return last_lines(tail_of_file(path), LAST_LINES)
    except OSError:
        return []
