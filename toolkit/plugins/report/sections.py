"""What the sections of a report say about one run. How they look is in templates/page.html."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias

from toolkit.base.durations import in_units
from toolkit.files.run_files import AttemptRecord
from toolkit.metrics import goodput, start_up
from toolkit.plugins.report.curves import short
from toolkit.plugins.report.facts import ReportFacts

#: A longer list would not be read, and would not fit into the file.
MOST_ATTEMPTS, MOST_NODES, MOST_COLUMNS = 60, 64, 30
#: Of a config that is longer, as one with thousands of parameters, the rest is left out.
MOST_KEYS = 600

#: The CSS class of a part of a bar, and its begin and end as shares of the whole width.
BarPart: TypeAlias = tuple[str, float, float]
#: A node; a mark for each attempt, and what it means if something was wrong; a remark.
NodeRow: TypeAlias = tuple[str, list[tuple[str, str]], str]


def format_time(seconds: float) -> str:
    """Return a time in UTC: a report is read elsewhere than where it was written."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def format_value(value: Any) -> str:
    """Return a metric's value. A NaN is null in the files."""
    return "not a number" if value is None else str(value) if isinstance(value, int) else short(value)


def key_figures(facts: ReportFacts) -> Iterator[tuple[str, str]]:
    """Yield the figures at the top, each with its name."""
    figures = facts.figures
    if figures["step"] is not None:
        step, total = figures["step"], figures["total_steps"]
        yield "step", f"{step:,} of {total:,}" if total and total != step else f"{step:,}"
    elif (printed := facts.told["printed"])["step"] is not None:
        yield "step, as read from the output", f"~{printed['step']:,} of {printed['total_steps'] or '?'}"
    if figures.get("epoch") is not None:
        yield "epoch", str(figures["epoch"])
    if spent_s := wall_s(facts.told["goodput"]):
        yield "since the submission", in_units(spent_s)
        yield "of it training", f"{goodput.ratio(facts.told['goodput']):.1%}"
    yield "attempt" + "s" * (len(facts.attempts) != 1), str(len(facts.attempts))
    yield from ((name, format_value(value)) for name, value in sorted(figures["metrics"].items())[:12])


def extremes(summary: Mapping[str, Any]) -> str:
    """Return what a curve's caption says."""
    words = [f"{summary['count']} point{'s' * (summary['count'] != 1)}"]
    if "last" in summary:
        words.append(f"last {short(summary['last'][1])}")
        for name, key in (("min", "least"), ("max", "greatest")):
            words.append(f"{name} {short(summary[key][1])} at step {summary[key][0]}")
    if summary["not_finite"]:
        words.append(f"{summary['not_finite']} not finite")
    return ", ".join(words)


PART_WORDS = {"training": "training", **goodput.WORDS}


def wall_s(ledger: Mapping[str, float] | None) -> float:
    """Return the time that a run has taken, 0 if that was not measured."""
    return sum((ledger or {}).get(part, 0.0) for part in goodput.PARTS)


def time_spent(ledger: Mapping[str, float] | None) -> tuple[str, list[BarPart], list[tuple[str, str, str]]]:
    """Return where the run's time went: in words, as a bar, and as rows. There are none if that was not measured."""
    known = {part: (ledger or {}).get(part, 0.0) for part in goodput.PARTS}
    spent_s = wall_s(ledger)
    rows = [(PART_WORDS[part], in_units(spent), f"{spent / spent_s:.1%}") for part, spent in known.items() if spent]
    words = goodput.sentence(ledger) or f"{in_units(spent_s)} in all"
    return words, _stacked(known, 0.0, spent_s or 1.0), rows


def time_to_start(by_attempt: Mapping[int, Mapping[str, float]]) -> tuple[list[str], list[list[str]]]:
    """Return where the starts of the attempts went: the head and the rows of a table with a column for each."""
    rows = []
    for part in start_up.PARTS:
        seconds = [parts.get(part, 0.0) for parts in by_attempt.values()]
        if any(seconds):
            rows.append([start_up.WORDS[part], *(f"{each:.2f} s" for each in seconds)])
    wholes = [sum(parts.get(part, 0.0) for part in start_up.PARTS) for parts in by_attempt.values()]
    last = ["to the end of the first step", *(f"{each:.2f} s" for each in wholes)]
    return ["part", *(f"attempt {number}" for number in by_attempt)], [*rows, last] if rows else []


def _stacked(ledger: Mapping[str, float], start: float, span: float) -> list[BarPart]:
    """Return the parts of a bar, one after another from ``start`` on. All values are divided by ``span``."""
    parts = []
    for part in goodput.PARTS:
        end = start + ledger.get(part, 0.0)
        parts.append((part, start / span, end / span))
        start = end
    return parts


def timeline(attempts: Sequence[AttemptRecord]) -> tuple[float, float, list[tuple[str, str, list[BarPart]]]]:
    """Return the attempts as bars on one axis of time, from its begin to its end: words, label and parts of each."""
    # The measured parts fill the time up to the end of the attempt, its time in the queue included.
    begins = [attempt.ended - sum(attempt.goodput.get(part, 0.0) for part in goodput.PARTS) for attempt in attempts]
    begins = [min(begin, attempt.started) for begin, attempt in zip(begins, attempts, strict=True)]
    first, last = min(begins), max(attempt.ended for attempt in attempts)
    span = max(last - first, 1e-3)
    bars = []
    for attempt, begin in zip(attempts, begins, strict=True):
        # An attempt without measured parts is drawn as idle.
        ledger = attempt.goodput or {"idle": attempt.ended - attempt.started}
        words = f"{attempt.attempt}: {attempt.cause}" + f", {attempt.decision}" * bool(attempt.decision)
        label = (
            f"attempt {words}, {in_units(attempt.ended - attempt.started)} from {format_time(attempt.started)} UTC on"
        )
        bars.append((words, label, _stacked(ledger, begin - first, span)))
    return first, last, bars


MARKS = {"L": "lost", "F": "first to fail", "S": "slow", "G": "given up for a spare"}


def node_map(facts: ReportFacts, attempts: Sequence[AttemptRecord]) -> list[NodeRow]:
    """Return what went wrong on which node. Nodes with a remark come first; those beyond a page are only counted."""
    marks = [_marks(attempt) for attempt in attempts]
    remarks: dict[str, list[str]] = {}
    for words, nodes in (("no longer used", facts.told["bad_nodes"]), ("", facts.told["degraded_nodes"])):
        for host, why in nodes.items():
            remarks.setdefault(host, []).append(f"{words}: {why}".removeprefix(": "))
    nodes = dict.fromkeys(host for attempt in attempts for host in attempt.nodes)
    # Nodes with trouble come first, because a long list is shown in part.
    first = dict.fromkeys([*remarks, *(host for of_attempt in marks for host in of_attempt)])
    shown = list(dict.fromkeys([*first, *nodes]))[:MOST_NODES]

    # By their numbers: node9 comes before node10.
    def place(host: str) -> tuple[bool, str, int]:
        head = host.rstrip("0123456789")
        return host not in first, head, int(host[len(head) :] or 0)

    used = [{*attempt.nodes} for attempt in attempts]
    rows: list[NodeRow] = []
    for host in sorted(shown, key=place):
        cells = [
            (found[host], ", ".join(MARKS[mark] for mark in found[host]))
            if host in found
            else ("●" if host in hosts else "", "")
            for hosts, found in zip(used, marks, strict=True)
        ]
        rows.append((host, cells, "; ".join(remarks.get(host, []))))
    if rest := {*nodes} - {*shown}:
        rows.append(
            (f"{len(rest)} more nodes", [(str(len(hosts & rest)), "") for hosts in used], "nothing wrong with them")
        )
    return rows


def _marks(attempt: AttemptRecord) -> dict[str, str]:
    found: dict[str, str] = {}
    failed = [attempt.first_failure.host] if attempt.first_failure is not None and attempt.first_failure.host else []
    slow = [straggler.host for straggler in attempt.slow_nodes]
    for mark, hosts in (("L", attempt.lost_nodes), ("F", failed), ("S", slow), ("G", attempt.vacated_nodes)):
        for host in hosts:
            found[host] = found.get(host, "") + mark
    return found
