"""Finds what ended a run: from the record of the last failed attempt, the ranks' reports of their ends, and logs."""

from __future__ import annotations

import contextlib
import errno
import math
import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from toolkit.base import fsio
from toolkit.base.tracebacks import tail_of_file
from toolkit.files.run_files import AttemptRecord, RunState
from toolkit.files.rundir import RunDir
from toolkit.metrics import lines
from toolkit.plugins.report.why.diagnosis import (
    Diagnosis,
    Tier,
    cause_of_file,
    cause_of_text,
    cause_or_exception,
    diagnosis_by,
    rule,
)
from toolkit.plugins.report.why.page import last_lines
from toolkit.run.attempt.error_files import read_error_files
from toolkit.run.attempt.verdict import Cause, RankFailure

#: The number of ranks besides the first failing one whose reports are read, those that failed earliest.
MOST_OTHERS = 8
#: The number of a job's own logs that are read where the ranks have reported nothing.
MOST_JOB_LOGS = 4
#: The number of last lines of a log that say why a rank without an exception has ended.
END_LINES = 12
#: The rule about losses that are not finite, and the number of losses before that are shown.
NAN, LOSSES = "numeric.nan", 3

#: Causes that the record of an attempt names, whatever the ranks reported.
_CERTAIN: Mapping[str, str] = {
    Cause.TIMEOUT: "slurm.time_limit",
    Cause.PREEMPTED: "slurm.preempted",
    Cause.HANG: "run.hang",
}
#: Causes that it names where the ranks reported nothing better.
_LIKELY: Mapping[str, str] = {Cause.OUT_OF_MEMORY: "host.oom_kill", Cause.NODE_FAILURE: "slurm.node_fail"}
_FAILURES = {*_CERTAIN, *_LIKELY, Cause.CRASHED}


def cause_of(what: RunDir | str, *, may_write: bool = True) -> Diagnosis | None:
    """Return what ended a run, or the job whose log ends with this text; None if it is not known, or did not fail.

    A full disk is found only by a caller that ``may_write`` a file to it.
    """
    if isinstance(what, str):
        return cause_or_exception(what)
    result = what.result()
    if result is not None and result.state is RunState.COMPLETED:
        return None
    attempts = what.attempts()
    if attempts and attempts[-1].cause in _FAILURES:
        found = _of_attempt(what, attempts[-1])
        if found is not None and found.rule == NAN:
            return replace(found, cause=f"{found.cause}{_last_losses(what)}")
        return found
    if attempts and result is not None:  # stopped, say: failures before that are over
        return None
    # No failed attempt is recorded: the supervisor may have ended before it could do so.
    newest = max(what.attempts_with_logs(), default=None)
    if newest is not None:
        reports = sorted(read_error_files(what.attempt_logs(newest)), key=lambda report: report.time)
        if found := _most_telling(_by_ranks(what, newest, reports[:MOST_OTHERS])):
            return found
    # The last sources are the job's own logs, the newest first.
    logs: list[Path] = []
    with contextlib.suppress(OSError):
        logs = sorted(what.submitit.glob("*_log.*"), key=lambda path: path.stat().st_mtime, reverse=True)
    found = _most_telling(found for log in logs[:MOST_JOB_LOGS] for found in _by_log(log))
    return found or (_by_disk(what) if may_write else None)


def _by_disk(run: RunDir) -> Diagnosis | None:
    """Return a full disk or quota as the cause: then no file could record the end."""
    probe = run.path / f".room-{secrets.token_hex(4)}"
    try:
        fsio.write_atomic(probe, bytes(1 << 16))
    except OSError as error:
        known = {errno.ENOSPC: "fs.no_space", errno.EDQUOT: "fs.quota"}.get(error.errno or 0)
        return diagnosis_by(rule(known), f"{run.path}: {error.strerror}", None, None) if known else None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


def recurs(run: RunDir, attempt: int, failure: RankFailure) -> str | None:
    """Return whether the error of a rank would repeat: ``always``, ``on_node``, or None if that is not known.

    ``on_node``: wherever the node has the same environment and files. What a rank has caught or printed long before its
    end does not count.
    """
    text = failure.how
    if failure.rank is not None and not failure.traceback:
        with contextlib.suppress(OSError):
            text = "\n".join(last_lines(tail_of_file(run.rank_log(attempt, failure.rank)), END_LINES))
    found = cause_of_text(text)
    return None if found is None else rule(found.rule).recurs


def _of_attempt(run: RunDir, record: AttemptRecord) -> Diagnosis | None:
    first = record.first_failure
    rank, host = (first.rank, first.host or None) if first else (None, None)
    line = (first and first.how) or record.line or ""
    if record.cause in _CERTAIN:
        return diagnosis_by(rule(_CERTAIN[record.cause]), line, rank, host)
    reports = read_error_files(run.attempt_logs(record.attempt))
    of_rank = [report for report in reports if report.rank == rank]
    found = [*_by_ranks(run, record.attempt, of_rank)]
    # A rank that was killed has left no report, only its log.
    if rank is not None and not of_rank:
        found += _by_log(run.rank_log(record.attempt, rank), rank, host)
    if by_line := cause_of_text(line):
        found.append(replace(by_line, rank=rank, host=host))
    best = _most_telling(found)
    if record.cause in _LIKELY and (best is None or best.tier >= Tier.BROAD):
        return diagnosis_by(rule(_LIKELY[record.cause]), line, rank, host)
    # The first rank to fail may have ended because of another.
    if best is None or best.is_consequence:
        others = sorted((report for report in reports if report.rank != rank), key=lambda report: report.time)
        best = _most_telling([*found, *_by_ranks(run, record.attempt, others[:MOST_OTHERS])])
    # A rank that lost its connection tells nothing about the one that failed before it.
    return None if best is not None and best.is_consequence and rank is not None and best.rank != rank else best


def _last_losses(run: RunDir) -> str:
    losses: deque[str] = deque(maxlen=LOSSES)
    rate = None
    for line in lines.read(lines.path_of(run)):
        loss = line.values.get("train/loss", math.nan)
        if math.isfinite(loss):
            losses.append(f"{loss:.4g} (step {line.step})")
            rate = line.values.get("train/lr", rate)
    at_rate = "" if rate is None else f", at a rate of {rate:.3g}"
    return f" The last finite losses: {', '.join(losses)}{at_rate}." if losses else ""


def _most_telling(found: Iterable[Diagnosis]) -> Diagnosis | None:
    return min(found, key=lambda diagnosis: diagnosis.tier, default=None)


def _by_ranks(run: RunDir, attempt: int, reports: Iterable[RankFailure]) -> Iterator[Diagnosis]:
    """Yield the causes that the ranks' reports show. Where a report is no clear error, read the rank's log, too."""
    for report in reports:
        found = cause_or_exception(report.traceback or report.how)
        host = None if report.host == "?" else report.host
        if found is not None:
            yield replace(found, rank=report.rank, host=host, where=report.where or found.where)
        if (found is None or found.tier >= Tier.BROAD) and report.rank is not None:
            yield from _by_log(run.rank_log(attempt, report.rank), report.rank, host)


def _by_log(path: Path, rank: int | None = None, host: str | None = None) -> Iterator[Diagnosis]:
    with contextlib.suppress(OSError):
        if found := cause_of_file(path):
            yield replace(found, rank=found.rank if rank is None else rank, host=host or found.host)
