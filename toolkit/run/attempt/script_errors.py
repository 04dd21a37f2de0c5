"""What the logs of a script's ranks say about their ends, where the ranks themselves have reported nothing.

A script that runs in a fork of ours, or that has torch's ``record``, leaves an error file. Of other programs only exit
code and log are known. What the log tells is written as an error file, so that all readers of these find it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import replace

from toolkit.base import fsio, log_text, secret_values, tracebacks
from toolkit.files.rundir import RunDir
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.error_files import is_consequence
from toolkit.run.attempt.facts import THEN_PRINTED, RankFailure

#: So many logs are read, of the ranks that failed first.
MOST_LOGS = 8
#: A program that printed more lines than this after a traceback was not ended by it.
MOST_LINES_AFTER = 20
#: The most characters of a last line that are shown.
SHOWN = 200
#: The exit code of a program that refuses its arguments: argparse's and click's.
EXIT_USAGE = 2
_USAGE = re.compile(r"(?im)^usage: ")
#: Lines that say nothing about the end: warnings, rules, sources under a warning, and what loggers print at any end.
_NOISE = re.compile(r"\s|wandb: |\[\w+\]:\[|[WEIF]\d{4} |.*(?i:warn)|Exception ignored ")
_WORDS = re.compile(r"[^\W\d_]")
_REFUSAL = re.compile(r"(?i)(?:[^\n]{1,100}: )?error: \S")


def explained(run: RunDir, attempt: Attempt, secrets: Mapping[str, str]) -> list[RankFailure]:
    """Return the failures of an attempt, with what the logs tell. Write the error files of ranks that have none."""
    candidates = [
        failure
        for failure in sorted(attempt.failures, key=lambda failure: failure.time)
        if failure.rank is not None
        and failure.exit_code is not None
        and not run.error_file(attempt.number, failure.rank).exists()
    ]
    told = {}
    for failure in candidates[:MOST_LOGS]:
        assert failure.rank is not None
        with contextlib.suppress(OSError):  # a log that cannot be read tells nothing
            tail = log_text.tail_of_file(run.rank_log(attempt.number, failure.rank))
            report = report_of(secret_values.masked_of(secrets, log_text.clean(tail)), failure.exit_code)
            if "traceback" in report:
                where = {"rank": failure.rank, "host": failure.host, "time": failure.time}
                fsio.write_json(run.error_file(attempt.number, failure.rank), {**where, **report})
            elif "message" in report:
                told[failure.rank] = replace(
                    failure, how=str(report["message"]), comes_again=bool(report.get("comes_again"))
                )
    return [failure if failure.rank is None else told.get(failure.rank, failure) for failure in attempt.failures]


def report_of(text: str, exit_code: int | None) -> dict[str, str | bool]:
    """Return the part of an error file that a log's end tells about the end of its rank.

    It has ``traceback`` where the rank ended by an exception. Empty where nothing is known. The exception is the last
    one of the log. One about another process is a consequence, so the last other one is preferred: launchers such as
    torchrun report an error of their children so.
    """
    raised = [*tracebacks.raised(text)]
    ended_by = next(reversed([each for each in raised if not is_consequence(each.how)] or raised), None)
    if ended_by is not None:
        after = _said(text[ended_by.end :])
        if ended_by is not raised[-1] or not after:
            return {"message": ended_by.how, "traceback": ended_by.traceback}
        if len(after) <= MOST_LINES_AFTER:  # it may have caught the exception, and ended for another reason
            return {"message": f"{ended_by.how}{THEN_PRINTED}{after[-1]}", "traceback": ended_by.traceback}
    lines = _said(text)
    if not lines:
        return {}
    if exit_code == EXIT_USAGE and _REFUSAL.match(lines[-1]) and _USAGE.search(text):
        return {"message": lines[-1], "comes_again": True}
    return {"message": f"exit code {exit_code}; it printed last: {lines[-1]}"}


def _said(text: str) -> list[str]:
    """Return the lines of a program's own, cut. Those that libraries print at the end of any program are left out."""
    lines = text.split("\n")
    return [line.strip()[:SHOWN] for line in lines if _WORDS.search(line) and not _NOISE.match(line)]
