"""What failing ranks wrote about their end: our files, and those of torch.distributed.elastic's ``record``.

A script that runs in a fork of ours, or that has torch's ``record``, leaves an error file. Of other programs only exit
code and log are known. What the log tells is written as an error file, so that all readers of these find it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.base import fsio, secret_values, tracebacks
from toolkit.base.errors import EXIT_REQUEST, MOST_CHARS, shortened
from toolkit.devices.kinds import DEVICE_ERROR, DEVICE_OUT_OF_MEMORY
from toolkit.files import records
from toolkit.files.records import MOMENT, JsonRecord
from toolkit.files.rundir import RunDir
from toolkit.run.attempt.attempt import Attempt
from toolkit.run.attempt.verdict import THEN_PRINTED, RankFailure
from toolkit.slurm.network import plain_address

#: The most logs that are read, of the ranks that failed first.
MOST_LOGS = 8
#: A program that printed more lines than this after a traceback was not ended by it.
MOST_LINES_AFTER = 20
#: The most characters of a last line that are shown.
SHOWN = 200
#: The exit code of a program that refuses its arguments: argparse's and click's.
EXIT_USAGE = 2
#: To it a shell adds the number of the signal that has ended a program.
EXIT_SIGNAL = 128


@dataclass(frozen=True)
class _ErrorFile(JsonRecord):
    """A rank's report, by the toolkit or by torch. What comes from a user's exception may be of any type."""

    message: Any = None  #: text; of torch an object
    type: str | None = None
    host: str = "?"
    traceback: str = ""
    time: Any = None
    exit_code: Any = None
    comes_again: Any = None


#: Error texts about lack of the node's memory: of numpy, Python, C++ and the kernel.
_OUT_OF_MEMORY = re.compile(
    r"\bMemoryError\b|_ArrayMemoryError|error: out of memory|std::bad_alloc|\[Errno 12\]|Cannot allocate memory"
    r"|DefaultCPUAllocator: (?:can't allocate|not enough) memory"
)
_NAME = re.compile(r"error-(\d{1,9})\.json")

#: gloo: the node's own kernel refuses a connection. It names no address.
_NO_WAY_OUT = re.compile(
    r"\bconnect: (?:Invalid argument|Network is unreachable|Permission denied|Operation not permitted)"
)
#: Error texts about another process that ended first: a peer that closed a connection, or a launcher's child.
_CONSEQUENCE = re.compile(
    r"(?i)connection (?:was )?(?:closed|reset)|broken pipe|reset by peer|ncclRemoteError"
    r"|ChildFailedError|ProcessExitedException|CalledProcessError"
)
#: Texts of a connection that could not be made, with the other end's address: NCCL's ``1.2.3.4<5678>``, the store's
#: ``(1.2.3.4, 5678)``, gloo's ``[1.2.3.4]:5678``. A broken connection is not among them: the other end may have ended
#: for its own reasons.
_UNREACHED = re.compile(
    r"connect to (?P<nccl>[\da-fA-F.:]+)(?:%\w+)?<\d+> (?:returned|failed)"
    r"|(?:connect to any network address of|trying to connect to) \((?P<store>[\da-fA-F.:]+), \d+\)"
    r"|timed out connecting: .*?remote=\[?(?P<gloo>[\da-fA-F.:]+?)\]?:\d+"
)
_USAGE = re.compile(r"(?im)^usage: ")
#: Lines that say nothing about the end: warnings, rules, sources under a warning, and what loggers print at any end.
_NOISE = re.compile(
    r"\s|wandb: |\[?[WEIF]\d{4} |.*(?i:warn)|Exception ignored |Set the environment variable HYDRA|See http"
)
#: A progress bar of tqdm's, as far as its end: ``40%|####  | 2/5 [00:01<00:02,  1.9it/s]``.
_BAR = re.compile(r".*\[\d+:\d\d(?:<|, )[^\]\n]*\]")
_WORDS = re.compile(r"[^\W\d_]")
_REFUSAL = re.compile(r"(?i)(?:[^\n]{1,100}: )?error: \S")


def is_consequence(how: str) -> bool:
    """True for an error that says that another process ended first."""
    return _CONSEQUENCE.search(how) is not None


def read_error_files(folder: Path) -> list[RankFailure]:
    """Return what the ranks of an attempt wrote about their own ends."""
    return [read_error_file(path) for path in fsio.entries(folder, "error-*.json") if _NAME.fullmatch(path.name)]


def read_error_file(path: Path) -> RankFailure:
    """Return what a rank wrote about its own end. The format is the toolkit's or torch's.

    A file that cannot be read is a failure without text: torch writes in place, and a kill or a full disk may come in
    between.
    """
    report = records.read_or_none(path, _ErrorFile) or _ErrorFile()
    message, traceback, time = report.message, report.traceback, report.time
    if isinstance(message, dict):  # torch's format
        more = message.get("extraInfo")
        more = more if isinstance(more, dict) else {}
        message, traceback, time = message.get("message"), str(more.get("py_callstack") or ""), more.get("timestamp")
    # Those of torch have any length.
    how = shortened(str("no message" if message is None else message))
    traceback = shortened(traceback, 4 * MOST_CHARS)
    # torch's DataLoader gives a worker's whole traceback as the text of its error.
    if inner_errors := [*tracebacks.raised(how)]:
        how = f"{how.partition(chr(10))[0]} {inner_errors[-1].how}"
    if report.type is not None:
        how = f"{report.type}: {'' if message is None else how}"
    match = _NAME.fullmatch(path.name)
    assert match, path
    memory = any(text.search(how) for text in (_OUT_OF_MEMORY, DEVICE_OUT_OF_MEMORY))
    # The address to which it could not connect, where the error names one.
    unreached, other_end = None, _UNREACHED.search(how)
    with contextlib.suppress(ValueError):
        unreached = other_end and plain_address(next(filter(None, other_end.groups())))
    return RankFailure(
        int(match[1]),
        host=report.host,
        how=how,
        time=_seconds(time) or path.stat().st_mtime,
        traceback=traceback,
        out_of_memory=memory,
        blames_node=not memory and any(text.search(how) for text in (DEVICE_ERROR, _NO_WAY_OUT)),
        is_consequence=is_consequence(how),
        unreached=unreached,
        comes_again=report.exit_code == EXIT_REQUEST if report.comes_again is None else bool(report.comes_again),
        where=tracebacks.origin_frame(traceback),
    )


def _seconds(time: Any) -> float | None:
    """Return a time in seconds since the epoch, which torch writes as text. None for anything else."""
    if isinstance(time, str) and re.fullmatch(r"\d{1,11}", time):
        time = int(time)
    return float(time) if MOMENT.fits(time) else None


def complete_failures(run: RunDir, attempt: Attempt, secrets: Mapping[str, str]) -> list[RankFailure]:
    """Return the failures of an attempt, with what the logs tell. Write the error files of ranks that have none."""
    candidates = [
        failure
        for failure in sorted(attempt.failures, key=lambda failure: failure.time)
        if failure.rank is not None
        and failure.exit_code is not None
        and not _is_there(run.error_file(attempt.number, failure.rank))
    ]
    explained_by_log = {}
    for failure in candidates[:MOST_LOGS]:
        assert failure.rank is not None
        with contextlib.suppress(OSError):  # a log that cannot be read tells nothing
            tail = tracebacks.tail_of_file(run.rank_log(attempt.number, failure.rank))
            text = secret_values.masked_of(secrets, tracebacks.clean(tail))
            report = error_from_log(text, failure.exit_code)
            if "traceback" in report:
                where = {"rank": failure.rank, "host": failure.host, "time": failure.time}
                fsio.write_json(run.error_file(attempt.number, failure.rank), {**where, **report})
            elif "message" in report:
                how, comes_again = str(report["message"]), bool(report.get("comes_again"))
                # A shell ends so for a Python that a signal has ended.
                place = tracebacks.signal_frame(text) if (failure.exit_code or 0) > EXIT_SIGNAL else None
                explained_by_log[failure.rank] = replace(failure, how=how, comes_again=comes_again, where=place)
    return [each if each.rank is None else explained_by_log.get(each.rank, each) for each in attempt.failures]


def _is_there(report: Path) -> bool:
    """True also where the disk does not say: a rank's own report must not be replaced."""
    try:
        return fsio.is_there(report)
    except OSError:
        return True


def exception_at_end(run: RunDir, attempt: Attempt, secrets: Mapping[str, str]) -> str:
    """Return the exception with which the log of a rank that ended with 0 ends, and its rank. Empty without one."""
    for rank in range(min(attempt.plan.world_size, MOST_LOGS)):
        with contextlib.suppress(OSError):
            tail = tracebacks.tail_of_file(run.rank_log(attempt.number, rank))
            report = error_from_log(secret_values.masked_of(secrets, tracebacks.clean(tail)), 0)
            if "traceback" in report and THEN_PRINTED not in str(report["message"]):
                return f"the log of rank {rank} ends in {report['message']}"
    return ""


def error_from_log(text: str, exit_code: int | None) -> dict[str, str | bool]:
    """Return the part of an error file that a log's end tells about the end of its rank.

    It has ``traceback`` where the rank ended by an exception. Empty where nothing is known. The exception is the last
    one of the log. One about another process is a consequence, so the last other one is preferred: launchers such as
    torchrun report an error of their children so.
    """
    text = tracebacks.LABELS.sub("", text)
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
    lines = _BAR.sub("", text).split("\n")
    return [line.strip()[:SHOWN] for line in lines if _WORDS.search(line) and not _NOISE.match(line)]
