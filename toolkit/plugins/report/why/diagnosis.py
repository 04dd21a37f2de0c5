"""What ended a job, by the last lines of its log.

A diagnosis is made only where a rule fits. A log that no rule fits has none: a wrong cause costs more than no cause.

The rules are tables in ``rules/*.toml``, a file for each group. A table's name is the rule's id without its group::

    [ib_port_down]                        # nccl.ib_port_down, in nccl.toml
    tier = "decisive"                     # "plain" if left out
    lines = ['Got async event : port error']
    cause = "An InfiniBand port went down."
    next = "Have the port looked at."
    recurs = "always"                     # no restart helps; "on_node": unless the node alone is at fault

``lines`` are regular expressions. A rule fits a log if any of them is found in it; ``^`` is the start of a
line, behind the labels that launchers put before it.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

from toolkit.base import tracebacks
from toolkit.base.tracebacks import LABELS, clean, tail_of_file

#: The most characters that are shown of the line that names the cause.
SHOWN = 300
#: A log that reports at least this many steps after an error was not ended by it.
STEPS_AFTER = 5
#: The lines before an error in which the last frame is looked for, as many as a traceback may have.
FRAME_LINES = 60

_HOST = re.compile(r"srun: error: (?P<srun>[\w.-]+): task|\*\*\* (?:JOB|STEP) \S+ ON (?P<step>[\w.-]+) CANCELLED")
_PROGRESS = re.compile(
    r"(?m)\d(?:it/s|s/it)\b"
    r"|(?i:\b(?:step|iter|iteration|epoch|batch|update|num_updates)\b[^a-z\n]{0,8}\d"
    r"[^\n]{0,200}?\b(?:\w+[_/])?(?:loss|ppl)\b)"
)
#: Rules about the program's own lines.
_OF_CODE = {
    *("py.exception", "py.syntax", "py.name_error", "py.attribute", "py.key", "py.index", "py.signature", "py.type"),
    *("py.shape_mismatch", "py.dtype", "py.device_mismatch", "py.inplace", "py.backward_twice", "py.no_group"),
    *("py.unused_parameters", "py.ready_twice", "py.static_graph", "py.param_mismatch", "py.batch_norm"),
    *("py.pickle", "py.recursion", "py.assertion"),
    *("run.second_group", "nccl.collective_mismatch", "net.collective_mismatch"),
}
#: What programs print that end well, too: what torch, TensorFlow and loggers say below the level of an error, and
#: exceptions that Python ignores.
_IN_PASSING = re.compile(
    r"(?m)^(?:[^\n]*[\[\]])?[IWD]\d{4} (?![^\n]*(?:death|closing) signal)[^\n]*"
    r"|^[^\n]{0,40}: [IWE] (?:tensorflow|external)/[^\n]*"
    r"|^(?![^\n]*NCCL )[^\n]{0,80}\bINFO\b[^\n]*"
    r"|^Exception ignored [^\n]*(?:\nTraceback [^\n]*(?:\n[ \t][^\n]*)*\n[^\n]*)?"
    r"|^Traceback [^\n]*\n[^\n]*/resource_tracker\.py[^\n]*(?:\n[ \t][^\n]*)*\n[^\n]*"
)
#: Warnings of Python's.
_WARNINGS = re.compile(r"(?m)^[^\n]*Warning: [^\n]*")
#: Lines after which a program may continue: warnings, and what a shell reports of a command, and Slurm of a folder or
#: of a step that waits.
_WARNED = re.compile(
    rf"{_WARNINGS.pattern}"
    r"|^[^\n]*(?:\bWARNING\b|: (?:command )?not found|disabled, retrying|going to /tmp|TMPDIR)[^\n]*"
)


@dataclass(frozen=True)
class Diagnosis:
    """Why a job ended, the line that says so, and what to do next."""

    rule: str  #: such as ``nccl.timeout``
    cause: str
    next: str
    line: str  #: the line that names it
    rank: int | None = None
    host: str | None = None
    where: str | None = None  #: ``train.py:42 in forward``: the last frame of the traceback, the user's own if possible
    log: str | None = None  #: the file in which the line was found

    @property
    def tier(self) -> Tier:
        """Return how much it tells about the cause."""
        return rule(self.rule).tier

    @property
    def is_consequence(self) -> bool:
        """True if the process ended because another one did. The cause is in that one's log."""
        return self.tier is Tier.CONSEQUENCE

    @property
    def is_of_code(self) -> bool:
        """True if the line at ``where`` is to be fixed, and not the environment, the files or the job's request."""
        return self.rule in _OF_CODE

    def to_json(self) -> dict[str, Any]:
        """Return it as an object for a JSON document."""
        return {**asdict(self), "is_consequence": self.is_consequence}


def cause_of_text(text: str) -> Diagnosis | None:
    """Return what ended the job whose log ends with ``text``. None if that is not known.

    Among the rules that fit, those of the lowest tier count, and of these the one that fits the earliest line: what
    follows an error is mostly its consequence.
    """
    lines = clean(text)
    plain = LABELS.sub("", lines)
    # An error before this position cannot have ended the job: it went on for several steps.
    steps = [match.start() for match in _PROGRESS.finditer(plain)]
    start = steps[-STEPS_AFTER] if len(steps) >= STEPS_AFTER else 0
    text = _IN_PASSING.sub(_blank, plain)
    sure = _WARNED.sub(_blank, text)
    # What was warned of counts where something failed after all, or where nothing follows it.
    if not _hits(sure, start) and "Traceback (most recent call last):" not in sure:
        text, start = _WARNINGS.sub(_blank, text), max(start, len(sure.rstrip()))
    hits = _hits(text, start)
    best = min(hits, key=lambda hit: hit[:2], default=None)
    if best is None:
        return None
    _, at, found = best
    # The line; of a long one, what is around the position.
    begin, end = plain.rfind("\n", 0, at) + 1, plain.find("\n", at)
    begin = begin if at - begin < SHOWN // 2 else at - SHOWN // 4
    line = plain[begin : len(plain) if end < 0 else end].strip()[:SHOWN]
    host = _HOST.search(line)
    # The rank that a launcher's label before the line names.
    number = plain.count("\n", 0, at)
    label = LABELS.search(lines.split("\n", number + 1)[number])
    rank = label and next(filter(None, label.groups()), None)
    of_host = host and next(filter(None, host.groups()))
    return diagnosis_by(found, line, int(rank) if rank else None, of_host, _frame(plain, at))


def _hits(text: str, start: int) -> list[tuple[Tier, int, Rule]]:
    """Return for each rule that fits the first place from ``start`` on."""
    hits: list[tuple[Tier, int, Rule]] = []
    for each in all_rules():
        places = [match.start() for pattern in each.lines if (match := pattern.search(text, start))]
        if places:
            hits.append((each.tier, min(places), each))
    return hits


def _blank(match: re.Match[str]) -> str:
    """Return blanks for what is to be skipped. All else keeps its position."""
    return re.sub("[^\n]", " ", match[0])


def cause_or_exception(text: str) -> Diagnosis | None:
    """Return what ended the job whose log ends with ``text``: by a rule, or else the exception's own text.

    That is the last exception of the program's own: no rule calls it a consequence, and few steps follow it.
    """
    found = cause_of_text(text)
    if found is not None and not found.is_consequence:
        return found
    plain = LABELS.sub("", clean(text))
    for raised in reversed([*tracebacks.raised(plain)]):
        is_over = len(_PROGRESS.findall(plain, raised.end)) < STEPS_AFTER
        if is_over and cause_of_text(raised.how) is None:
            own = diagnosis_by(EXCEPTION, raised.how[:SHOWN], where=raised.where)
            return replace(own, cause=own.line)
    return found


def diagnosis_by(
    rule: Rule, line: str, rank: int | None = None, host: str | None = None, where: str | None = None
) -> Diagnosis:
    return Diagnosis(rule.id, rule.cause, rule.next, line, rank, host, where)


def cause_of_file(path: Path) -> Diagnosis | None:
    """Return what ended the job that wrote this log, as :func:`cause_or_exception` does. Raises OSError."""
    found = cause_or_exception(tail_of_file(path))
    return found and replace(found, log=str(path))


def _frame(text: str, at: int) -> str | None:
    """Return the frame from which the exception at ``at`` comes. None without a traceback just before it."""
    before = "\n".join(text[:at].split("\n")[-FRAME_LINES:])
    begin = before.rfind("Traceback (most recent call last)")
    return None if begin < 0 else tracebacks.origin_frame(before, begin)


class Tier(IntEnum):
    """How much a rule tells about the cause. Of several rules that fit, those of the lowest tier count."""

    DECISIVE = 0  #: names what failed: a device, a port, a disk, a kill by the kernel
    PLAIN = 1  #: an error that explains itself
    BROAD = 2  #: says what happened to the process, not why: a time-out, a signal
    CONSEQUENCE = 3  #: another process ended first


@dataclass(frozen=True)
class Rule:
    """One kind of failure: how it is recognised, what it means, what to do."""

    id: str
    tier: Tier
    lines: tuple[re.Pattern[str], ...]
    cause: str
    next: str
    recurs: str | None = None  #: ``always``, ``on_node``, or None where a restart may help


@cache
def all_rules() -> tuple[Rule, ...]:
    """Return all rules, in the order of their files and tables."""
    files = sorted(Path(__file__).with_name("rules").glob("*.toml"))
    return tuple(
        Rule(
            f"{file.stem}.{name}",
            Tier[fields.get("tier", "plain").upper()],
            tuple(re.compile(line, re.MULTILINE) for line in fields["lines"]),
            fields["cause"],
            fields["next"],
            fields.get("recurs"),
        )
        for file in files
        for name, fields in tomllib.loads(file.read_text(encoding="utf-8")).items()
    )


#: An exception that no rule of the files fits. Its own text is the cause.
EXCEPTION = Rule(
    "py.exception",
    Tier.BROAD,
    (),
    "The program ended with an exception of its own.",
    "Fix the program at the line that `from:` names.",
)


@cache
def rule(rule_id: str) -> Rule:
    """Return the rule of an id. Raises KeyError if there is none."""
    return {rule.id: rule for rule in (*all_rules(), EXCEPTION)}[rule_id]
